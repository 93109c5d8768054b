"""Wrong token: a side took the likeliest entry's logprob instead of the sampled token's."""

from __future__ import annotations

import numpy as np

from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import SHAPE, Finding, Rule
from libxd.doctor.statistics import rank_correlation
from libxd.rundir import SIDES

_SCALED = 0.5
_HIGHER, _FAR, _SHARE, _LOWER = 0.5, 2.5, 0.08, 0.005

RULE = Rule(
    "wrong-token",
    ("wrong-token",),
    "One side is higher by more than 0.5 nats at 8 % of the tokens or more, somewhere by more than 2.5, and lower by "
    "more than 0.5 nats at no more than 0.5 % of them; its median logprob where it is higher is above -3; elsewhere "
    "the difference does not go with the logprob (rank correlation up to 0.5), as it would under another scale.",
    "Rounding has both signs, and does not reach 0.5 nats at 8 % of the tokens.",
    least_tokens=64,
)


def examine(evidence: Evidence) -> Finding | None:
    for side, other in (SIDES, SIDES[::-1]):
        ours, theirs = evidence.of_side(side), evidence.of_side(other)
        higher, lower = ours - theirs > _HIGHER, theirs - ours > _HIGHER
        if higher.mean() < _SHARE or lower.mean() > _LOWER or (ours - theirs).max() < _FAR:
            continue
        agree = ~higher & ~lower
        if np.median(ours[higher]) < -3.0 or abs(rank_correlation((ours - theirs)[agree], theirs[agree])) > _SCALED:
            continue
        rest = evidence.magnitude[agree]
        return Finding("wrong-token", SHAPE, f"{side} gives the logprob of a likelier token than the sampled one", [
            f"{side} is higher by more than {_HIGHER} nats at {int(higher.sum())} of {evidence.count} tokens, by up to "
            f"{(ours - theirs).max():.3g}, and lower at {int(lower.sum())}; elsewhere the sides are "
            f"{np.median(rest) if rest.size else 0:.2g} apart",
            f"most at {evidence.place(evidence.cells[(ours - theirs).argmax()])}",
        ], [
            "look the sampled id up in what the engine lists, not the first entry", evidence.rescoring,
        ])  # fmt: skip
    return None
