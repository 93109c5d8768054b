"""A vLLM rank's weights by Hugging Face name: fused layers taken apart, prepacked ones asked for what they hold.

On a CPU, vLLM packs the weight of a linear layer for its matrix product and leaves a parameter of shape [0]; so does
the head, beside the embedding that it is tied to. What such a layer holds is the product that it gives for the
identity matrix: a sum of one weight and of zeros, which is exact in every dtype. Two things it cannot tell. A negative
zero comes out as a positive one (no product depends on it), and a weight that is no number spoils its whole row; both
make weights look foreign that are not, never the other way round.

That costs as much as a forward of K tokens, and a packed copy is never written to: vLLM packs anew what it loads. So
what was recovered is kept, and holds for as long as the layer has that very copy and, asked again, the product of some
rows by it is bit for bit what it was.

Shapes: N outputs, K inputs of a rank's layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from libxd.runtimes.vllm.shards import HEAD, Part

#: rows of the identity that go through a layer together, and of what a layer is probed with
_ROWS, _PROBES = 1024, 8


class _Recovered(NamedTuple):
    """What a packed layer holds: `weight` [N, K], found when `packed` gave `probed` [_PROBES, N] for the probe."""

    packed: Callable[..., Tensor]
    probed: Tensor
    weight: Tensor


_recovered: weakref.WeakKeyDictionary[nn.Module, _Recovered] = weakref.WeakKeyDictionary()


class Group(NamedTuple):
    """Weights that one parameter of vLLM holds, and the rank's tensors of them, made when they are asked for.

    Of a head that is tied, there is none where it holds what its embedding does.
    """

    parts: list[Part]
    take: Callable[[], Sequence[Tensor]]


def groups(model: Any) -> list[Group]:
    """Every weight, parameter by parameter, in the order of the model's modules; a tied head comes last."""
    tied = [Group([Part(HEAD, 0)], partial(_if_untied, model))] if _tied(model) else []
    return [*_groups(model), *tied]


def head(model: Any) -> Tensor:
    """[V, H]: what the head multiplies hidden states with, this rank's rows of it."""
    return _rows(model.lm_head, _held(model.lm_head, model.lm_head.embedding_dim))


def _tied(model: Any) -> bool:
    """Whether the head's parameter is an embedding's; on a CPU it has a packed copy of its own all the same."""
    return any(
        module.weight is model.lm_head.weight
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and module is not model.lm_head
    )


def _if_untied(model: Any) -> list[Tensor]:
    held, embedded = head(model), _rows(model.lm_head, model.lm_head.weight.detach())
    return [] if torch.equal(held, embedded) else [held]


def _groups(model: Any) -> Iterator[Group]:
    """The weights parameter by parameter, without a tied head."""
    parts_of = getattr(model, "packed_modules_mapping", {})
    for name, module in model.named_modules():
        if module is model.lm_head and _tied(model):
            continue
        if isinstance(module, LinearBase):
            yield from _of_linear(name, module, parts_of)
            continue
        axis = 0 if isinstance(module, VocabParallelEmbedding) and module.tp_size > 1 else None
        for own, parameter in module.named_parameters(recurse=False):
            yield Group([Part(f"{name}.{own}".lstrip("."), axis)], partial(_one, module, own, parameter))


def _one(module: Any, own: str, parameter: Tensor) -> list[Tensor]:
    """A parameter that is one weight: of embeddings without the rows that pad them, of a head what multiplies."""
    if isinstance(module, ParallelLMHead) and own == "weight":
        return [_rows(module, _held(module, module.embedding_dim))]
    return [_rows(module, parameter.detach()) if isinstance(module, VocabParallelEmbedding) else parameter.detach()]


def _rows(module: Any, held: Tensor) -> Tensor:
    """Without the rows that pad the vocabulary."""
    return held[: module.shard_indices.num_org_elements]


def _of_linear(name: str, module: Any, parts_of: dict[str, list[str]]) -> Iterator[Group]:
    path, _, own = name.rpartition(".")
    fused = own in parts_of
    parts = [f"{path}.{part}" for part in parts_of[own]] if fused else [name]
    sizes = module.output_partition_sizes if fused else [sum(module.output_partition_sizes)]
    split = module.tp_size > 1  # some layers are held whole by every rank
    outputs = 0 if split and isinstance(module, ColumnParallelLinear) else None
    axis = 1 if split and isinstance(module, RowParallelLinear) else outputs
    # queries, keys, values: the ranks that share a key-value head hold it alike
    copies = [1] + [getattr(module, "num_kv_head_replicas", 1)] * (len(parts) - 1)
    held = partial(_held, module, module.input_size_per_partition)
    yield Group([Part(f"{part}.weight", axis, n) for part, n in zip(parts, copies, strict=True)],
                lambda: held().split(sizes))  # fmt: skip
    if module.bias is not None:
        # some packed layers keep it in float32, which holds the values of every dtype
        yield Group([Part(f"{part}.bias", outputs, n) for part, n in zip(parts, copies, strict=True)],
                    lambda: _bias(module).split(sizes))  # fmt: skip


def _bias(module: Any) -> Tensor:
    return module.bias.detach().to(module.weight.dtype)


def _held(module: Any, inputs: int) -> Tensor:
    """[N, K], out of a layer whose product is made of a packed copy; else its parameter."""
    packed = getattr(module, "cpu_linear", nn.functional.linear)
    if packed is nn.functional.linear:
        return module.weight.detach()
    probed = _product(module, _probe(inputs, module.weight.dtype))
    known = _recovered.get(module)
    if known is None or known.packed is not packed or not torch.equal(known.probed, probed):
        known = _recovered[module] = _Recovered(packed, probed, _recover(module, inputs))
    return known.weight


def _recover(module: Any, inputs: int) -> Tensor:
    """[N, K] by the identity matrix, some rows of it at a time."""
    columns = []
    for first in range(0, inputs, _ROWS):
        rows = min(_ROWS, inputs - first)
        units = torch.zeros(rows, inputs, dtype=module.weight.dtype)
        units[torch.arange(rows), torch.arange(first, first + rows)] = 1
        columns.append(_product(module, units).t())
    return torch.cat(columns, dim=1)


def _product(module: Any, rows: Tensor) -> Tensor:
    with torch.inference_mode():
        return module.quant_method.apply(module, rows, None)


def _probe(inputs: int, dtype: torch.dtype) -> Tensor:
    """[_PROBES, K], the same at every call."""
    return torch.randn(_PROBES, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
