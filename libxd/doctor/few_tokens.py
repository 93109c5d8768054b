"""Few tokens: single ones beyond any tail that rounding has."""

from __future__ import annotations

import numpy as np

from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import SYMPTOM, Finding, Rule
from libxd.doctor.rounding import usual_mean

_TIMES, _SHARE = 50.0, 0.02

RULE = Rule(
    "few-tokens",
    ("few-tokens",),
    "A token's |d| is more than 50 times the 98th percentile of all |d|, and more than 50 times what rounding makes of "
    "mean |d| (that is 1.6 nats in bfloat16 and unknown dtypes, 0.2 in float16, 7.6e-4 in float32).",
    "Of the clean pairs none (docs/doctor.md): there it is 4 times, and 13 in synthetic ones. Top-k routing flips an "
    "expert by rounding now and then, and is named.",
    least_tokens=64,
)
_SHOWN = 3


def examine(evidence: Evidence) -> Finding | None:
    d = evidence.magnitude
    usual = float(np.quantile(d, 1 - _SHARE, method="inverted_cdf"))
    far = np.flatnonzero(d > _TIMES * max(usual, usual_mean(evidence)))
    if not far.size:
        return None
    worst = far[np.argsort(-d[far], kind="stable")]
    lines = [f"{far.size} of {d.size} tokens: |training - rollout| up to {d[worst[0]]:.3g}, where {1 - _SHARE:.0%} of "
             f"all are within {usual:.3g}"]  # fmt: skip
    lines += [f"{evidence.place(evidence.cells[i])}: {evidence.r[i]:.6g} on rollout, {evidence.t[i]:.6g} on training"
              for i in worst[:_SHOWN]]  # fmt: skip
    lines.append(f"{d[far].sum() / d.sum():.0%} of the sum of |training - rollout| is theirs")
    return Finding("few-tokens", SYMPTOM, "single tokens are far off", lines, [
        "look at those tokens: the first or last of a sequence, of a chunk, of a cache block; a special id",
    ])  # fmt: skip
