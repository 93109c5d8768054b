"""Length scaling: the sum over a sequence grows with its length as a bias does, not with the root as noise does."""

from __future__ import annotations

import numpy as np

from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import SYMPTOM, Finding, Rule
from libxd.doctor.rounding import USUAL, usual_mean
from libxd.doctor.statistics import means_by, two_sided

_SHARE, _P = 0.35, 2e-3

RULE = Rule(
    "bias",
    ("bias",),
    f"|mean d| is more than rounding makes of |d| ({USUAL}) "
    "and at least 0.35 of mean |d|, and the mean d of a sequence has that sign in so many sequences of 4 "
    "tokens or more that coins would do so twice in 1000 times.",
    "Below 1e-6 for 10 sequences whose tokens err independently (both conditions); of the clean pairs none "
    "(docs/doctor.md). Two float32 operators that add the vocabulary in other orders differ in one direction, by 7e-6.",
    least_tokens=64,
    least_sequences=10,
)
_TOKENS = 4


def examine(evidence: Evidence) -> Finding | None:
    size = evidence.sequences.size
    counts = np.bincount(evidence.index, minlength=size)
    share = float(evidence.d.mean() / evidence.magnitude.mean()) if evidence.magnitude.any() else 0.0
    if abs(share) < _SHARE or abs(evidence.d.mean()) <= usual_mean(evidence):
        return None
    means = means_by(evidence.index, evidence.d, size)[counts >= _TOKENS]
    along = int(np.sum(means * share > 0))
    if two_sided(along, means.size) > _P or along < means.size / 2:
        return None
    lines = [
        f"mean training - rollout {evidence.d.mean():.3g} is {share:.0%} of mean |training - rollout|, of one sign in "
        f"{along} of {means.size} sequences"
    ]
    exponent = _exponent(evidence, counts)
    if exponent is not None:
        lines.append(f"|sum over a sequence| grows as its length to the power {exponent:.2g} (a bias 1, noise 0.5)")
    return Finding("bias", SYMPTOM, "a bias, not noise: the sides differ in one direction", lines, [
        "what changes every token alike: temperature, truncation, padded vocabulary, weights of another step",
        evidence.rescoring,
    ])  # fmt: skip


def _exponent(evidence: Evidence, counts: np.ndarray) -> float | None:
    """The slope of log |sum d| over log length; None where the lengths differ by less than four times."""
    sums = np.abs(np.bincount(evidence.index, evidence.d, minlength=counts.size))
    usable = (counts >= _TOKENS) & (sums > 0)
    if not usable.any() or counts[usable].max() < 4 * counts[usable].min():
        return None
    x, y = np.log(counts[usable]), np.log(sums[usable])
    x = x - x.mean()
    return float(x @ y / (x @ x))
