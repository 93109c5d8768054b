"""What rounding alone may make of a pair, by what its sides computed in: the limits that `roundoff` gives a ladder.

A 135M model's factors stand behind them (docs/ladder.md). Where a dtype is unknown the limits are those of the
coarsest one: what bfloat16 makes without a mistake is then no alarm.
"""

from __future__ import annotations

from libxd import roundoff
from libxd.doctor.evidence import Evidence

_FINEST = "float32"
_COARSEST = max(roundoff.UNIT_ROUNDOFF, key=lambda dtype: roundoff.UNIT_ROUNDOFF[dtype])
#: the limits of `usual_mean`, as rules say them
USUAL = "bfloat16 and unknown dtypes 0.031 nats, float16 0.0039, float32 1.5e-5"


def coarser_dtype(evidence: Evidence) -> str | None:
    """The coarser side's dtype; None where one is unknown."""
    dtypes = evidence.dtypes.values()
    if not all(dtype in roundoff.UNIT_ROUNDOFF for dtype in dtypes):
        return None
    return max(dtypes, key=lambda dtype: roundoff.UNIT_ROUNDOFF[dtype])


def usual_mean(evidence: Evidence) -> float:
    """Of |d|, in nats: 8 roundoffs (bfloat16 0.031, float16 0.0039), of float32 32 times as many (1.5e-5).

    Of unknown dtypes as of bfloat16.
    """
    dtype = coarser_dtype(evidence) or _COARSEST
    factor = roundoff.LEAST_FACTOR["mean"] * (roundoff.LIMIT if dtype == _FINEST else 1)
    return factor * roundoff.UNIT_ROUNDOFF[dtype]
