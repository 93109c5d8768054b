"""A case as a test of a question: its figures, one a repeat, what they are taken for, and the noise under them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from libxd import contract
from libxd.rundir import Attempt

By = Literal["verdict", "mean", "p99", "max", "count"]
#: figures of a comparison, by what is asked; a verdict is a question about the largest difference
_DIFFERENCES = {
    "verdict": "max_absolute", "max": "max_absolute", "mean": "mean_absolute", "p99": "p99_absolute",
}  # fmt: skip
QUESTIONS = ("verdict", "mean", "p99", "max", "count")


@dataclass(frozen=True)
class Question:
    """When a case is bad: when a figure of its comparison is above a limit.

    by: "mean", "p99" or "max" of |training - rollout| in nats, "count" of mismatches, or "verdict": any mismatch, that
    is, the maximum beyond the contract's threshold. above: None with "verdict" alone.
    """

    by: By
    above: float | None = None

    def limit(self, row: dict[str, Any]) -> float:
        """The limit for the rows of one plan."""
        if self.above is not None:
            return self.above
        bound = row["contract"]
        return contract.from_row(bound, row["case_id"]).threshold(bound["dtype"])

    def figure(self, comparison: dict[str, Any]) -> float | None:
        """The figure; None where no active token was compared."""
        counts = comparison["counts"]
        if not counts or not counts["active"]:
            return None
        return counts["mismatches"] if self.by == "count" else comparison["logprob_difference"][_DIFFERENCES[self.by]]


@dataclass(frozen=True)
class Measurement:
    """One row of a test and what came of it: a figure, or the reason why there is none; neither where it is pending."""

    row: dict[str, Any]
    attempt: Attempt | None = None
    figure: float | None = None
    reason: str = ""

    @property
    def pending(self) -> bool:
        return self.figure is None and not self.reason


@dataclass
class Trial:
    """One case, and its repeats. outcome: True (bad), False (good), or None, with `reason` saying why not."""

    changed: tuple[str, ...]  # paths, against the baseline
    measurements: list[Measurement]
    outcome: bool | None = None
    reason: str = ""

    @property
    def row(self) -> dict[str, Any]:
        return self.measurements[0].row

    @property
    def figures(self) -> list[float]:
        return [each.figure for each in self.measurements if each.figure is not None]

    @property
    def mean(self) -> float | None:
        return math.fsum(self.figures) / len(self.figures) if self.figures else None

    @property
    def spread(self) -> float | None:
        """Between the largest and the smallest figure; None with fewer than two."""
        return max(self.figures) - min(self.figures) if len(self.figures) > 1 else None

    @property
    def pending(self) -> list[dict[str, Any]]:
        return [each.row for each in self.measurements if each.pending]

    @property
    def state(self) -> Literal["bad", "good", "undecided", "unmeasured", "pending"]:
        if self.pending:
            return "pending"
        if self.outcome is not None:
            return "bad" if self.outcome else "good"
        return "undecided" if self.figures else "unmeasured"

    def as_json(self) -> dict[str, Any]:
        """One of the tests of bisection.schema.json."""
        return {
            "changed": list(self.changed),
            "case_id": self.row["case_id"],
            "outcome": self.state,
            "reason": self.reason,
            "figure": self.mean,
            "measurements": [
                {
                    "repeat": each.row["repeat"],
                    "attempt": str(each.attempt) if each.attempt else None,
                    "figure": each.figure,
                    "reason": each.reason,
                }
                for each in self.measurements
            ],
        }


def decide(trial: Trial, limit: float, noise: float | None) -> None:
    """A trial's outcome and the reason where there is none, from the figures that it has.

    Bad: all figures above the limit; good: none. And their mean must be further from it than the noise, that of the
    ends or its own spread, divided by the root of how many figures there are.
    """
    trial.outcome, trial.reason = None, ""
    if not trial.figures:
        trial.reason = next((each.reason for each in trial.measurements if each.reason), "")
        return
    low, high = min(trial.figures), max(trial.figures)
    if low <= limit < high:
        trial.reason = "its repeats lie on both sides of the limit"
        return
    margin = max(noise or 0.0, trial.spread or 0.0) / math.sqrt(len(trial.figures))
    mean = trial.mean
    assert mean is not None
    if margin and abs(mean - limit) <= margin:
        trial.reason = "no further from the limit than the noise floor"
        return
    trial.outcome = low > limit


def noise_floor(good: Trial, bad: Trial, limit: float) -> float | None:
    """The noise floor at the limit: the spread of the ends' repeats, in proportion between the two figures.

    Noise grows with what it disturbs: that of a bad end says little about a figure near a small limit.
    """
    if good.spread is None or bad.spread is None or good.mean is None or bad.mean is None:
        return None
    share = (limit - good.mean) / (bad.mean - good.mean)
    return good.spread + (bad.spread - good.spread) * share
