"""Size: more difference than rounding in these dtypes makes, by one number."""

from __future__ import annotations

from libxd import roundoff
from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import SYMPTOM, Finding, Rule

#: eight times the factor of a 135M model; of float32, whose sums round more often, thirty-two times that
_FACTOR = 8 * roundoff.LEAST_FACTOR["mean"]

RULE = Rule(
    "size",
    ("more-than-rounding",),
    "Mean |d| is more than 64 unit roundoffs of the coarser side's dtype (bfloat16: 0.25 nats, float16: 0.031), of "
    "float32 32 times as many (1.2e-4). Nothing is said of unknown dtypes.",
    "Of the clean pairs none (docs/doctor.md): there it is 4 to 14 roundoffs, of float32 30 to 120. A model that "
    "amplifies rounding far more than a 135M model does would be named.",
    least_tokens=16,
)


def limit(evidence: Evidence) -> tuple[str, float] | None:
    """The coarser side's dtype, and the mean |d| in nats that is more than its rounding; None: a dtype is unknown."""
    dtypes = evidence.dtypes.values()
    if not all(dtype in roundoff.UNIT_ROUNDOFF for dtype in dtypes):
        return None
    coarser = max(dtypes, key=lambda dtype: roundoff.UNIT_ROUNDOFF[dtype])
    factor = _FACTOR * (roundoff.LIMIT if coarser == "float32" else 1)
    return coarser, factor * roundoff.UNIT_ROUNDOFF[coarser]


def examine(evidence: Evidence) -> Finding | None:
    found = limit(evidence)
    mean = float(evidence.magnitude.mean())
    if found is None or mean <= found[1]:
        return None
    return Finding("more-than-rounding", SYMPTOM, f"rounding in {found[0]} does not make so much", [
        f"mean |training - rollout| {mean:.3g} nats, where {found[1]:.2g} would be a lot for {found[0]}",
    ], [
        "look at the other findings first; without any, at weights and attention of the side with lower logprobs",
    ])  # fmt: skip
