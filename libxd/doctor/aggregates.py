"""Aggregates that disagree with their tokens: what comparison.json, or a dashboard, says of these very numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal

import numpy as np

from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import FACT, Finding, Rule
from libxd.doctor.statistics import means_by

#: relative; a dashboard shows two or three digits
_SAME = 0.02
_STORED = 1e-6
#: reported name -> which of `_aggregates` it should be
NAMES = {
    "mean_absolute": "mean |d| over active tokens",
    "mean_signed": "mean d over active tokens",
    "max_absolute": "max |d|",
    "k1": "k1 = mean -d over active tokens",
    "k2": "k2 = mean d^2 / 2 over active tokens",
    "k3": "k3 = mean exp(d) - 1 - d over active tokens",
}

RULE = Rule(
    "aggregates",
    ("aggregate",),
    "A figure of comparison.json that is not, to 1e-6, what the tokens give. A figure given by --reported that is not, "
    "to 2 % or to the last digit that was written, the aggregate of its name (a 0 is right of 0 alone); the aggregates "
    "that it is, to 2 %, are named.",
    "None: recomputed. By chance another aggregate agrees to 2 % now and then, and is named as a candidate only.",
)


def examine(evidence: Evidence) -> Finding | None:
    if not evidence.count:
        return None
    lines = [*_stored(evidence), *_reported(evidence)]
    if not lines:
        return None
    return Finding("aggregate", FACT, "a figure is not that of its tokens", lines,
                   ["say which tokens and which difference a figure is of: log or probability, signed or absolute, "
                    "by token or by sequence"])  # fmt: skip


def _stored(evidence: Evidence) -> Iterator[str]:
    if evidence.attempt is None or not evidence.attempt.has("comparison.json"):
        return
    said = evidence.attempt.comparison()
    if said["counts"] is None or said["counts"]["active"] != evidence.count:  # no numbers, or of other tokens
        return
    cells = evidence.cells
    d = (evidence.training.logprobs[cells] - evidence.rollout.logprobs[cells]).astype(np.float64)
    given = {
        "mean_signed": math.fsum(d) / d.size,
        "mean_absolute": math.fsum(np.abs(d)) / d.size,
        "max_absolute": float(np.abs(d).max()),
    }
    for name, value in given.items():
        stored = said["logprob_difference"][name]
        if stored is not None and not math.isclose(stored, value, rel_tol=_STORED, abs_tol=1e-12):
            yield f"comparison.json says {name} {stored:.6g}; its tokens give {value:.6g}"


def _reported(evidence: Evidence) -> Iterator[str]:
    found = _aggregates(evidence) if evidence.known.reported else {}
    for name, value in evidence.known.reported.items():
        right = found[NAMES[name]]
        if _same(right, float(value)) or _rounds_to(right, value):
            continue
        others = [each for each, other in found.items() if _same(other, float(value))]
        line = f"reported {name} {float(value):.6g}; the tokens give {right:.6g}"
        yield line + (f". It is: {'; '.join(others)}" if others else ". No aggregate known here gives it")


def _aggregates(evidence: Evidence) -> dict[str, float]:
    """Description -> value, of what people call the difference."""
    d, r, t = evidence.d, evidence.r, evidence.t
    with np.errstate(over="ignore"):
        k3 = np.expm1(d) - d
        p = np.exp(t) - np.exp(r)
    by_sequence = {"mean |d|": np.abs(d), "mean d": d, "k3": k3, "k1": -d}
    share = evidence.count / max(evidence.rollout.tokens, 1)
    size = evidence.sequences.size
    sums = np.bincount(evidence.index, d, minlength=size)
    found = {
        NAMES["mean_absolute"]: np.abs(d).mean(),
        NAMES["mean_signed"]: d.mean(),
        NAMES["max_absolute"]: np.abs(d).max(),
        NAMES["k1"]: -d.mean(),
        NAMES["k2"]: (d * d).mean() / 2,
        NAMES["k3"]: k3.mean(),
        "k3 of the other direction: mean exp(-d) - 1 + d": (np.expm1(-d) + d).mean(),
        "mean |difference of probabilities|": np.abs(p).mean(),
        "mean difference of probabilities": p.mean(),
        "max |difference of probabilities|": np.abs(p).max(),
        "|mean d|, in which signs cancel": abs(d.mean()),
        "mean |d| over all tokens, zeros where inactive": np.abs(d).mean() * share,
        "mean d over all tokens, zeros where inactive": d.mean() * share,
        "mean over sequences of |sum d|": np.abs(sums).mean(),
        "mean over sequences of sum d": sums.mean(),
        "median |d|": np.median(np.abs(d)),
        "root of mean d^2": math.sqrt((d * d).mean()),
    }
    for name, values in by_sequence.items():
        means = means_by(evidence.index, values, size)
        found[f"{name}, the mean over sequences of each one's mean"] = np.nanmean(means)
    return {name: float(value) for name, value in found.items()}


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_SAME, abs_tol=0.0)


def _rounds_to(value: float, said: Decimal | float) -> bool:
    """Whether `said` is all that a person kept of `value`: 0.02 of 0.0219, and not 0.020. Nothing is kept in a 0."""
    last = Decimal(str(said)).as_tuple().exponent
    return bool(said) and abs(value - float(said)) <= 0.5 * 10.0**last
