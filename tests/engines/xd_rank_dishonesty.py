"""Worlds in which one rank, or all of them, do something else than hf does: each is a runtime of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from libxd.errors import Status, XdError
from libxd.runtimes.hf.runtime import Hf

ALTERED_COLUMN = 0  # of whatever is fed


class Spoilt(Hf):
    """hf, but for what `spoil` does to the engine of rank 1; of every rank when `everywhere`."""

    def __init__(self, name: str, spoil: Callable[[Any], None], everywhere: bool = False) -> None:
        self.name = name
        self._spoil = spoil
        self._everywhere = everywhere

    def open_rank(self, side: str, plan: dict[str, Any], context: Any) -> Any:
        import torch.distributed as dist

        engine = super().open_rank(side, plan, context)
        if dist.is_initialized() and (self._everywhere or dist.get_rank() == 1):
            self._spoil(engine)
        return engine


def feeds_other_id(engine: Any) -> None:
    def altered(_module: Any, arguments: Any, given: dict[str, Any]) -> Any:
        ids = given["input_ids"].clone()
        ids[:, ALTERED_COLUMN] = 1
        return arguments, {**given, "input_ids": ids}

    engine.base.register_forward_pre_hook(altered, with_kwargs=True)


def holds_other_weight(engine: Any) -> None:
    """Where a tensor-parallel rank holds a copy, and where a sharded one holds its part."""
    from torch.distributed.tensor import DTensor

    weight = engine.base.norm.weight.data
    (weight.to_local() if isinstance(weight, DTensor) else weight).add_(0.5)


def raises(engine: Any) -> None:
    def misbehave(*_: Any) -> None:
        raise RuntimeError("the kernel did not launch")

    engine._score_batch = misbehave


def refuses(engine: Any) -> None:
    def misbehave(*_: Any) -> None:
        raise XdError("this rank's device is another", status=Status.REFUSED, code="other-device")

    engine._score_batch = misbehave


def sleeps(engine: Any) -> None:
    """Says who it is, and lets all others wait."""

    def sleep(*_: Any) -> None:
        Path(os.environ["XD_TEST_PID"]).write_text(str(os.getpid()))
        time.sleep(600)

    engine._score_batch = sleep


def drops_a_part(engine: Any) -> None:
    """Of partial sums, and of partial attentions, only the first rank's count."""
    from libxd.runtimes.hf import context_parallel, tensor_parallel

    honest = context_parallel.merge
    context_parallel.merge = lambda parts: honest(parts[:1])

    class OwnOnly:
        all_gather = tensor_parallel.dist.all_gather

        @staticmethod
        def all_reduce(tensor: Any, group: Any) -> None:
            tensor_parallel_dist.broadcast(tensor, group_src=0, group=group)

    tensor_parallel_dist, tensor_parallel.dist = tensor_parallel.dist, OwnOnly


FEEDS_OTHER_ID = Spoilt("rank-feeds-other-id", feeds_other_id)
HOLDS_OTHER_WEIGHT = Spoilt("rank-holds-other-weight", holds_other_weight)
RAISES = Spoilt("rank-raises", raises)
REFUSES = Spoilt("rank-refuses", refuses)
SLEEPS = Spoilt("rank-sleeps", sleeps)
DROPS_A_PART = Spoilt("ranks-drop-a-part", drops_a_part, everywhere=True)
