"""The training side: whole frozen sequences, teacher-forced in one pass, no cache, the asked attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh

from libxd.runtimes import live
from libxd.runtimes.hf import sharding
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

    def _spread(self, model: Any, engine: dict[str, Any]) -> Any:
        if engine["sharding"] == "fsdp":
            mesh = init_device_mesh(self.device.type, (engine["world_size"],), mesh_dim_names=("shard",))
            sharding.shard(model, mesh, live.DTYPES[engine["dtype"]])
        return model

    def settings(self) -> dict[str, Observation]:
        units = sharding.units(self.model)
        evidence = {**self._placements(), "units": len(units)}
        return {
            "training.compute_dtype": self._parameter_dtype(),
            "training.sharding": Observation("fsdp" if units and self._split_over() > 1 else "unsharded", evidence),
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
            sharding.gathered(
                self.model, lambda: self._one_pass(sequences, batch, request, observer, logprobs)
            )  # fmt: skip
