"""Rounding or a bug: how |training - rollout| goes with the unit roundoff of what both sides computed in.

A difference by rounding is made of errors that are each relative to a number: it is a factor times the unit roundoff u,
where the factor is the model's and the tokens'. A mistake is a difference of the mathematics and has a size of its own.
Where u falls by 2^16, from bfloat16 to float32, the one falls with it and the other stays.

The factor is not the same on all rungs. Below float32 hardware multiplies rounded numbers and adds them up in float32,
so a sum of n products is rounded once; in float32 each of its additions is, and errors of n terms grow as the root of n
(a random walk: the rule of thumb in N. Higham, Accuracy and Stability of Numerical Algorithms, chapter 2).
n is some hundreds to some thousands, and several sums run side by side: float32 shows a factor up to some fifteen times
that of the coarser rungs, which is what docs/ladder.md measured, and `LIMIT` stands above that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from libxd import bootstrap
from libxd.bootstrap import Interval

Answer = Literal["rounding", "bug", "undecided"]

#: half the distance from 1 to the next larger number: the largest relative error of one rounding to nearest
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
#: of float32 products on tensor cores that keep ten bits of the fraction
TF32_ROUNDOFF = 2.0**-11

#: how many times the factor of the coarser rungs the finest may show
LIMIT = 32.0
#: factors of the coarser rungs, in nats, below which none is believed: two engines may round alike in a coarse dtype,
#: bit for bit, and differ in float32. About a 135M model's factors, of the mean and of the largest difference
LEAST_FACTOR = {"mean": 8.0, "max": 64.0}
#: rungs whose roundoffs are not further apart than this cannot tell the two: a factor may grow by so much by itself
SPAN = 16.0 * LIMIT


@dataclass(frozen=True)
class Sample:
    """What one rung contributes: its unit roundoff, |training - rollout| over its active tokens in nats.

    sums float64 [B], counts int64 [B]: sum of |d| and active tokens of each sequence; the same B sequences on each
    rung. maximum: the largest |d|.
    """

    unit_roundoff: float
    sums: np.ndarray
    counts: np.ndarray
    maximum: float

    @property
    def mean(self) -> float:
        return float(self.sums.sum() / self.counts.sum())


@dataclass(frozen=True)
class Remainder:
    """What is left on the finest rung, and how much rounding may leave there, in nats."""

    left: float
    allowed: float


@dataclass(frozen=True)
class Judgement:
    """The answer and why; `slope` of log mean |d| over log u (None: fewer than two rungs have a difference).

    mean, maximum: None where no coarser rung is far enough away to say what rounding may leave.
    """

    answer: Answer
    why: str
    slope: Interval | None
    mean: Remainder | None
    maximum: Remainder | None


def judge(samples: Sequence[Sample]) -> Judgement:
    """Whether what is left on the finest of these rungs is rounding.

    The rule. Each coarser rung gives a factor |d| / u: of averages the least counts, of the largest |d|, which is one
    draw from a tail, the greatest, and at least `LEAST_FACTOR`. It times `LIMIT` and the finest u is what rounding may
    leave there. More than that, on average or at a single token, is a `bug`. Neither is `rounding`; an average whose
    bootstrap interval holds the limit is `undecided`, and so are rungs of which the finest is not `SPAN` times finer
    than another.
    """
    samples = [sample for sample in samples if sample.counts.sum()]
    slope = _slope(samples)
    if not samples:
        return Judgement("undecided", "no rung holds valid scores of active tokens", None, None, None)
    finest = min(sample.unit_roundoff for sample in samples)
    fine = [sample for sample in samples if sample.unit_roundoff == finest]
    coarse = [sample for sample in samples if sample.unit_roundoff >= SPAN * finest]
    if not coarse:
        return Judgement("undecided", _missing(samples), slope, None, None)
    drawn = bootstrap.draws(samples[0].counts)
    factors = {
        "mean": min(sample.mean / sample.unit_roundoff for sample in coarse),
        "max": max(sample.maximum / sample.unit_roundoff for sample in coarse),
    }
    allowed = {what: LIMIT * finest * max(factor, LEAST_FACTOR[what]) for what, factor in factors.items()}
    mean = Remainder(max(sample.mean for sample in fine), allowed["mean"])
    largest = Remainder(max(sample.maximum for sample in fine), allowed["max"])
    low, high = bootstrap.span(_excess(fine, coarse, drawn)) if drawn is not None else (None, None)
    answer, why = _answer(mean, largest, low, high)
    return Judgement(answer, why, slope, mean, largest)


def _answer(mean: Remainder, largest: Remainder, low: float | None, high: float | None) -> tuple[Answer, str]:
    """low, high: the interval of the mean's remainder over what is allowed."""
    if largest.left > largest.allowed:
        few = mean.left <= mean.allowed
        return "bug", "more is left than rounding explains" + (", at few tokens" if few else "")
    if low is not None and high is not None and low <= 1.0 < high:
        return "undecided", "the average is so near to what rounding may leave that more sequences are needed"
    if mean.left > mean.allowed:
        return "bug", "more is left than rounding explains, on average"
    if not largest.left:
        return "rounding", "nothing is left"
    return "rounding", "what is left is no more than rounding explains"


def _missing(samples: Sequence[Sample]) -> str:
    """Which rung would decide."""
    if min(sample.unit_roundoff for sample in samples) > UNIT_ROUNDOFF["float32"]:
        return "no rung computes in float32 on both sides: that run would decide"
    return "no rung is coarser than float32: bfloat16 or float16 on a side would decide"


def _excess(fine: list[Sample], coarse: list[Sample], drawn: np.ndarray) -> np.ndarray:
    """The mean's remainder over what is allowed, of each draw [D]."""
    left = np.max([_means(sample, drawn) / sample.unit_roundoff for sample in fine], axis=0)
    factor = np.min([_means(sample, drawn) / sample.unit_roundoff for sample in coarse], axis=0)
    return left / (LIMIT * np.maximum(factor, LEAST_FACTOR["mean"]))


def _slope(samples: Sequence[Sample]) -> Interval | None:
    """By least squares over all rungs that have a difference."""
    usable = [sample for sample in samples if sample.sums.sum() > 0]
    x = np.log([sample.unit_roundoff for sample in usable]) if usable else np.zeros(0)
    if len(set(x.tolist())) < 2:
        return None
    x = x - x.mean()
    weights = x / (x @ x)  # [R]
    value = float(weights @ np.log([sample.mean for sample in usable]))
    drawn = bootstrap.draws(usable[0].counts)
    if drawn is None:
        return Interval(value, None, None)
    means = np.array([_means(sample, drawn) for sample in usable])  # [R, D]
    kept = means.min(axis=0) > 0
    low, high = bootstrap.span(weights @ np.log(means[:, kept])) if kept.any() else (None, None)
    return Interval(value, low, high)


def _means(sample: Sample, drawn: np.ndarray) -> np.ndarray:
    """Mean |d| of each draw: [D]."""
    return bootstrap.means(sample.sums, sample.counts, drawn)
