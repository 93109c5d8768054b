"""A vLLM model's weights by Hugging Face name: fused layers taken apart, prepacked ones asked for what they hold.

On a CPU, vLLM packs the weight of a linear layer for its matrix product and leaves a parameter of shape [0]; so does
the head, beside the embedding that it is tied to. What such a layer holds is the product that it gives for the
identity matrix: a sum of one weight and of zeros, which is exact in every dtype. Two things it cannot tell. A negative
zero comes out as a positive one (no product depends on it), and a weight that is no number spoils its whole row; both
make weights look foreign that are not, never the other way round.

Shapes: N outputs, K inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

#: rows of the identity that go through a layer together
_ROWS = 1024


def named(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every weight held now, as the checkpoint names it; a head that holds what its embedding does comes once."""
    parts_of = getattr(model, "packed_modules_mapping", {})
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, ParallelLMHead):
            yield from _of_head(name, module, seen)
        elif isinstance(module, VocabParallelEmbedding):
            seen.add(id(module.weight))
            yield f"{name}.weight", module.weight.detach()[: module.org_vocab_size]
        elif isinstance(module, LinearBase):
            yield from _of_linear(name, module, parts_of)
        else:
            for own, parameter in module.named_parameters(recurse=False):
                yield f"{name}.{own}" if name else own, parameter.detach()


def head(model: Any) -> Tensor:
    """[V, H]: what the head multiplies hidden states with."""
    return _held(model.lm_head, model.lm_head.embedding_dim)[: model.lm_head.org_vocab_size]


def _of_head(name: str, module: Any, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    held = _held(module, module.embedding_dim)
    tied = id(module.weight) in seen
    if not tied or not _same_bits(held, module.weight):
        yield f"{name}.weight", held[: module.org_vocab_size]
    if module.bias is not None:
        yield f"{name}.bias", module.bias.detach()[: module.org_vocab_size]


def _of_linear(name: str, module: Any, parts_of: dict[str, list[str]]) -> Iterator[tuple[str, Tensor]]:
    path, _, own = name.rpartition(".")
    held = {"weight": _held(module, module.input_size_per_partition)}
    if module.bias is not None:
        held["bias"] = module.bias.detach().to(held["weight"].dtype)  # some packed layers keep it in float32
    for kind, tensor in held.items():
        if own not in parts_of:
            yield f"{name}.{kind}", tensor
            continue
        pieces = tensor.split(module.output_partition_sizes)
        for part, piece in zip(parts_of[own], pieces, strict=True):
            yield f"{path}.{part}.{kind}", piece


def _held(module: Any, inputs: int) -> Tensor:
    """[N, K], out of a layer whose product is made of a packed copy; else its parameter."""
    packed = getattr(module, "cpu_linear", nn.functional.linear)
    if packed is nn.functional.linear:
        return module.weight.detach()
    columns = []
    with torch.inference_mode():
        for first in range(0, inputs, _ROWS):
            rows = min(_ROWS, inputs - first)
            units = torch.zeros(rows, inputs, dtype=module.weight.dtype)
            units[torch.arange(rows), torch.arange(first, first + rows)] = 1
            columns.append(module.quant_method.apply(module, units, None).t())
    return torch.cat(columns, dim=1)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Equality of values, and of zeros whatever their signs."""
    return one.shape == other.shape and torch.equal(one, other)
