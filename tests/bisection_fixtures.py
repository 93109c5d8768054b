"""Bisections whose attempts are made of given differences, sealed and whole, without any engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import materialize_fixtures
import numpy as np
from comparison_fixtures import arrays_of, request, scored_row

from libxd import bisection, comparison, materialize, planner, resume, seal
from libxd.rundir import Attempt, RunDirectory
from libxd.trial import Question

#: the other end of the fixtures' baseline; the order is that in which prefixes are taken
OTHER = {
    "batch.size": 1,
    "rollout.tensor_parallel_size": 2,
    "rollout.dtype": "bfloat16",
    "training.compute_dtype": "bfloat16",
    "logp.backend": "xd.triton_logp",
}
ARRAYS = arrays_of(8)
#: how far training is from rollout, in nats, where these knobs are changed against the baseline
Differ = Callable[[frozenset[str]], float]


def far_row(other: dict[str, Any] | None = None) -> dict[str, Any]:
    """The row that changes everything."""
    changes = OTHER if other is None else other
    row = request(ARRAYS, None, 0, "ws1", "float32", True) | {"strategy": "bisect"}
    row["intervention"] = [{"path": path, "value": value, "allow_fallback": False} for path, value in changes.items()]
    return planner.subset(row, list(changes))


def answered(root: Path, row: dict[str, Any], nats: float, **conditions: Any) -> Attempt:
    """A sealed attempt at a row whose sides are `nats` apart at most, to the bit; NaN makes it INVALID_ARTIFACT."""
    rollout = np.zeros(8, np.float32)
    training = (-nats * np.linspace(0.5, 1, 8)).astype(np.float32)
    attempt = scored_row(root, row, ARRAYS, rollout, training, **conditions)
    comparison.compare(attempt)
    seal.seal(attempt)
    return attempt


def refused(root: Path, row: dict[str, Any], knob: str, reason: str) -> Attempt:
    """An attempt at a row that was refused under the conditions that `look` looks for."""
    attempt = RunDirectory(root, row["experiment_id"]).new_attempt(row["case_id"])
    attempt.write_json("requested.json", row)
    attempt.write_json("materialized.json", now(row) | {
        "status": "refused", "refusals": [{"side": "rollout", "knob": knob, "status": "unsupported", "reason": reason}],
    })  # fmt: skip
    return attempt


def now(row: dict[str, Any]) -> dict[str, Any]:
    return materialize.materialized(row, materialize_fixtures.policy(), materialize_fixtures.environments())


def look(root: Path, conditions: bool = True) -> bisection.Look:
    """As xd-bisect looks: with a policy, or of whatever conditions."""
    run = RunDirectory(root, "test")
    return lambda row: resume.outcome(row, run, now(row) if conditions else None)


def examined(root: Path, far: dict[str, Any], question: Question, **options: Any) -> bisection.Bisection:
    return bisection.examine(far, question, look(root), **options)


def bisected(
    root: Path, far: dict[str, Any], question: Question, differ: Callable[[frozenset[str], int], float], **options: Any
) -> bisection.Bisection:
    """The loop around the chain. differ(changed, repeat): how far apart the sides are."""
    while True:
        found = examined(root, far, question, **options)
        if not found.rows:
            return found
        for row in found.rows:
            answered(root, row, differ(frozenset(change["path"] for change in row["intervention"]), row["repeat"]))
