"""The rollout side: chunks of sequences through a paged KV cache, a token a step (decode) or in one pass (prefill)."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from torch import Tensor

from libxd.runtimes.cpu_smoke.cache import BlockPool, BlockTable
from libxd.runtimes.cpu_smoke.engine import Engine, build
from libxd.runtimes.cpu_smoke.kernels import EagerKernels, FusedKernels
from libxd.runtimes.cpu_smoke.model import PagedAttention, Piece
from libxd.runtimes.cpu_smoke.recorder import Recorder
from libxd.runtimes.cpu_smoke.shards import TensorParallelStore
from libxd.runtimes.protocol import Observation, Request, Scores
from libxd.sequences import Sequences


class RolloutEngine(Engine):
    """`engine` are the arguments that materialising wrote down."""

    def __init__(self, synthetic: dict[str, Any], engine: dict[str, Any]) -> None:
        kernels = EagerKernels() if engine["enforce_eager"] else FusedKernels()
        super().__init__(
            build(synthetic, engine["dtype"], kernels, tensor_parallel_size=engine["tensor_parallel_size"])
        )
        self._context_parallel_size = engine["context_parallel_size"]
        self._share_prefixes = engine["enable_prefix_caching"]

    def score(self, sequences: Sequences, request: Request) -> Scores:
        self._merged: set[int] = set()
        self._pool = self._new_pool()
        return super().score(sequences, request)

    def settings(self) -> dict[str, Observation]:
        store = self.model.store
        assert isinstance(store, TensorParallelStore)
        shapes = store.split_matrices()
        ranks = sorted({len(parts) for parts in shapes.values()})
        return {
            "rollout.tensor_parallel_size": Observation(
                ranks[0] if len(ranks) == 1 else None,
                {"ranks": ranks, "lm_head": shapes["lm_head.weight"]},
            ),
            "rollout.dtype": self._parameter_dtype(),
        }

    def behaviour(self) -> dict[str, Observation]:
        kernels, summed = self.model.kernels, sorted(self.model.summed)
        return {
            "batch.size": self._batch_size(),
            "rollout.tensor_parallel_size": Observation(
                summed[0] if len(summed) == 1 else None, {"partial_sums_added": summed}
            ),
            "rollout.context_parallel_size": Observation(
                max(self._merged, default=None), {"cache_shards_merged": sorted(self._merged)}
            ),
            "rollout.enable_prefix_caching": Observation(
                self._pool.lookups > 0,
                {"lookups": self._pool.lookups, "hits": self._pool.hits, "blocks": self._pool.allocated},
            ),
            "rollout.enforce_eager": Observation(
                kernels.is_eager if kernels.calls else None,
                {"kernels": type(kernels).__name__, "calls": kernels.calls},
            ),
            "logp.backend": self._logp_backend(),
        }

    def _new_pool(self) -> BlockPool:
        shape = self.model.geometry
        store = self.model.store
        assert isinstance(store, TensorParallelStore)
        ranks = len(store.split_matrices()["lm_head.weight"])
        return BlockPool(
            shape.layers, ranks, self._context_parallel_size, (shape.kv_heads // ranks, shape.head_dim),
            self.model.dtype, self._share_prefixes,
        )  # fmt: skip

    def _cache_in_use(self) -> Literal["kv_cache", "none"]:
        return "kv_cache" if self._pool.allocated else "none"

    def _score_chunk(
        self, sequences: Sequences, chunk: list[int], request: Request, recorder: Recorder, logprobs: np.ndarray
    ) -> None:
        """Prompts first, in one forward; then, decoding, a token of every unfinished sequence a forward."""
        lengths = {s: int(sequences.cu_seqlens[s + 1] - sequences.cu_seqlens[s]) for s in chunk}
        prompts = {s: int(sequences.prompt_lens[s]) for s in chunk}
        tables: dict[int, BlockTable] = {}
        pieces: list[Piece] = []
        for s in chunk:
            table = tables[s] = self._pool.table(_cells(sequences, s, prompts[s]), int(sequences.cu_seqlens[s]))
            start = _shared_tokens(table, int(sequences.cu_seqlens[s]), recorder)
            if request.mode == "prefill":
                table.reserve(_attended(sequences, s, prompts[s], lengths[s]))
            pieces.append(Piece(s, start, table.length - start))
        while pieces:
            hidden = self._run(sequences, pieces, tables)
            self._take(sequences, pieces, hidden, request, recorder, logprobs, prompts)
            unfinished = [s for s in chunk if tables[s].length < lengths[s]]
            pieces = [Piece(s, tables[s].length, 1) for s in unfinished]
            for s in unfinished:
                tables[s].reserve(_attended(sequences, s, tables[s].length, tables[s].length + 1))

    def _run(self, sequences: Sequences, pieces: list[Piece], tables: dict[int, BlockTable]) -> Tensor:
        attention = PagedAttention(self.model.kernels, pieces, [tables[piece.sequence] for piece in pieces])
        hidden = self._forward(sequences, attention)
        self._merged |= attention.merged
        return hidden


def _cells(sequences: Sequences, sequence: int, count: int) -> tuple[tuple[int, int, bool], ...]:
    """(id, position, attended) of the first `count` tokens: what a cached prefix is found by."""
    first = int(sequences.cu_seqlens[sequence])
    cells = slice(first, first + count)
    return tuple(
        (int(token), int(position), bool(attended))
        for token, position, attended in zip(
            sequences.token_ids[cells], sequences.positions[cells], sequences.attention_mask[cells], strict=True
        )
    )


def _attended(sequences: Sequences, sequence: int, start: int, end: int) -> list[bool]:
    first = int(sequences.cu_seqlens[sequence])
    return [bool(seen) for seen in sequences.attention_mask[first + start : first + end]]


def _shared_tokens(table: BlockTable, first_cell: int, recorder: Recorder) -> int:
    """How many tokens at the front were found in the cache; the recorder learns where they were fed."""
    shared = 0
    for origin in table.origins():
        if origin == first_cell + shared:
            break
        recorder.shared(first_cell + shared, origin)
        shared += 1
    return shared
