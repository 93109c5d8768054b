"""Shift: one side's logprobs lie one or more places off in the array."""

from __future__ import annotations

import numpy as np

from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import SHAPE, Finding, Rule
from libxd.rundir import SIDES

_LAGS = (-3, -2, -1, 1, 2, 3)
_SMALLER = 1 / 4

RULE = Rule(
    "lag",
    ("lag",),
    "The median |difference| between one side and the other moved by 1 to 3 places within each sequence is at most a "
    "quarter of that where they stand, and no more than 0.5 nats.",
    "Neighbouring tokens' logprobs would have to agree better than the same token's: of the clean pairs none "
    "(docs/doctor.md).",
    least_tokens=16,
)
_MOST = 0.5  # nats


def examine(evidence: Evidence) -> Finding | None:
    here = float(np.median(evidence.magnitude))
    if not here:
        return None
    at = {lag: apart for lag in _LAGS if (apart := _apart(evidence, lag)) is not None}
    best = min(at, key=lambda lag: at[lag], default=None)
    if best is None or at[best] > _SMALLER * here or at[best] > _MOST:
        return None
    late = SIDES[1] if best > 0 else SIDES[0]
    return Finding("lag", SHAPE, "one side's array is off by a place", [
        f"median |training - rollout| is {here:.3g} as they stand, and {at[best]:.3g} with training read "
        f"{abs(best)} {'later' if best > 0 else 'earlier'}: the {late} side's logprobs lie {abs(best)} late",
    ], [
        "index i holds the logprob of token i given those before it: shift logits against labels on one side alone",
    ])  # fmt: skip


def _apart(evidence: Evidence, lag: int) -> float | None:
    """Median |training[i + lag] - rollout[i]| within sequences; None with fewer than 16 such pairs."""
    ours = evidence.cells
    theirs = ours + lag
    inside = (theirs >= evidence.cu_seqlens[evidence.sequence]) & (theirs < evidence.cu_seqlens[evidence.sequence + 1])
    with np.errstate(invalid="ignore"):
        apart = np.abs(evidence.taken(evidence.training, theirs[inside]) - evidence.r[inside])
    apart = apart[np.isfinite(apart)]
    return float(np.median(apart)) if apart.size >= RULE.least_tokens else None
