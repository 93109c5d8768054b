"""Execution policy: what the command line decides and no config can. The options of xd-materialize and xd-resume.

Runtimes and interpreters of both sides, the authorisation of smoke operators, and strictness, which can only tighten.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from libxd import environment
from libxd.errors import Status, XdError
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

    def environments(self) -> dict[str, dict[str, Any]]:
        """Side -> environment of its interpreter; two interpreters are asked in parallel.

        XdError 66 when one does not run, 69 when it has no xd runtime of that name.
        """
        found = environment.of_each(self.pythons.values())
        sides = {side: found[self.pythons[side]] for side in SIDES}
        for side in SIDES:
            environment.scorer(sides[side], self.runtimes[side].name)
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
    loaded = {side: registry.load(runtimes[side]) for side in SIDES}
    found = {side: pythons.get(side) for side in SIDES}
    return Policy(
        loaded,
        {
            side: environment.interpreter(python) if python else default_python(runtimes[side])
            for side, python in found.items()
        },
        allow_smoke_operators,
        strict,
    )


def options(required: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The policy's options on a click command, whose function gets them as one `policy` argument.

    required=False: without any runtime option it gets None; options that need one are then refused.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_policy(
            *,
            runtime: str | None,
            runtime_rollout: str | None,
            runtime_training: str | None,
            python: str | None,
            python_rollout: str | None,
            python_training: str | None,
            allow_smoke_operators: bool,
            strict: bool,
            **arguments: Any,
        ) -> Any:
            runtimes = {"rollout": runtime_rollout or runtime, "training": runtime_training or runtime}
            pythons = {"rollout": python_rollout or python, "training": python_training or python}
            if not any(runtimes.values()) and not required:
                if any(pythons.values()) or allow_smoke_operators or strict:
                    raise click.UsageError("these options need a runtime: give --runtime NAME")
                return function(policy=None, **arguments)
            for side in SIDES:
                if runtimes[side] is None:
                    known = ", ".join(registry.names())
                    raise click.UsageError(f"no runtime for the {side} side: give --runtime NAME (there are: {known})")
            policy = of(runtimes, pythons, allow_smoke_operators=allow_smoke_operators, strict=strict)
            return function(policy=policy, **arguments)

        for option in reversed(_OPTIONS):
            option(with_policy)
        return with_policy

    return decorate


_OPTIONS = (
    click.option("--runtime", metavar="NAME", help="Runtime of both sides."),
    click.option("--runtime-rollout", metavar="NAME", help="Runtime of the rollout side."),
    click.option("--runtime-training", metavar="NAME", help="Runtime of the training side."),
    click.option(
        "--python", metavar="PATH",
        help="Interpreter that scores. Default: $XD_PYTHON_<RUNTIME> (as XD_PYTHON_CPU_SMOKE), else this one.",
    ),
    click.option("--python-rollout", metavar="PATH", help="Interpreter of the rollout side."),
    click.option("--python-training", metavar="PATH", help="Interpreter of the training side."),
    click.option("--allow-smoke-operators", is_flag=True, help="Authorise the temporary smoke_only.* operators."),
    click.option("--strict", is_flag=True, help="Strict even where a config is not; there is no way to loosen."),
)  # fmt: skip
