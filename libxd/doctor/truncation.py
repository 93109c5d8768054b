"""Truncation: one side's logprobs are renormalised over a nucleus or the k likeliest tokens."""

from __future__ import annotations

import math

import numpy as np

from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import SHAPE, Finding, Rule
from libxd.doctor.places import Places
from libxd.rundir import SIDES

#: nats: a logprob that is 0; one that is not, and whose token would not be the only one in a nucleus below 0.37
_ZERO, _OFF, _MOST = 1e-6, 1e-2, 1.0
_LEAST, _SHARE, _ALL = 8, 0.01, 0.8

RULE = Rule(
    "truncation",
    ("truncation",),
    "An active logprob of -inf: a token outside of what was kept. Or: at least 8 tokens, and 1 % of them, have a "
    "logprob of 0 (within 1e-6) on one side and between -1 and -0.01 on the other, and so have 80 % of all that are as "
    "likely there: the nucleus is that token alone. Rounding to decimals, or a temperature, does not do so.",
    "-inf: a fact. Zeros: a token of probability 1 - 1e-6 would have to be below 0.99 on a sound other side, eight "
    "times: none was seen.",
    least_tokens=32,
)


def examine(evidence: Evidence) -> Finding | None:
    for side, other in (SIDES, SIDES[::-1]):
        ours, theirs = evidence.of_side(side), evidence.of_side(other)
        alone = _alone(ours, theirs)
        outside = _outside(evidence, side)
        if alone is None and not outside.size:
            continue
        lines = []
        if outside.size:
            lines.append(f"{outside.size} active tokens are -inf on {side}; first {evidence.place(outside.first[0])}")
        rest = ours >= theirs
        if alone is not None:
            bound = float(np.quantile(-theirs[alone], 0.9))
            lines += [
                f"{int(alone.sum())} of {evidence.count} tokens have logprob 0 on {side} and between "
                f"{theirs[alone].min():.3g} and {theirs[alone].max():.3g} on {other}",
                f"a bound of {bound:.3g} nats is that of top-p {math.exp(-bound):.2g}, if it is a nucleus",
            ]
            rest = rest[~alone]
        lines.append(f"elsewhere {side} is not below {other} at {rest.mean() if rest.size else 1:.0%} of the tokens")
        return Finding("truncation", SHAPE, f"{side} renormalises over the tokens that it kept", lines, [
            "ask the engine for raw logprobs, or sample without top-p and top-k", evidence.rescoring,
        ])  # fmt: skip
    return None


def _alone(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray | None:
    """Tokens that are alone in their nucleus: bool [A]; None where it is none."""
    alone = (ours > -_ZERO) & (theirs < -_OFF) & (theirs > -_MOST)
    if alone.sum() < max(_LEAST, _SHARE * ours.size) or _on_decimals(ours):
        return None
    as_likely = (theirs < -_OFF) & (theirs > np.quantile(theirs[alone], 1 - _ALL))
    return alone if alone[as_likely].mean() >= _ALL else None


def _outside(evidence: Evidence, side: str) -> Places:
    """Active tokens of logprob -inf."""
    file = next(file for file in evidence.files if file.side == side)
    return evidence.find(lambda where: evidence.active(where) & np.isneginf(file.logprobs[where]))


def _on_decimals(values: np.ndarray) -> bool:
    """Whether all lie on a decimal grid so coarse that small ones are rounded to 0."""
    scaled = values * 1e4
    return bool(np.all(np.abs(scaled - np.rint(scaled)) < 1e-2))
