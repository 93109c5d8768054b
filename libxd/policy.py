"""Execution policy: what the command line decides and no config can.

Runtimes and interpreters of both sides, the authorisation of smoke operators, and strictness, which can only tighten.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libxd import environment
from libxd.errors import Status, XdError
from libxd.operators import catalog
from libxd.operators.catalog import SemanticOperatorCatalog
from libxd.rundir import SIDES
from libxd.runtimes import registry
from libxd.runtimes.protocol import Runtime


@dataclass(frozen=True)
class Policy:
    """How rows are materialised here: side -> runtime, side -> absolute path of the interpreter that scores it."""

    runtimes: Mapping[str, Runtime]
    pythons: Mapping[str, str]
    allow_smoke_operators: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        for side in SIDES:
            runtime = self.runtimes[side]
            if side not in runtime.sides:
                raise XdError(f"runtime {runtime.name} has no {side} side", status=Status.USAGE, code="wrong-side",
                              found=runtime.name, hint=f"name another one with --runtime-{side}")

    @property
    def smoke_operators(self) -> bool:
        """Whether test operators come in: permission alone brings none, nor does a runtime that knows them alone."""
        return self.allow_smoke_operators and any(r.registers_smoke_operators for r in self.runtimes.values())

    @property
    def catalog(self) -> SemanticOperatorCatalog:
        """The operators there are. XdError 70 for one that is broken, whatever a row asks for."""
        return catalog.load(self.smoke_operators)

    def environments(self) -> dict[str, dict[str, Any]]:
        """Side -> environment of its interpreter; two interpreters are asked in parallel.

        XdError 66 when one does not run, 69 when it has no xd runtime of that name, and when a server that is to score
        does not answer: once, and not of every row.
        """
        found = environment.of_each(self.pythons.values())
        sides = {side: found[self.pythons[side]] for side in SIDES}
        for side in SIDES:
            environment.scorer(sides[side], self.runtimes[side].name)
            environment.numeric(sides[side], self.runtimes[side].name)
        return sides


def default_python(runtime: str) -> str:
    """The interpreter of a runtime where no option names one: $XD_PYTHON_<RUNTIME>, else this one (absolute path)."""
    return environment.interpreter(os.environ.get(_variable(runtime)) or None)


def _variable(runtime: str) -> str:
    return "XD_PYTHON_" + runtime.upper().replace("-", "_")


def of(
    runtimes: Mapping[str, str], pythons: Mapping[str, str | None], *, allow_smoke_operators: bool, strict: bool
) -> Policy:
    """A policy from names: side -> runtime name, side -> interpreter (None: the runtime's default)."""
    loaded = {side: registry.scorer(runtimes[side]) for side in SIDES}
    found = {side: pythons.get(side) for side in SIDES}
    policy = Policy(
        loaded,
        {
            side: environment.interpreter(python) if python else default_python(runtimes[side])
            for side, python in found.items()
        },
        allow_smoke_operators,
        strict,
    )
    catalog.load(policy.smoke_operators)  # a broken operator is said once, and not of every row
    return policy
