"""Size: more difference than rounding in these dtypes makes, by one number."""

from __future__ import annotations

import numpy as np

from libxd import roundoff
from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import SYMPTOM, Finding, Rule
from libxd.doctor.rounding import coarser_dtype, usual_mean
from libxd.rundir import SIDES

#: times what rounding makes with a 135M model
_TIMES = 4

RULE = Rule(
    "size",
    ("more-than-rounding",),
    "Mean |d| is more than 32 unit roundoffs of the coarser side's dtype (bfloat16 0.125 nats, float16 0.016), of "
    "float32 32 times as many (6.1e-5). Nothing is said of unknown dtypes.",
    "Of the clean pairs none (docs/doctor.md): there it is up to 18 roundoffs in bfloat16, 16 in float16, 144 in "
    "float32. A model that amplifies rounding far more than a 135M model does would be named.",
    least_tokens=16,
)


def not_looked_at(evidence: Evidence) -> str | None:
    """Why nothing can be said; None where it can."""
    unknown = [side for side, dtype in evidence.dtypes.items() if dtype not in roundoff.UNIT_ROUNDOFF]
    return f"unknown dtype on {' and '.join(unknown)}" if unknown else None


def examine(evidence: Evidence) -> Finding | None:
    dtype, limit = coarser_dtype(evidence), _TIMES * usual_mean(evidence)
    mean = float(evidence.magnitude.mean())
    if dtype is None or mean <= limit:
        return None
    lines = [f"mean |training - rollout| {mean:.3g} nats, where {limit:.2g} would be a lot for {dtype}"]
    looked = _beside_the_model(evidence)
    if looked:
        lines.append("median |logprob - float32 model's|: "
                     + ", ".join(f"{apart:.3g} on {side}" for side, apart in looked.items()))  # fmt: skip
        further = max(looked, key=lambda side: looked[side])
        where = f"of {further}, which is further from the float32 model" if len(set(looked.values())) > 1 else ""
        advice = [f"look at the other findings first; without any, at inputs, weights and attention {where}".rstrip()]
    else:
        advice = ["look at the other findings first; without any, at inputs, weights and attention of a side",
                  f"{evidence.rescoring}: which side is further from a float32 model"]  # fmt: skip
    return Finding("more-than-rounding", SYMPTOM, f"rounding in {dtype} does not make so much", lines, advice)


def _beside_the_model(evidence: Evidence) -> dict[str, float]:
    """Side -> median distance from the third scorer, nats; {} without one."""
    if not evidence.known.has("rescored"):
        return {}
    ours, theirs = evidence.rescored_index
    plain = evidence.known.rescored.plain[theirs]
    return {side: float(np.median(np.abs(evidence.of_side(side)[ours] - plain))) for side in SIDES if ours.size}
