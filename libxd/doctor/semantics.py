"""Semantics: the two sides mean other logprobs by what they declare."""

from __future__ import annotations

from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import FACT, Finding, Rule
from libxd.rundir import SIDES

RULE = Rule(
    "semantics",
    ("semantics",),
    "The two files declare another temperature, truncation or penalty.",
    "None: what the files declare.",
)


def examine(evidence: Evidence) -> Finding | None:
    rollout, training = (evidence.semantics[side] for side in SIDES)
    if rollout is None or training is None:
        return None
    lines = [
        f"{name}: {rollout[name]} on rollout, {training[name]} on training"
        for name in sorted(rollout.keys() & training.keys())
        if None not in (rollout[name], training[name]) and rollout[name] != training[name]
    ]
    if not lines:
        return None
    return Finding("semantics", FACT, "the sides declare to mean different logprobs", lines,
                   ["make both raw, or process both alike: no number can be compared before"])  # fmt: skip
