"""Temperature: the difference goes with the logprob, as it does where one side's distribution is the sharper one."""

from __future__ import annotations

import numpy as np

from libxd.doctor import semantics
from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import HINT, Finding, Rule
from libxd.doctor.rounding import USUAL, usual_mean
from libxd.doctor.statistics import means_by, rank_correlation, two_sided
from libxd.rundir import SIDES

_CORRELATION, _P = 0.3, 0.01

RULE = Rule(
    "temperature",
    ("temperature-like",),
    f"Mean |d| is more than rounding makes ({USUAL}), "
    "the rank correlation of training - rollout with the logprob is beyond 0.3 over all, and of one sign in so many "
    "sequences that coins would do so once in 100 times. Not where semantics speaks, nor beside a third scorer, which "
    "knows better.",
    "Of the clean pairs none (docs/doctor.md): there the correlation reaches 0.21.",
    least_tokens=128,
    least_sequences=8,
)


def examine(evidence: Evidence) -> Finding | None:
    if evidence.known.rescored is not None or semantics.examine(evidence) is not None:
        return None
    level = evidence.r + evidence.t
    whole = rank_correlation(evidence.d, level)
    if abs(whole) < _CORRELATION or evidence.magnitude.mean() <= usual_mean(evidence):
        return None
    each = [rank_correlation(evidence.d[part], level[part]) for part in evidence.parts if part.stop - part.start >= 8]
    along = sum(value * whole > 0 for value in each)
    if two_sided(along, len(each)) > _P:
        return None
    likely = level > np.median(level)
    means = means_by(likely.astype(int), evidence.d, 2)
    sharper = SIDES[1] if whole > 0 else SIDES[0]
    return Finding("temperature-like", HINT, "the difference goes with the logprob, as under another temperature", [
        f"rank correlation of training - rollout with the logprob {whole:.2f}, of that sign in {along} of {len(each)} "
        f"sequences; mean {means[0]:.3g} over the unlikelier half, {means[1]:.3g} over the likelier",
        f"{sharper} has the sharper distribution",
    ], [evidence.rescoring])  # fmt: skip
