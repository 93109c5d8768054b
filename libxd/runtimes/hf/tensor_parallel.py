"""Tensor parallelism: each matrix split over ranks, by output rows or by input columns, as the model's own plan says.

The parameters that a rank holds are DTensors, whose placements say what of the whole they are. Products are made of the
local parts; partial sums are added over the ranks in the compute dtype, as a serving engine does.
Shapes: M rows, L columns, I and O inputs and outputs of a layer, V vocabulary, R ranks.
"""

from __future__ import annotations

import re
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

from libxd.errors import Status, XdError

#: what transformers' plans say of a module that stays whole where nothing is trained
_WHOLE = ("replicated_with_grad_allreduce",)


def split(model: Any, mesh: DeviceMesh) -> None:
    """Split the matrices of a causal language model in place over a mesh of one dimension.

    The embedding and the head are split by vocabulary rows, a tied pair once. XdError 69 for a model that transformers
    has no such plan for.
    """
    plan: dict[str, str] = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    found = {name: how for name, module in model.base_model.named_modules() if (how := _how(plan, name)) is not None}
    unknown = sorted({how for how in found.values() if how not in (*_STYLES, *_WHOLE)})
    whole = [name for name, module in model.base_model.named_modules()
             if isinstance(module, nn.Linear) and found.get(name) not in _STYLES]  # fmt: skip
    if unknown or whole or not found:
        raise XdError("cannot be split over ranks as transformers plans it", status=Status.REFUSED,
                      code="unsupported-model", where=type(model).__name__,
                      found=unknown or whole[:1] or None)  # fmt: skip
    for name, how in found.items():
        if how in _STYLES:
            axis, forward = _STYLES[how]
            _place(model.base_model.get_submodule(name), mesh, axis, forward)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    _place(embedding, mesh, 0, _embed)
    if tied:
        head.weight = embedding.weight
        _run(head, _all_columns)
    else:
        _place(head, mesh, 0, _all_columns)


def vocabulary_rows(model: Any) -> list[list[int]]:
    """First row and the one behind the last, of the head's weight, as each rank of its mesh holds it."""
    weight = model.get_output_embeddings().weight
    if not isinstance(weight, DTensor):
        return [[0, weight.shape[0]]]
    held = weight.to_local().shape[0]
    rows = [torch.zeros(1, dtype=torch.long, device=weight.device) for _ in range(weight.device_mesh.size())]
    dist.all_gather(rows, torch.tensor([held], device=weight.device), group=weight.device_mesh.get_group())
    ends = torch.cat(rows).cumsum(0).tolist()
    return [list(pair) for pair in zip([0, *ends[:-1]], ends, strict=True)]


def _how(plan: dict[str, str], name: str) -> str | None:
    """The plan's entry for a module; a star stands for a number."""
    return plan.get(name) or plan.get(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name))


def _place(module: Any, mesh: DeviceMesh, axis: int, forward: Any) -> None:
    """Keep this rank's part of the weight along `axis`; a bias goes with output rows, else stays whole."""
    weight = distribute_tensor(module.weight.detach(), mesh, [Shard(axis)], src_data_rank=None)
    module.weight = nn.Parameter(weight, requires_grad=False)
    bias = getattr(module, "bias", None)
    if bias is not None and axis == 0:
        split_bias = distribute_tensor(bias.detach(), mesh, [Shard(0)], src_data_rank=None)
        module.bias = nn.Parameter(split_bias, requires_grad=False)
    _run(module, forward)


def _run(module: Any, forward: Any) -> None:
    """Hooks on the module stay."""
    module.forward = MethodType(forward, module)


def _group(module: Any) -> Any:
    return module.weight.device_mesh.get_group()


def _columns(module: Any, x: Tensor) -> Tensor:
    """This rank's outputs [M, L, O / R] of inputs [M, L, I]."""
    return functional.linear(x, module.weight.to_local(), None if module.bias is None else module.bias.to_local())


def _sum(module: Any, x: Tensor) -> Tensor:
    """All outputs [M, L, O] of this rank's inputs [M, L, I / R]: partial sums, added over the ranks."""
    total = functional.linear(x, module.weight.to_local())
    dist.all_reduce(total, group=_group(module))
    return total if module.bias is None else total + module.bias


def _embed(module: Any, ids: Tensor) -> Tensor:
    """Embeddings [M, L, I]: each is some rank's row, and zeros from all others."""
    weight = module.weight.to_local()
    mesh = module.weight.device_mesh
    first = mesh.get_local_rank() * -(-module.weight.shape[0] // mesh.size())
    local = ids - first
    own = (local >= 0) & (local < weight.shape[0])
    rows = functional.embedding(local.where(own, local.new_zeros(())), weight) if len(weight) else weight.new_zeros(
        (*ids.shape, weight.shape[1])
    )
    rows.masked_fill_(~own.unsqueeze(-1), 0)
    dist.all_reduce(rows, group=_group(module))
    return rows


def _all_columns(module: Any, x: Tensor) -> Tensor:
    """Logits [N, V]: each rank's columns, side by side in rank order, without what pads the last ones."""
    vocabulary, ranks = module.weight.shape[0], module.weight.device_mesh.size()
    own = _columns(module, x)
    width = -(-vocabulary // ranks)
    if own.shape[-1] < width:
        own = functional.pad(own, (0, width - own.shape[-1]))
    parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(parts, own.contiguous(), group=_group(module))
    return torch.cat(parts, dim=-1)[..., :vocabulary]


#: how a plan's word splits a weight [O, I], and what runs then
_STYLES = {"colwise": (0, _columns), "rowwise": (1, _sum)}
