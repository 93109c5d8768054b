"""Vacuous input: nothing is compared, or a thing with itself."""

from __future__ import annotations

import numpy as np

from libxd import scores
from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import FACT, Finding, Rule
from libxd.scores import ScoreFile

RULE = Rule(
    "vacuous",
    ("nothing-compared", "copied"),
    "No token that is active on both sides holds the same id and a finite logprob on both: nothing-compared. Every "
    "logprob is the other side's bit for bit although the two computed in other dtypes, at 8 tokens or more that are "
    "not 0: copied.",
    "None: facts. Two sides that compute alike are equal, and not called copied.",
)
_LEAST = 8


def examine(evidence: Evidence) -> Finding | None:
    rollout = evidence.rollout
    if not evidence.count and (not rollout.tokens or evidence.side_by_side):
        lines = [_line(file) for file in evidence.files]
        if rollout.tokens and not evidence.find(evidence.active).size:
            lines.append("no token is active on both sides")
        return Finding("nothing-compared", FACT, "a mean over no token is no agreement", lines,
                       ["look at how the active mask is made, and at what is left of it after filtering"])  # fmt: skip
    dtypes = evidence.dtypes
    known = None not in dtypes.values() and len(set(dtypes.values())) > 1
    if known and np.count_nonzero(evidence.r) >= _LEAST and np.array_equal(evidence.r, evidence.t):
        said = " and ".join(f"{dtype} on {side}" for side, dtype in dtypes.items())
        return Finding("copied", FACT, "one side's numbers are the other's", [
            f"all {evidence.count} logprobs are equal bit for bit, yet the sides computed in {said}",
        ], [
            "see whether the training side's logprobs are computed at all, or taken from the rollout",
        ])  # fmt: skip
    return None


def _line(file: ScoreFile) -> str:
    active = finite = 0
    for where in scores.blocks(file.tokens, file):
        active += int(np.count_nonzero(file.active_mask[where]))
        finite += int(np.count_nonzero(np.isfinite(file.logprobs[where])))
    return f"{file.side}: {active} of {file.tokens} tokens active, {finite} with a finite logprob"
