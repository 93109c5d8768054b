"""How a side holds its weights: whole, split over tensor-parallel ranks, or as flat FSDP shards.

A store hands out one *unit* at a time (the embedding, a layer, the head): a dict of tensors a rank, keyed by the last
words of the Hugging Face name. `full` undoes the split, so that the weights held can be digested by name.
Ranks live in this process; what is computed a rank, and in what order partial results are added, is as with processes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from libxd.runtimes.cpu_smoke.geometry import Geometry, layer_prefix

EMBEDDING, HEAD = "embedding", "head"
#: along which axis a matrix is split over tensor-parallel ranks: output rows (0), input columns (1); others are copied
_SPLIT_AXIS = {
    "embed_tokens": 0, "lm_head": 0, "q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1,
    "gate_proj": 0, "up_proj": 0, "down_proj": 1,
}  # fmt: skip

FSDP_WORLD_SIZE = 2


def units(geometry: Geometry) -> dict[str, list[str]]:
    """Unit -> the Hugging Face names it is made of."""
    names = list(geometry.shapes())
    made = {EMBEDDING: ["model.embed_tokens.weight"]}
    for layer in range(geometry.layers):
        made[layer_unit(layer)] = [name for name in names if name.startswith(layer_prefix(layer))]
    return made | {HEAD: ["model.norm.weight", "lm_head.weight"]}


def layer_unit(layer: int) -> str:
    return f"layer.{layer}"


def short(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.weight` -> `q_proj`."""
    return name.split(".")[-2]


class TensorParallelStore(nn.Module):
    """Every matrix split over `world_size` ranks (1: whole). Norm gains are copied to every rank."""

    def __init__(self, geometry: Geometry, parameters: dict[str, Tensor], world_size: int) -> None:
        super().__init__()
        self._units = units(geometry)
        self._shards: dict[str, list[nn.Parameter]] = {}
        for name, tensor in parameters.items():
            axis = _SPLIT_AXIS.get(short(name))
            parts = [tensor] * world_size if axis is None else list(tensor.chunk(world_size, dim=axis))
            held = nn.ParameterList(nn.Parameter(part.clone(), requires_grad=False) for part in parts)
            self.add_module(name.replace(".", "_"), held)
            self._shards[name] = list(held)

    def unit(self, unit: str) -> list[dict[str, Tensor]]:
        names = self._units[unit]
        ranks = len(self._shards[names[-1]])
        return [{short(name): self._shards[name][rank] for name in names} for rank in range(ranks)]

    def full(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face name and whole tensor, the split undone."""
        for name, parts in self._shards.items():
            axis = _SPLIT_AXIS.get(short(name))
            yield name, parts[0].detach() if axis is None else torch.cat([part.detach() for part in parts], dim=axis)

    def split_matrices(self) -> dict[str, list[list[int]]]:
        """The shapes held a rank, of every matrix: what a read-back counts ranks by."""
        return {
            name: [list(part.shape) for part in parts]
            for name, parts in self._shards.items()
            if short(name) in _SPLIT_AXIS
        }


class FlatShardStore(nn.Module):
    """FSDP: the parameters of a unit laid end to end, padded, cut into equal flat shards, gathered before each use."""

    def __init__(self, geometry: Geometry, parameters: dict[str, Tensor], world_size: int) -> None:
        super().__init__()
        self._shapes = geometry.shapes()
        self._units = units(geometry)
        self._shards: dict[str, list[nn.Parameter]] = {}
        self.gathers = 0
        self.gathered_shards: set[int] = set()
        for unit, names in self._units.items():
            flat = torch.cat([parameters[name].reshape(-1) for name in names])
            padding = -flat.numel() % world_size
            flat = torch.cat([flat, flat.new_zeros(padding)])
            parts = flat.chunk(world_size)
            shards = nn.ParameterList(nn.Parameter(part.clone(), requires_grad=False) for part in parts)
            self.add_module(unit.replace(".", "_"), shards)
            self._shards[unit] = list(shards)

    def unit(self, unit: str) -> list[dict[str, Tensor]]:
        self.gathers += 1
        self.gathered_shards.add(len(self._shards[unit]))
        return [{short(name): tensor for name, tensor in self._gather(unit)}]

    def full(self) -> Iterator[tuple[str, Tensor]]:
        for unit in self._units:
            yield from self._gather(unit)

    def _gather(self, unit: str) -> Iterator[tuple[str, Tensor]]:
        flat = torch.cat([shard.detach() for shard in self._shards[unit]])
        offset = 0
        for name in self._units[unit]:
            shape = self._shapes[name]
            count = int(torch.Size(shape).numel())
            yield name, flat[offset : offset + count].view(shape)  # zero padding at the end stays behind
            offset += count

    def flat_shards(self) -> dict[str, list[int]]:
        """Elements a shard, a unit."""
        return {unit: [shard.numel() for shard in shards] for unit, shards in self._shards.items()}
