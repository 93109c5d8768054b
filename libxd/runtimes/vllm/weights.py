"""A vLLM model's weights by Hugging Face name: fused layers taken apart, prepacked ones asked for what they hold.

On a CPU, vLLM packs the weight of a linear layer for its matrix product and leaves a parameter of shape [0]; so does
the head, beside the embedding that it is tied to. What such a layer holds is the product that it gives for the
identity matrix: a sum of one weight and of zeros, which is exact in every dtype. Two things it cannot tell. A negative
zero comes out as a positive one (no product depends on it), and a weight that is no number spoils its whole row; both
make weights look foreign that are not, never the other way round.

Shapes: N outputs, K inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

#: rows of the identity that go through a layer together
_ROWS = 1024
#: the name of a head's weight, which a checkpoint whose head is tied need not have
HEAD = "lm_head.weight"


class Group(NamedTuple):
    """Weights that one parameter of vLLM holds: their names, and the tensors, made when they are asked for."""

    names: list[str]
    take: Callable[[], Sequence[Tensor]]


def named(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every weight held now, as the checkpoint names it; a head that holds what its embedding does comes once."""
    for group in _groups(model):
        yield from zip(group.names, group.take(), strict=True)
    if _tied(model) and not torch.equal(head(model), _rows(model.lm_head, model.lm_head.weight.detach())):
        yield HEAD, head(model)


def names(model: Any) -> set[str]:
    """The names that a checkpoint may have for what the model holds; nothing is computed."""
    return {name for group in _groups(model) for name in group.names} | ({HEAD} if _tied(model) else set())


def head(model: Any) -> Tensor:
    """[V, H]: what the head multiplies hidden states with."""
    return _rows(model.lm_head, _held(model.lm_head, model.lm_head.embedding_dim))


def _tied(model: Any) -> bool:
    """Whether the head's parameter is an embedding's; on a CPU it has a packed copy of its own all the same."""
    return any(
        module.weight is model.lm_head.weight
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and module is not model.lm_head
    )


def _groups(model: Any) -> Iterator[Group]:
    """The weights parameter by parameter, without a tied head."""
    parts_of = getattr(model, "packed_modules_mapping", {})
    for name, module in model.named_modules():
        if module is model.lm_head and _tied(model):
            continue
        if isinstance(module, LinearBase):
            yield from _of_linear(name, module, parts_of)
            continue
        for own, parameter in module.named_parameters(recurse=False):
            yield Group([f"{name}.{own}".lstrip(".")], partial(_whole, module, own, parameter))


def _whole(module: Any, own: str, parameter: Tensor) -> list[Tensor]:
    """A parameter that is one weight: of embeddings without the rows that pad them, of a head what multiplies."""
    if isinstance(module, ParallelLMHead) and own == "weight":
        return [_rows(module, _held(module, module.embedding_dim))]
    return [_rows(module, parameter.detach()) if isinstance(module, VocabParallelEmbedding) else parameter.detach()]


def _rows(module: Any, held: Tensor) -> Tensor:
    """Without the rows that pad the vocabulary."""
    return held[: module.org_vocab_size]


def _of_linear(name: str, module: Any, parts_of: dict[str, list[str]]) -> Iterator[Group]:
    path, _, own = name.rpartition(".")
    parts = [f"{path}.{part}" for part in parts_of[own]] if own in parts_of else [name]
    sizes = module.output_partition_sizes if own in parts_of else [sum(module.output_partition_sizes)]
    held = partial(_held, module, module.input_size_per_partition)
    yield Group([f"{part}.weight" for part in parts], lambda: held().split(sizes))
    if module.bias is not None:
        # some packed layers keep it in float32, which holds the values of every dtype
        yield Group([f"{part}.bias" for part in parts], lambda: _bias(module).split(sizes))


def _bias(module: Any) -> Tensor:
    return module.bias.detach().to(module.weight.dtype)


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

