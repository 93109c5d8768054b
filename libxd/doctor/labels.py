"""Logprobs that are not of these tokens under this context: labels against the wrong logits, another model."""

from __future__ import annotations

import numpy as np

from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import SHAPE, Finding, Rule
from libxd.doctor.statistics import rank_correlation
from libxd.rundir import SIDES

_CORRELATION, _NATS = 0.7, 1.0

RULE = Rule(
    "labels",
    ("not-these-tokens",),
    "The rank correlation of the two sides' logprobs is below 0.7 and the median |difference| above 1 nat.",
    "Of the clean pairs none (docs/doctor.md): there the correlation is above 0.99.",
    least_tokens=32,
)


def examine(evidence: Evidence) -> Finding | None:
    middle = float(np.median(evidence.magnitude))
    correlation = rank_correlation(evidence.r, evidence.t)
    if correlation >= _CORRELATION or middle <= _NATS:
        return None
    means = {side: float(evidence.of_side(side).mean()) for side in SIDES}
    worse = min(means, key=lambda side: means[side])
    return Finding("not-these-tokens", SHAPE, "one side's logprobs are not of these tokens after this context", [
        f"rank correlation of the two sides {correlation:.2f}, median |training - rollout| {middle:.3g} nats",
        f"mean logprob {means['rollout']:.3g} on rollout, {means['training']:.3g} on training: look at {worse} first",
    ], [
        f"{evidence.rescoring}  # says whether labels are off by one against the logits",
        "compare the side's model with the checkpoint: another one, weights not loaded, attention without its scale",
    ])  # fmt: skip
