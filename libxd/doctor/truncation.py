"""Truncation: one side's logprobs are renormalised over a nucleus or the k likeliest tokens."""

from __future__ import annotations

import math

import numpy as np

from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import SHAPE, Finding, Rule
from libxd.rundir import SIDES

_ZERO, _OFF = 1e-6, 1e-3  # nats: a logprob that is 0, and one that is not
_LEAST, _SHARE = 8, 0.01

RULE = Rule(
    "truncation",
    ("truncation",),
    "At least 8 tokens, and 1 % of them, have a logprob of 0 (within 1e-6) on one side and of less than -1e-3 on the "
    "other, which rounding to decimals does not explain: there the nucleus is that token alone. The mass that is cut "
    "off shows as a bound on the one-sided difference, -log(top_p).",
    "A token of probability 1 - 1e-6 would have to be 0.999 on a sound other side, eight times: none was seen.",
    least_tokens=32,
)


def examine(evidence: Evidence) -> Finding | None:
    for side, other in (SIDES, SIDES[::-1]):
        ours, theirs = evidence.of_side(side), evidence.of_side(other)
        alone = (ours > -_ZERO) & (theirs < -_OFF) & ~_on_decimals(ours)
        if alone.sum() < max(_LEAST, _SHARE * evidence.count):
            continue
        above = float(np.mean(ours[~alone] >= theirs[~alone])) if (~alone).any() else 1.0
        bound = float(-theirs[alone].min())
        outside = int(np.sum(ours - theirs < -10.0))
        lines = [
            f"{int(alone.sum())} of {evidence.count} tokens have logprob 0 on {side} and between "
            f"{theirs[alone].min():.3g} and {theirs[alone].max():.3g} on {other}",
            f"of the others {side} is not below {other} at {above:.0%}"
            + (f"; {outside} tokens are below by more than 10 nats: outside of what was kept" if outside else ""),
            f"a bound of {bound:.3g} nats is that of top-p {math.exp(-bound):.2g}, if it is a nucleus",
        ]
        return Finding("truncation", SHAPE, f"{side} renormalises over the tokens that it kept", lines, [
            "ask the engine for raw logprobs, or sample without top-p and top-k", evidence.rescoring,
        ])  # fmt: skip
    return None


def _on_decimals(values: np.ndarray) -> bool:
    """Whether all lie on a decimal grid so coarse that small ones are rounded to 0."""
    scaled = values * 1e4
    return bool(np.all(np.abs(scaled - np.rint(scaled)) < 1e-2))
