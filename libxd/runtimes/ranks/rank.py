"""What every rank of a world does alike: opens its part of an engine, and answers what rank 0 asks of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from libxd import canon, checkpoint, plugins
from libxd.environment import SCORER_MODULES, sources_digest
from libxd.operators import catalog
from libxd.operators.session import OperatorSession
from libxd.runtimes import live, registry
from libxd.runtimes.protocol import EngineContext, Observation, ObservedInputs, Request, Scores
from libxd.sequences import Sequences


@dataclass(frozen=True)
class Work:
    """What an operator did on a rank: calls, temperatures, and a digest over all it was asked and gave."""

    calls: int
    temperatures: tuple[float, ...]
    returned: str

    @classmethod
    def of(cls, operator: Any) -> Work:
        ids, values = operator.returned()
        digest = canon.digest_bytes(ids.tobytes() + values.tobytes())
        return cls(operator.calls, tuple(sorted(operator.temperatures)), digest)


class Rank:
    """One rank's engine; each public method is a command, answered by all ranks side by side.

    A command's collectives are those of the engines, in one order. What it returns is sent to rank 0.
    """

    def __init__(self) -> None:
        self._runtime: Any = None
        self.engine: Any = None
        self._operator: Any = None

    def do(self, command: str, *arguments: Any) -> Any:
        method: Callable[..., Any] = getattr(self, command)
        return method(*arguments)

    def open(self, runtime: str, side: str, plan: dict[str, Any], context: EngineContext) -> None:
        self._runtime, self._side = registry.load(runtime), side
        self.engine = self._runtime.open_rank(side, plan, context)

    def bind(self, operator: Any) -> None:
        """The operator itself on rank 0; elsewhere its record, of which an instance is made."""
        if isinstance(operator, dict):
            session = OperatorSession(catalog.load(False))
            session.resolve(self._side, operator)
            operator = session.instance(self._side)
        self._operator = operator
        self.engine.bind(operator)

    def settings(self) -> dict[str, Observation]:
        return self.engine.settings()

    def behaviour(self) -> dict[str, Observation]:
        return self.engine.behaviour()

    def state(self) -> dict[str, Any]:
        return self.engine.state()

    def buffers(self) -> list[tuple[str, str, tuple[int, ...], bytes]]:
        return list(self.engine.buffers())

    def describe(self) -> dict[str, Any]:
        return self.engine.describe()

    def conditions(self) -> dict[str, Any]:
        """What must be the same on all ranks, and is no part of an engine: numeric state, and the builds of xd."""
        modules = (*SCORER_MODULES, plugins.entries(registry.GROUP)[self._runtime.name].module)
        return {"numerics": self._runtime.numerics(), "builds": {name: sources_digest(name) for name in modules}}

    def copies(self) -> dict[tuple[str, Any], str]:
        """Digest of each part of a weight that other ranks hold a copy of, by name and part."""
        return {
            (name, part): checkpoint.held_digest(live.DTYPE_NAMES[held.dtype], held.shape, live.raw_bytes(held))
            for name, part, shared, held in self.engine.parts()
            if shared
        }

    def part(self, wanted: tuple[str, Any]) -> tuple[str, str, tuple[int, ...], bytes] | None:
        """One part of a weight as this rank holds it: name, dtype name, shape, raw bytes. None: it holds another."""
        for name, part, _, held in self.engine.parts():
            if (name, part) == wanted:
                raw = live.raw_bytes(held.cpu())  # on its way to rank 0
                assert isinstance(raw, bytes)
                return name, live.DTYPE_NAMES[held.dtype], tuple(held.shape), raw
        return None

    def parameters(self) -> None:
        """Take part while rank 0 puts whole weights together."""
        for _ in self.engine.whole():
            pass

    def score(self, sequences: Sequences, request: Request) -> tuple[Scores, Work]:
        scores = self.engine.score(sequences, request)
        return scores, Work.of(self._operator)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine = self._operator = None


def same_inputs(one: ObservedInputs, other: ObservedInputs) -> bool:
    """Whether two ranks were fed the same, in the same forwards, and took logprobs of the same ids."""
    fields = ("token_ids", "selected_ids", "positions", "attention_mask", "scored")
    return (one.cache, one.forwards) == (other.cache, other.forwards) and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in fields
    )
