"""The rollout side: prompts prefilled, then the frozen tokens decoded a token a step through the KV cache.

Shapes: M rows still alive, P longest prompt of the batch (padded on the left), H hidden size.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch.distributed.device_mesh import init_device_mesh
from transformers import DynamicCache

from libxd import canon
from libxd.errors import Status, XdError
from libxd.runtimes.hf import decoding, tensor_parallel
from libxd.runtimes.hf.attention import AttentionCalls, explicit_masks
from libxd.runtimes.hf.compiled import Compiled, cannot_compile
from libxd.runtimes.hf.context_parallel import ContextParallel
from libxd.runtimes.hf.decoding import Prompt
from libxd.runtimes.hf.engine import Engine
from libxd.runtimes.hf.prefix import PrefixStore
from libxd.runtimes.protocol import Observation, Request, Scores
from libxd.scoring.observer import Observer, Row
from libxd.sequences import Sequences


class RolloutEngine(Engine):
    """`engine` are the arguments that materialising wrote down."""

    def __init__(self, directory: str, engine: dict[str, Any]) -> None:
        self._compiled: Compiled | None = None
        self._prefixes = PrefixStore()
        self._context: ContextParallel | None = None
        super().__init__(directory, engine)
        self._share_prefixes = engine["enable_prefix_caching"]
        self._stepper = self.base
        if not engine["enforce_eager"]:
            self._compiled = Compiled(self.base)
            self._stepper = self._compiled.module

    def _forget_run(self) -> None:
        super()._forget_run()
        self._steps = 0
        self._prompts: list[str] = []
        self._prefills: list[tuple[int, int]] = []
        self._attention = AttentionCalls()
        if self._compiled is not None:
            self._compiled.forget()

        if self._context is not None:
            self._context.merged.clear()

    def _spread(self, model: Any, engine: dict[str, Any]) -> Any:
        """Ranks lie in a mesh of context by tensor ranks, the tensor ranks side by side."""
        tensor, context = engine["tensor_parallel_size"], engine["context_parallel_size"]
        if tensor * context > 1:
            mesh = init_device_mesh(self.device.type, (context, tensor), mesh_dim_names=("context", "tensor"))
        if tensor > 1:
            tensor_parallel.split(model, mesh["tensor"])
            rows = tensor_parallel.vocabulary_rows(model)
            if engine["vocabulary_rows"] not in (None, rows):
                raise XdError("the vocabulary does not lie over the ranks as planned", status=Status.REFUSED,
                              code="vocabulary-layout", where=type(model).__name__, found=rows,
                              expected=engine["vocabulary_rows"])  # fmt: skip
        if context > 1:
            self._context = ContextParallel(mesh.get_group("context"), mesh.get_local_rank("context"), context)
            self._context.adopt(model)
        return model

    def _attending(self) -> AbstractContextManager[None]:
        return super()._attending() if self._context is None else self._context.attending()

    def settings(self) -> dict[str, Observation]:
        evidence = {**self._placements(), "vocabulary_rows": tensor_parallel.vocabulary_rows(self.model)}
        return {
            "rollout.dtype": self._parameter_dtype(),
            "rollout.tensor_parallel_size": Observation(self._split_over(), evidence),
        }

    def score(self, sequences: Sequences, request: Request) -> Scores:
        keys = [_digest(prompt_of(sequences, s)) for s in range(sequences.num_sequences)]
        self._prefixes.expect(keys if self._share_prefixes else ())
        try:
            with explicit_masks(), self._attending():
                return super().score(sequences, request)
        finally:
            self._prefixes.clear()

    def behaviour(self) -> dict[str, Observation]:
        graphs, runs = (self._compiled.graphs, self._compiled.runs) if self._compiled else (0, 0)
        compiled = {"graphs": graphs, "graph_runs": runs, "decode_steps": self._steps,
                    "eager_attention": self._attention.evidence()}  # fmt: skip
        return {
            "batch.size": self._batch_size(),
            "rollout.dtype": self._compute_dtype(),
            "rollout.context_parallel_size": self._merged_ranks(),
            "rollout.enable_prefix_caching": self._shared_prefixes(),
            "rollout.enforce_eager": Observation(_ran_eager(runs, self._steps), compiled),
            "logp.backend": self._logp_backend(),
        }

    def _merged_ranks(self) -> Observation:
        """Over how many ranks attention was put together: 1 where it never was, none where now and then."""
        merged = dict(self._context.merged) if self._context else {}
        calls = sum(self._attention.by_name.values())
        evidence = {"merges": {str(ranks): count for ranks, count in sorted(merged.items())}, "attention_calls": calls}
        if not merged:
            return Observation(1, evidence)
        ((ranks, count), *others) = merged.items()
        return Observation(ranks if not others and count == calls else None, evidence)

    def _cache(self, width: int) -> DynamicCache:
        """An empty one, for prompts padded to `width` columns."""
        config = self.model.config
        return self._context.cache(config, width) if self._context else DynamicCache(config=config)

    def _held(self, count: int) -> int:
        """How many of the last `count` columns of the prompts this process keeps."""
        return self._context.held(count) if self._context else count

    def _shared_prefixes(self) -> Observation:
        """True: each distinct prompt was computed once, and kept for its samples. False: each row's, and none kept.

        With no two prompts equal both compute the same rows; that they went through the store still shows.
        """
        prompts, distinct = len(self._prompts), len(set(self._prompts))
        computed, stored = sum(rows for rows, _ in self._prefills), self._prefixes.stored
        evidence = {
            "prompts": prompts,
            "distinct": distinct,
            "computed": computed,
            "stored": stored,
            "held_at_most": self._prefixes.most,
            "prefills": [list(shape) for shape in self._prefills],
        }
        if stored:
            return Observation(True if computed == stored == distinct else None, evidence)
        return Observation(False if computed == prompts else None, evidence)

    def close(self) -> None:
        if self._compiled is not None:
            self._compiled.forget()
        self._compiled = self._stepper = None
        super().close()

    def _score_batch(
        self, sequences: Sequences, batch: list[int], request: Request, observer: Observer, logprobs: np.ndarray
    ) -> None:
        if request.mode == "decode":
            _Decoding(self, sequences, batch, request, observer, logprobs).run()
        else:
            whole = self._context.one_pass() if self._context else contextlib.nullcontext()
            with whole, self._attention.counting():
                self._one_pass(sequences, batch, request, observer, logprobs)


class _Decoding:
    """One batch of a submission on its way through the cache. Finished sequences leave it."""

    def __init__(
        self, engine: RolloutEngine, sequences: Sequences, batch: list[int], request: Request, observer: Observer,
        logprobs: np.ndarray,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.sequences = sequences
        self.alive = list(batch)
        self.request = request
        self.observer = observer
        self.logprobs = logprobs
        self.prompts = {s: prompt_of(sequences, s) for s in batch}
        self.width = max(map(len, self.prompts.values()))

    def run(self) -> None:
        engine = self.engine
        engine._prompts += [_digest(self.prompts[s]) for s in self.alive]
        cache, last = self._shared_prefill() if engine._share_prefixes else self._prefill(self.alive)
        mask = decoding.padded([self.prompts[s].mask for s in self.alive], self.width)
        batch = decoding.Batch(cache, mask)
        step = 0
        self._select(last, step)
        while self._drop_finished(batch, step):
            hidden = self._step(batch, step)
            step += 1
            self._select(hidden, step)

    def _prefill(self, sequences: list[int]) -> tuple[DynamicCache, Tensor]:
        """The cache of these sequences' prompts, as wide as the whole batch's, and their last hidden states [M, H]."""
        engine = self.engine
        prompts = [self.prompts[s] for s in sequences]
        rows = [
            Row(row, s, 0, len(p), self.width - len(p))
            for row, (s, p) in enumerate(zip(sequences, prompts, strict=True))
        ]

        def forward(ids: Tensor, positions: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
            hidden = engine._forward(engine.base, ids, positions, mask, rows, self.observer, cache)
            engine._prefills.append(tuple(hidden.shape[:2]))
            return hidden

        cache = engine._cache(self.width)
        with engine._attention.counting():
            return cache, decoding.prefill(forward, prompts, self.width, cache)

    def _shared_prefill(self) -> tuple[DynamicCache, Tensor]:
        """The same, with a row for each prompt that no row before it and no batch before this one has computed."""
        engine = self.engine
        store, keys = engine._prefixes, {s: _digest(self.prompts[s]) for s in self.alive}
        missing = {keys[s]: s for s in reversed(self.alive) if keys[s] not in store}  # the first row of each prompt
        if missing:
            computed = sorted(missing.values(), key=self.alive.index)
            cache, hidden = self._prefill(computed)
            for row, s in enumerate(computed):
                store.keep(keys[s], s, cache, row, engine._held(len(self.prompts[s])), hidden)
        prefixes = [store.take(keys[s]) for s in self.alive]
        for s, prefix in zip(self.alive, prefixes, strict=True):
            self.observer.shared(s, prefix.origin, len(self.prompts[s]))
        cache = engine._cache(self.width)
        for index, (keys_, values) in enumerate(store.batch(prefixes, engine._held(self.width))):
            if engine._context is None:
                cache.update(keys_, values, index)
            else:
                cache.layers[index].fill(keys_, values, self.width)
        return cache, torch.cat([p.hidden for p in prefixes])

    def _cell(self, sequence: int, step: int) -> int:
        """Where the response token that is decoded at `step` stands in the flat batch."""
        return self.sequences.span(sequence).start + len(self.prompts[sequence]) + step

    def _has(self, sequence: int, step: int) -> bool:
        return self._cell(sequence, step) < self.sequences.span(sequence).stop

    def _select(self, hidden: Tensor, step: int) -> None:
        """Logprobs of the response tokens at `step` from hidden states [M, H], of the rows that have one."""
        rows = [row for row, s in enumerate(self.alive) if self._has(s, step)]
        if rows:
            cells = np.array([self._cell(self.alive[row], step) for row in rows])
            taken = hidden if len(rows) == len(self.alive) else hidden[rows]
            self.engine._select(taken, cells, self.sequences, self.request, self.observer, self.logprobs)

    def _drop_finished(self, batch: decoding.Batch, step: int) -> bool:
        """Take the rows without a token at `step` out of the batch; False when none is left."""
        kept = [row for row, s in enumerate(self.alive) if self._has(s, step)]
        if kept and len(kept) < len(self.alive):
            batch.keep(kept)
        self.alive = [self.alive[row] for row in kept]
        return bool(kept)

    def _step(self, batch: decoding.Batch, step: int) -> Tensor:
        """Feed each row its frozen token of `step`: hidden states [M, H]. The last one is fed, too: it is observed."""
        cells = np.array([self._cell(s, step) for s in self.alive])
        sequences, engine = self.sequences, self.engine
        rows = [Row(row, s, len(self.prompts[s]) + step, 1) for row, s in enumerate(self.alive)]

        def forward(ids: Tensor, positions: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
            return engine._forward(engine._stepper, ids, positions, mask, rows, self.observer, cache)

        fed = sequences.token_ids[cells], sequences.positions[cells], sequences.attention_mask[cells]
        if engine._stepper is engine.base:
            with engine._attention.counting():
                hidden = batch.step(forward, *fed)
        else:
            try:
                hidden = batch.step(forward, *fed)
            except (Unsupported, FailOnRecompileLimitHit) as error:
                raise cannot_compile(error, type(engine.model).__name__) from error
        engine._steps += 1
        return hidden


def _ran_eager(graph_runs: int, steps: int) -> bool | None:
    """Whether no step ran compiled; None when some did and some did not."""
    if graph_runs == 0:
        return True
    return False if graph_runs == steps else None


def prompt_of(sequences: Sequences, sequence: int) -> Prompt:
    first = sequences.span(sequence).start
    cells = slice(first, first + int(sequences.prompt_lens[sequence]))
    return Prompt(sequences.token_ids[cells], sequences.positions[cells], sequences.attention_mask[cells])


def _digest(prompt: Prompt) -> str:
    """Of all that is fed for a prompt: equal ids at other positions are another prefix."""
    return canon.digest_bytes(b"".join(part.tobytes() for part in (prompt.ids, prompt.positions, prompt.mask)))
