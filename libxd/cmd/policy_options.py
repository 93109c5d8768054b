"""The options that make an execution policy: the same on every tool that materialises."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from libxd import policy
from libxd.rundir import SIDES
from libxd.runtimes import registry


def policy_options(required: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
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
            decided = policy.of(runtimes, pythons, allow_smoke_operators=allow_smoke_operators, strict=strict)
            return function(policy=decided, **arguments)

        for option in reversed(_OPTIONS):
            option(with_policy)
        return with_policy

    return decorate


_OPTIONS = (
    click.option("--runtime", metavar="NAME", help="Runtime of both sides."),
    click.option(
        "--runtime-rollout", metavar="NAME", help="Runtime of the rollout side; `server` scores at $XD_SERVER_URL."
    ),
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
