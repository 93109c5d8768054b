"""The rollout side: prompts prefilled, then the frozen tokens decoded a token a step through the KV cache.

Shapes: M rows still alive, P longest prompt of the batch (padded on the left), S columns of the cache so far.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from libxd.runtimes.hf.compiled import CountingBackend
from libxd.runtimes.hf.engine import Engine, tensor
from libxd.runtimes.hf.prefix import PrefixStore
from libxd.runtimes.protocol import Observation, Request
from libxd.scoring.observer import Observer, Row
from libxd.sequences import Sequences


class RolloutEngine(Engine):
    """`engine` are the arguments that materialising wrote down."""

    def __init__(self, directory: str, engine: dict[str, Any]) -> None:
        self._backend = CountingBackend()
        self._prefixes = PrefixStore()
        super().__init__(directory, engine)
        self._share_prefixes = engine["enable_prefix_caching"]
        self._stepper = self.base
        if not engine["enforce_eager"]:
            # dynamic: one graph serves every batch size and cache length, as a serving engine's would
            self._stepper = torch.compile(self.base, backend=self._backend, dynamic=True)

    def _forget_run(self) -> None:
        super()._forget_run()
        self._steps = 0
        self._prompts: list[bytes] = []
        self._prompts_computed = 0
        self._backend.runs = 0
        self._prefixes.clear()

    def settings(self) -> dict[str, Observation]:
        ranks, evidence = self._world()
        return {
            "rollout.dtype": self._parameter_dtype(),
            "rollout.tensor_parallel_size": Observation(ranks, evidence),
            "rollout.context_parallel_size": Observation(evidence["process_group"], evidence),
        }

    def behaviour(self) -> dict[str, Observation]:
        compiled = {"graphs": self._backend.graphs, "graph_runs": self._backend.runs, "decode_steps": self._steps}
        return {
            "batch.size": self._batch_size(),
            "rollout.dtype": self._compute_dtype(),
            "rollout.enable_prefix_caching": self._shared_prefixes(),
            "rollout.enforce_eager": Observation(self._ran_eager(), compiled),
            "logp.backend": self._logp_backend(),
        }

    def _shared_prefixes(self) -> Observation:
        """True: each distinct prompt was computed once and kept. False: each row's was, and none kept. Else None."""
        prompts, distinct, computed = len(self._prompts), len(set(self._prompts)), self._prompts_computed
        kept = len(self._prefixes)
        evidence = {"prompts": prompts, "distinct": distinct, "computed": computed, "hits": prompts - computed,
                    "kept": kept}  # fmt: skip
        # with no two prompts equal both compute the same rows; what is kept for the next one still shows
        if kept:
            return Observation(True if computed == distinct else None, evidence)
        return Observation(False if computed == prompts else None, evidence)

    def _ran_eager(self) -> bool | None:
        """Whether no step ran compiled; None when some did and some may not have: torch stops compiling at a limit."""
        if self._backend.runs == 0:
            return True
        return None if self._backend.runs < self._steps else False

    def close(self) -> None:
        if self._backend.graphs:
            # graphs of all engines of a process count against one limit, behind which torch runs eager without a word
            torch.compiler.reset()
        self._prefixes.clear()
        self._stepper = None
        super().close()

    def _score_chunk(
        self, sequences: Sequences, chunk: list[int], request: Request, observer: Observer, logprobs: np.ndarray
    ) -> None:
        if request.mode == "decode":
            _Decoding(self, sequences, chunk, request, observer, logprobs).run()
        else:
            self._one_pass(sequences, chunk, request, observer, logprobs)


class _Decoding:
    """One chunk on its way through the cache. Rows are the chunk's sequences; finished ones leave the batch."""

    def __init__(
        self, engine: RolloutEngine, sequences: Sequences, chunk: list[int], request: Request, observer: Observer,
        logprobs: np.ndarray,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.sequences = sequences
        self.alive = list(chunk)
        self.request = request
        self.observer = observer
        self.logprobs = logprobs
        self.prompt_lens = {s: int(sequences.prompt_lens[s]) for s in chunk}
        self.width = max(self.prompt_lens.values())
        self.mask = torch.zeros((len(chunk), self.width), dtype=torch.long)  # [M, S]
        for row, s in enumerate(chunk):
            self.mask[row, self.width - self.prompt_lens[s] :] = tensor(self._prompt(s, sequences.attention_mask))

    def run(self) -> None:
        engine = self.engine
        engine._prompts += [self._prefix(s) for s in self.alive]
        cache, last = self._shared_prefill() if engine._share_prefixes else self._prefill(self.alive)
        engine._chunk_sizes.append(cache.layers[0].keys.shape[0])
        step = 0
        self._select(last, step)
        while self._drop_finished(cache, step):
            hidden = self._step(cache, step)
            step += 1
            self._select(hidden, step)

    def _prefill(self, rows: list[int], width: int | None = None) -> tuple[DynamicCache, Tensor]:
        """The cache of these sequences' prompts, padded on the left to `width`, and the last hidden states [M, H]."""
        engine, sequences = self.engine, self.sequences
        width = self.width if width is None else width
        ids, positions, mask = (torch.zeros((len(rows), width), dtype=torch.long) for _ in range(3))
        watched = []
        for row, s in enumerate(rows):
            length = self.prompt_lens[s]
            ids[row, width - length :] = tensor(self._prompt(s, sequences.token_ids))
            positions[row, width - length :] = tensor(self._prompt(s, sequences.positions))
            mask[row, width - length :] = tensor(self._prompt(s, sequences.attention_mask))
            watched.append(Row(row, s, 0, length, width - length))
        cache = DynamicCache(config=engine.model.config)
        hidden = engine._forward(engine.base, ids, positions, mask, watched, self.observer, cache)
        engine._prompts_computed += hidden.shape[0]
        return cache, hidden[:, -1]

    def _shared_prefill(self) -> tuple[DynamicCache, Tensor]:
        """The same from prompts computed once each, alone and unpadded, and shared by their samples."""
        store, last = self.engine._prefixes, []
        for s in self.alive:
            key = self._prefix(s)
            if key not in store:
                cache, hidden = self._prefill([s], self.prompt_lens[s])
                store.keep(key, s, cache, hidden)
            prefix = store[key]
            self.observer.shared(s, prefix.origin, self.prompt_lens[s])
            last.append(prefix)
        return store.batch(last, self.width, self.engine.model.config), torch.cat([p.hidden for p in last])

    def _prefix(self, sequence: int) -> bytes:
        """All that is fed for a prompt: equal ids at other positions are another prefix."""
        given = (self.sequences.token_ids, self.sequences.positions, self.sequences.attention_mask)
        return b"".join(self._prompt(sequence, array).tobytes() for array in given)

    def _prompt(self, sequence: int, array: np.ndarray) -> np.ndarray:
        first = self.sequences.span(sequence).start
        return array[first : first + self.prompt_lens[sequence]]

    def _cell(self, sequence: int, step: int) -> int:
        """Where the response token that is decoded at `step` stands in the flat batch."""
        return self.sequences.span(sequence).start + self.prompt_lens[sequence] + step

    def _has(self, sequence: int, step: int) -> bool:
        return self._cell(sequence, step) < self.sequences.span(sequence).stop

    def _select(self, hidden: Tensor, step: int) -> None:
        """Logprobs of the response tokens at `step` from hidden states [M, H], of the rows that have one."""
        rows = [row for row, s in enumerate(self.alive) if self._has(s, step)]
        if rows:
            cells = np.array([self._cell(self.alive[row], step) for row in rows])
            taken = hidden if len(rows) == len(self.alive) else hidden[rows]
            self.engine._take(taken, cells, self.sequences, self.request, self.observer, self.logprobs)

    def _drop_finished(self, cache: DynamicCache, step: int) -> bool:
        """Take the rows without a token at `step` out of the batch; False when none is left."""
        kept = [row for row, s in enumerate(self.alive) if self._has(s, step)]
        if kept and len(kept) < len(self.alive):
            cache.batch_select_indices(torch.tensor(kept, device=self.engine.device))
            self.mask = self.mask[kept]
        self.alive = [self.alive[row] for row in kept]
        return bool(kept)

    def _step(self, cache: DynamicCache, step: int) -> Tensor:
        """Feed each row its frozen token of `step`: hidden states [M, H]. The last one is fed, too: it is observed."""
        cells = np.array([self._cell(s, step) for s in self.alive])
        sequences, engine = self.sequences, self.engine
        self.mask = torch.cat([self.mask, tensor(sequences.attention_mask[cells]).unsqueeze(1)], dim=1)
        rows = [Row(row, s, self.prompt_lens[s] + step, 1) for row, s in enumerate(self.alive)]
        hidden = engine._forward(
            engine._stepper, tensor(sequences.token_ids[cells]).unsqueeze(1),
            tensor(sequences.positions[cells]).unsqueeze(1), self.mask, rows, self.observer, cache,
        )  # fmt: skip
        engine._steps += 1
        return hidden[:, -1]
