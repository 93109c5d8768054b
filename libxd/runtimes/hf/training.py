"""The training side: whole frozen sequences, teacher-forced in one pass, no cache, the asked attention."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from libxd.runtimes.hf.engine import Engine
from libxd.runtimes.protocol import Observation, Request
from libxd.scoring.observer import Observer
from libxd.sequences import Sequences


class TrainingEngine(Engine):
    """`engine` are the arguments that materialising wrote down."""

    def _forget_run(self) -> None:
        super()._forget_run()
        self._attention_calls: Counter[str] = Counter()

    def settings(self) -> dict[str, Observation]:
        from torch.distributed.fsdp import FSDPModule

        wrapped = any(isinstance(module, FSDPModule) for module in self.model.modules())
        _, evidence = self._world()
        return {
            "training.compute_dtype": self._parameter_dtype(),
            "training.sharding": Observation("fsdp" if wrapped else "unsharded", evidence),
        }

    def behaviour(self) -> dict[str, Observation]:
        ran = sorted(self._attention_calls)
        evidence = {"calls": dict(self._attention_calls), "config": self.model.config._attn_implementation}
        return {
            "batch.size": self._batch_size(),
            "training.compute_dtype": self._compute_dtype(),
            "training.attention_backend": Observation(ran[0] if len(ran) == 1 else None, evidence),
            "logp.backend": self._logp_backend(),
        }

    def _score_chunk(
        self, sequences: Sequences, chunk: list[int], request: Request, observer: Observer, logprobs: np.ndarray
    ) -> None:
        with attention_calls(self._attention_calls):
            self._one_pass(sequences, chunk, request, observer, logprobs)


@contextlib.contextmanager
def attention_calls(calls: Counter[str]) -> Iterator[None]:
    """Count which attention really runs meanwhile, a call a layer.

    Implementations of transformers' attention interface are counted as they are called. The eager one is not in it: it
    shows by the softmax over [M, heads, L, S] that no other one writes out.
    """
    local = ALL_ATTENTION_FUNCTIONS._local_mapping
    before = dict(local)

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **options)

        return call

    for name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        local[name] = counted(name, ALL_ATTENTION_FUNCTIONS[name])
    try:
        with _SoftmaxCounter(calls):
            yield
    finally:
        local.clear()
        local.update(before)


_SOFTMAX = (torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax)


class _SoftmaxCounter(TorchFunctionMode):
    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _SOFTMAX and args[0].dim() == 4:
            self._calls["eager"] += 1
        return function(*args, **(kwargs or {}))
