"""The decoder: one forward over rows of tokens, whatever holds its weights, runs its operations and attends.

Legend: M rows (tokens of any sequences, one after another), E hidden, V vocabulary, H/G query/key heads of a rank.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from libxd.runtimes.cpu_smoke import attention, gemm
from libxd.runtimes.cpu_smoke.cache import BlockTable
from libxd.runtimes.cpu_smoke.geometry import Geometry
from libxd.runtimes.cpu_smoke.kernels import Kernels
from libxd.runtimes.cpu_smoke.shards import EMBEDDING, HEAD, FlatShardStore, TensorParallelStore, layer_unit
from libxd.runtimes.protocol import Piece


class Attention(Protocol):
    """What a layer's attention runs on. `pieces` say whose rows are whose, in row order."""

    pieces: list[Piece]

    def run(self, layer: int, queries: list[Tensor], keys: list[Tensor], values: list[Tensor]) -> list[Tensor]:
        """A rank an entry: [M, H, D], [M, G, D], [M, G, D] -> [M, H, D]."""

    def attended(self) -> list[bool]:
        """Which of the M rows may be seen by later ones."""


class TeacherForcedAttention:
    """Whole sequences, no cache. `attended[s]` bool [count] says which tokens of piece s may be seen."""

    def __init__(self, implementation: str, pieces: list[Piece], attended: list[Tensor]) -> None:
        self.pieces = pieces
        self.ran: set[str] = set()
        self._attend = attention.IMPLEMENTATIONS[implementation]
        self._attended = attended

    def run(self, layer: int, queries: list[Tensor], keys: list[Tensor], values: list[Tensor]) -> list[Tensor]:
        return [self._rank(*parts) for parts in zip(queries, keys, values, strict=True)]

    def attended(self) -> list[bool]:
        return [bool(seen) for part in self._attended for seen in part]

    def _rank(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outs, row = [], 0
        for piece, attended in zip(self.pieces, self._attended, strict=True):
            rows = slice(row, row + piece.count)
            visible = torch.ones(piece.count, piece.count, dtype=torch.bool).tril() & attended
            outs.append(self._attend(query[rows], key[rows], value[rows], visible))
            self.ran.add(self._attend.__name__)
            row += piece.count
        return torch.cat(outs)


class PagedAttention:
    """Through the KV cache: a layer's keys and values are stored before any is read, then each sequence attends.

    Context-parallel ranks each attend over the blocks they own; what they send (outputs in the compute dtype,
    log-sum-exps in float32) is merged in rank order. `merged` collects of how many blocks a cache was, and how many
    ranks took part.
    """

    def __init__(self, kernels: Kernels, pieces: list[Piece], tables: list[BlockTable]) -> None:
        self.pieces = pieces
        self.merged: set[tuple[int, int]] = set()
        self._kernels = kernels
        self._tables = tables

    def run(self, layer: int, queries: list[Tensor], keys: list[Tensor], values: list[Tensor]) -> list[Tensor]:
        for rank, (key, value) in enumerate(zip(keys, values, strict=True)):
            row = 0
            for piece, table in zip(self.pieces, self._tables, strict=True):
                rows = slice(row, row + piece.count)
                table.write(layer, rank, piece.start, key[rows], value[rows])
                row += piece.count
        return [self._rank(layer, rank, query) for rank, query in enumerate(queries)]

    def attended(self) -> list[bool]:
        return [
            seen
            for piece, table in zip(self.pieces, self._tables, strict=True)
            for seen in table.attended()[piece.start : piece.start + piece.count]
        ]

    def _rank(self, layer: int, rank: int, query: Tensor) -> Tensor:
        outs, row = [], 0
        for piece, table in zip(self.pieces, self._tables, strict=True):
            queried = torch.arange(piece.start, piece.start + piece.count).unsqueeze(1)
            part = query[row : row + piece.count]
            partials = []
            for key, value, index, attended in table.shards(layer, rank):
                out, lse = self._kernels.attend(part, key, value, (index <= queried) & attended)
                partials.append((out.to(query.dtype).float(), lse))
            self.merged.add((len(table.blocks), len(partials)))
            out = partials[0][0] if len(partials) == 1 else attention.merge(partials)
            outs.append(out.to(query.dtype))
            row += piece.count
        return torch.cat(outs)


class LogitsHead(nn.Module):
    """The product with the head's weight, as a module of its own: what it gives can be watched."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels

    def forward(self, normed: Tensor, weight: Tensor) -> Tensor:
        """normed [N, E], weight [V / ranks, E] -> logits [N, V / ranks] in the compute dtype."""
        return self._kernels.linear(normed, weight)


class Decoder(nn.Module):
    """Tokens in, hidden states out. `summed` collects over how many ranks partial sums were added."""

    def __init__(
        self, geometry: Geometry, store: TensorParallelStore | FlatShardStore, kernels: Kernels, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.geometry, self.store, self.kernels, self.dtype = geometry, store, kernels, dtype
        self.summed: set[int] = set()
        self.logits = LogitsHead(kernels)
        frequencies = gemm.inverse_frequencies(geometry.head_dim, geometry.rope_theta)
        self.register_buffer("rotary_frequencies", frequencies, persistent=False)
        self.eval()

    def forward(self, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """ids, positions int64 [M] -> hidden states before the last norm [M, E] in the compute dtype."""
        cos, sin = gemm.rotary(positions, self.rotary_frequencies)
        x = self._embed(ids)
        for layer in range(self.geometry.layers):
            ranks = self.store.unit(layer_unit(layer))
            x = x + self._attention(layer, ranks, x, cos, sin, attention)
            x = x + self._mlp(ranks, x)
        return x

    def head(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The normed hidden states [M, E] and the head's weight, a vocabulary shard [V / ranks, E] a rank."""
        ranks = self.store.unit(HEAD)
        return self.kernels.norm(x, ranks[0]["norm"], self.geometry.norm_epsilon), [r["lm_head"] for r in ranks]

    def _embed(self, ids: Tensor) -> Tensor:
        """Each rank looks up the rows it holds and gives zeros for the others: their sum is exact."""
        ranks = self.store.unit(EMBEDDING)
        partials, first = [], 0
        for rank in ranks:
            weight = rank["embed_tokens"]
            local = ids - first
            held = (local >= 0) & (local < weight.shape[0])
            partials.append(weight[local.clamp(0, weight.shape[0] - 1)] * held.unsqueeze(1).to(weight.dtype))
            first += weight.shape[0]
        return self._all_reduce(partials)

    def _attention(
        self, layer: int, ranks: list[dict[str, Tensor]], x: Tensor, cos: Tensor, sin: Tensor, attention: Attention
    ) -> Tensor:
        queries, keys, values = [], [], []
        for rank in ranks:
            query, key, value = self.kernels.norm_linear(
                x, rank["input_layernorm"], self.geometry.norm_epsilon,
                [rank["q_proj"], rank["k_proj"], rank["v_proj"]],
            )  # fmt: skip
            queries.append(self.kernels.rotate(self._heads(query), cos, sin, self.dtype))
            keys.append(self.kernels.rotate(self._heads(key), cos, sin, self.dtype))
            values.append(self._heads(value).to(self.dtype))
        outs = attention.run(layer, queries, keys, values)
        return self._all_reduce([
            self.kernels.linear(out.reshape(x.shape[0], -1), rank["o_proj"])
            for out, rank in zip(outs, ranks, strict=True)
        ])  # fmt: skip

    def _mlp(self, ranks: list[dict[str, Tensor]], x: Tensor) -> Tensor:
        partials = []
        for rank in ranks:
            gate, up = self.kernels.norm_linear(
                x, rank["post_attention_layernorm"], self.geometry.norm_epsilon, [rank["gate_proj"], rank["up_proj"]]
            )
            partials.append(self.kernels.linear(self.kernels.gate(gate, up, self.dtype), rank["down_proj"]))
        return self._all_reduce(partials)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.geometry.head_dim))

    def _all_reduce(self, partials: list[Tensor]) -> Tensor:
        self.summed.add(len(partials))
        return gemm.all_reduce(partials)
