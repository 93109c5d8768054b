"""The training side: whole frozen sequences, teacher-forced in one pass, no cache, the asked attention."""

from __future__ import annotations

import numpy as np
import torch

from libxd.runtimes.hf.attention import AttentionCalls
from libxd.runtimes.hf.compiled import nothing_stored
from libxd.runtimes.hf.engine import Engine
from libxd.runtimes.protocol import Observation, Request
from libxd.scoring.observer import Observer
from libxd.sequences import Sequences


class TrainingEngine(Engine):
    """`engine` are the arguments that materialising wrote down."""

    def _forget_run(self) -> None:
        super()._forget_run()
        self._attention = AttentionCalls()
        if self.model.config._attn_implementation == "flex_attention":
            torch.compiler.reset()  # transformers compiles it, for the sizes that it is first called with

    def settings(self) -> dict[str, Observation]:
        from torch.distributed.fsdp import FSDPModule

        wrapped = any(isinstance(module, FSDPModule) for module in self.model.modules())
        _, evidence = self._world()
        return {
            "training.compute_dtype": self._parameter_dtype(),
            "training.sharding": Observation("fsdp" if wrapped else "unsharded", evidence),
        }

    def behaviour(self) -> dict[str, Observation]:
        ran = self._attention.names
        evidence = {**self._attention.evidence(), "config": self.model.config._attn_implementation}
        return {
            "batch.size": self._batch_size(),
            "training.compute_dtype": self._compute_dtype(),
            "training.attention_backend": Observation(ran[0] if len(ran) == 1 else None, evidence),
            "logp.backend": self._logp_backend(),
        }

    def _score_batch(
        self, sequences: Sequences, batch: list[int], request: Request, observer: Observer, logprobs: np.ndarray
    ) -> None:
        with self._attention.counting(), nothing_stored():
            self._one_pass(sequences, batch, request, observer, logprobs)
