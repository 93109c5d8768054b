"""The training side: whole frozen sequences, teacher-forced, no cache; weights whole or gathered from flat shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from libxd.runtimes.cpu_smoke.engine import Engine, build
from libxd.runtimes.cpu_smoke.kernels import EagerKernels
from libxd.runtimes.cpu_smoke.model import TeacherForcedAttention
from libxd.runtimes.cpu_smoke.shards import FSDP_WORLD_SIZE, FlatShardStore
from libxd.runtimes.protocol import Observation, Piece, Request, Scores
from libxd.scoring.observer import Observer
from libxd.sequences import Sequences


class TrainingEngine(Engine):
    """`engine` are the arguments that materialising wrote down."""

    def __init__(self, synthetic: dict[str, Any], engine: dict[str, Any]) -> None:
        world_size = FSDP_WORLD_SIZE if engine["sharding"] == "fsdp" else 0
        super().__init__(build(synthetic, engine["dtype"], EagerKernels(), fsdp_world_size=world_size))
        self._implementation = engine["attention"]
        self._attention_ran: set[str] = set()

    def score(self, sequences: Sequences, request: Request) -> Scores:
        self._attention_ran = set()
        if isinstance(self.model.store, FlatShardStore):
            self.model.store.gathers = 0
            self.model.store.gathered_shards.clear()
        return super().score(sequences, request)

    def settings(self) -> dict[str, Observation]:
        store = self.model.store
        if isinstance(store, FlatShardStore):
            shards = store.flat_shards()
            split = all(len(parts) > 1 for parts in shards.values())
            sharding = Observation("fsdp" if split else "unsharded", {"elements": shards})
        else:
            sharding = Observation("unsharded", {"store": type(store).__name__})
        return {"training.compute_dtype": self._parameter_dtype(), "training.sharding": sharding}

    def behaviour(self) -> dict[str, Observation]:
        store, ran = self.model.store, sorted(self._attention_ran)
        gathers = store.gathers if isinstance(store, FlatShardStore) else 0
        gathered = sorted(store.gathered_shards) if isinstance(store, FlatShardStore) else []
        return {
            "batch.size": self._batch_size(),
            "training.attention_backend": Observation(ran[0] if len(ran) == 1 else None, {"ran": ran}),
            "training.sharding": Observation(
                "fsdp" if gathers and min(gathered) > 1 else "unsharded", {"gathers": gathers, "shards": gathered}
            ),
            "logp.backend": self._logp_backend(),
        }

    def _score_batch(
        self, sequences: Sequences, batch: list[int], request: Request, observer: Observer, logprobs: np.ndarray
    ) -> None:
        """All sequences of the batch in one forward."""
        pieces, attended = [], []
        for s in batch:
            span = sequences.span(s)
            pieces.append(Piece(s, 0, span.stop - span.start))
            attended.append(torch.from_numpy(sequences.attention_mask[span].copy()))
        attention = TeacherForcedAttention(self._implementation, pieces, attended)
        hidden = self._forward(sequences, attention)
        self._attention_ran |= attention.ran
        self._score_following(sequences, pieces, hidden, request, observer, logprobs)
