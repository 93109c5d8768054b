"""The numeric state of a scorer's process: what it was when the process began, and what it may be since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from libxd.scoring.readback import Refusal, Stage, same


class Numerics:
    """Thread counts, TF32, autocast and the like, as a runtime reads them (`read`; None: it has no such state).

    Read first before any operator or engine is made: what one of them changes for the whole process would otherwise
    decide the numbers of every later case.
    """

    def __init__(self, read: Callable[[], dict[str, Any]] | None) -> None:
        self._read = read or dict
        self._first = self._read()

    def now(self) -> dict[str, Any]:
        """The state at this moment; JSON."""
        return self._read()

    def refusals(self, stage: Stage, engine: dict[str, Any]) -> list[Refusal]:
        """What is not as it was at first, but for what the engine's materialised arguments say by the same name."""
        found = self._read()
        expected = {name: engine.get(name, value) for name, value in self._first.items()}
        return [
            Refusal(stage, None, value, found.get(name), f"numeric state of the process was changed: {name}")
            for name, value in expected.items()
            if not same(found.get(name), value)
        ]
