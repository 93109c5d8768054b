"""Lengths: another number of sequences, or of tokens in one of them."""

from __future__ import annotations

import numpy as np

from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import FACT, Finding, Rule

RULE = Rule(
    "lengths",
    ("lengths",),
    "Another number of sequences, or a sequence of another length, on the two sides.",
    "None: a fact.",
)
_SHOWN = 3


def examine(evidence: Evidence) -> Finding | None:
    rollout, training = (np.diff(file.cu_seqlens) for file in evidence.files)
    if np.array_equal(rollout, training):
        return None
    lines = []
    if rollout.size != training.size:
        lines.append(f"{rollout.size} sequences on rollout, {training.size} on training")
    shared = min(rollout.size, training.size)
    differ = np.flatnonzero(rollout[:shared] != training[:shared])
    apart = training[differ] - rollout[differ]
    lines += [f"sequence {s}: {rollout[s]} tokens on rollout, {training[s]} on training" for s in differ[:_SHOWN]]
    if differ.size > _SHOWN:
        lines.append(f"and {differ.size - _SHOWN} sequences more")
    if differ.size and (apart == apart[0]).all():
        lines.append(f"each of the {differ.size} is {abs(int(apart[0]))} {'longer' if apart[0] > 0 else 'shorter'} on "
                     "training: an end or begin token that one side appends or drops")  # fmt: skip
    return Finding("lengths", FACT, "the two sides hold sequences of other lengths", lines, [
        "look for an end token that one side appends, a truncation, padding that was not taken off",
    ])  # fmt: skip
