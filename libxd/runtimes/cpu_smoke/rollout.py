"""The rollout side: batches of sequences through a paged KV cache, a token a step (decode) or in one pass (prefill)."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from libxd.runtimes.cpu_smoke.cache import BLOCK_TOKENS, BlockPool, BlockTable, Prefix
from libxd.runtimes.cpu_smoke.engine import Engine, build
from libxd.runtimes.cpu_smoke.kernels import EagerKernels, FusedKernels
from libxd.runtimes.cpu_smoke.model import PagedAttention
from libxd.runtimes.cpu_smoke.shards import TensorParallelStore
from libxd.runtimes.protocol import Observation, Piece, Request, Scores
from libxd.scoring.observer import Observer
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
        self._merged: set[tuple[int, int]] = set()
        self._prompts: list[Prefix] = []
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
            "rollout.context_parallel_size": self._cache_ranks(),
            "rollout.enable_prefix_caching": self._shared_blocks(),
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

    def _cache_ranks(self) -> Observation:
        """Over how many ranks caches were dealt. One of fewer blocks than ranks has one a rank: it fits them all."""
        dealt = {ranks for blocks, ranks in self._merged if ranks < blocks}
        at_least = max((ranks for _, ranks in self._merged), default=0)
        evidence = {"blocks_and_shards_merged": sorted(map(list, self._merged))}
        if not dealt:
            ranks = self._pool.context_parallel_size
            return Observation(ranks if ranks >= at_least else None, evidence)
        return Observation(at_least if dealt == {at_least} else None, evidence)

    def _shared_blocks(self) -> Observation:
        """True: each full block that ended a known prefix was found and shared. False: none was, and none was kept.

        Prompts of less than a block leave nothing to keep: there it is what the cache is set to.
        """
        pool, known, shareable = self._pool, set(), 0
        for prompt in self._prompts:
            shareable += sum(prompt[:end] in known for end in range(BLOCK_TOKENS, len(prompt), BLOCK_TOKENS))
            known.update(prompt[:end] for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS))
        evidence = {"shareable": shareable, "lookups": pool.lookups, "hits": pool.hits, "kept": pool.kept,
                    "blocks": pool.allocated}  # fmt: skip
        if not known:
            return Observation(pool.share_prefixes, evidence)
        if pool.kept:
            return Observation(True if pool.hits == shareable and pool.kept == len(known) else None, evidence)
        return Observation(None if pool.hits else False, evidence)

    def _kept_cache(self) -> bool:
        return self._pool.allocated > 0

    def _score_batch(
        self, sequences: Sequences, batch: list[int], request: Request, observer: Observer, logprobs: np.ndarray
    ) -> None:
        """Prompts first, in one forward; then, decoding, a token of every unfinished sequence a forward."""
        lengths = {s: int(sequences.cu_seqlens[s + 1] - sequences.cu_seqlens[s]) for s in batch}
        prompts = {s: int(sequences.prompt_lens[s]) for s in batch}
        tables: dict[int, BlockTable] = {}
        shared: dict[int, list[int]] = {}
        pieces: list[Piece] = []
        for s in batch:
            prompt, first = _cells(sequences, s, prompts[s]), int(sequences.cu_seqlens[s])
            self._prompts.append(prompt)
            table = tables[s] = self._pool.table(prompt, first)
            shared[s] = [origin for index, origin in enumerate(table.origins()) if origin != first + index]
            start = len(shared[s])
            if request.mode == "prefill":
                table.reserve(_attended(sequences, s, prompts[s], lengths[s]))
            pieces.append(Piece(s, start, table.length - start))
        while pieces:
            hidden = self._run(sequences, pieces, tables)
            self._score_following(sequences, pieces, hidden, request, observer, logprobs)
            unfinished = [s for s in batch if tables[s].length < lengths[s]]
            pieces = [Piece(s, tables[s].length, 1) for s in unfinished]
            for s in unfinished:
                tables[s].reserve(_attended(sequences, s, tables[s].length, tables[s].length + 1))
        for s in batch:  # what fills a shared block was fed in this batch's first forward at the latest
            for index, origin in enumerate(shared[s]):
                observer.shared_cells(int(sequences.cu_seqlens[s]) + index, origin, 1)

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
