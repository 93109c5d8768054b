"""Padded vocabulary: a small offset of one sign that grows as the model is less sure."""

from __future__ import annotations

import numpy as np

from libxd.doctor import truncation
from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import SHAPE, Finding, Rule
from libxd.doctor.rounding import USUAL, usual_mean
from libxd.doctor.statistics import rank_correlation
from libxd.rundir import SIDES

_ONE_SIGN, _FALLS = 0.95, 0.3

RULE = Rule(
    "padding",
    ("padded-vocabulary",),
    "Of the differences that are above the tenth part of their mean, 95 % have one sign, those of at least 32 tokens; "
    "their size rises as the logprob falls (rank correlation below -0.3), the largest is below 0.5 nats, and the mean "
    f"more than rounding makes ({USUAL}). Not where "
    "truncation speaks.",
    "Rounding has both signs: that 95 % of 32 fair coins fall alike happens once in 10^7 times.",
    least_tokens=64,
)
_LEAST, _LARGEST = 32, 0.5


def examine(evidence: Evidence) -> Finding | None:
    d, size = evidence.d, evidence.magnitude
    kept = size > 0.1 * size.mean()
    if truncation.examine(evidence) is not None:  # one-sided, too, and told from this by its zeros
        return None
    if kept.sum() < _LEAST or size.max() > _LARGEST or size.mean() <= usual_mean(evidence):
        return None
    below = float(np.mean(d[kept] < 0))
    if max(below, 1 - below) < _ONE_SIGN:
        return None
    falls = rank_correlation(size, evidence.r + evidence.t)
    if falls > -_FALLS:
        return None
    lower = SIDES[1] if below > 0.5 else SIDES[0]
    return Finding("padded-vocabulary", SHAPE, f"{lower} sums over more columns than the vocabulary has", [
        f"{lower} is lower at {max(below, 1 - below):.1%} of the {int(kept.sum())} tokens that differ most, by "
        f"{size.mean():.3g} nats on average and at most {size.max():.3g}",
        f"the less likely the token, the more: rank correlation {falls:.2f}",
    ], ["cut the padding off the logits before the log-softmax, or set it to -inf", evidence.rescoring])  # fmt: skip
