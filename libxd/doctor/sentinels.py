"""Fill values inside the active mask: numbers that stand for "not scored" and are taken for logprobs."""

from __future__ import annotations

import numpy as np

from libxd.difference import subtract
from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import FACT, Finding, Rule

#: nats by which a token must be off for its 0.0 to be a fill value
_OFF = 1.0
_FILLS = (0.0, -1.0, -10.0, -100.0, -999.0, -1000.0, -9999.0, -10000.0, -99999.0, -100000.0)
#: nats above 0 that rounding a log-softmax, or a difference of bfloat16 logits, may reach
_ABOVE = 0.1
_BEYOND = -1e5  # nats: no logprob of a float32 softmax over logits that a model gives

RULE = Rule(
    "sentinels",
    ("fill-values",),
    "Active, on either side: NaN or +inf (-inf is truncation's); a logprob above 0.1, or below -1e5; or one that is "
    "exactly 0, -1, -10, -100, -999 or the like and more than 1 nat from the other side's, which is not that value. Or "
    "every logprob of both sides is exactly 0, at 8 tokens or more.",
    "A logprob of exactly -1 or -10 is one float32 in 2^23; of exactly 0 a token of probability above 1 - 2^-24, which "
    "a sound other side does not hold for 1 nat less likely, and which no model gives to every token: but logprobs "
    "that were processed until one token was left, as top-k 1 does, are all 0, and compare as little.",
)
_SHOWN = 3
_LEAST = 8


def examine(evidence: Evidence) -> Finding | None:
    if not evidence.side_by_side:
        return None
    lines, beside = [], []
    for file, other in (evidence.files, evidence.files[::-1]):
        values = file.logprobs
        with np.errstate(invalid="ignore"):
            off = ~(np.abs(subtract(values, other.logprobs)) <= _OFF)
        kinds = {
            "NaN": np.isnan(values),
            "infinite": np.isposinf(values),
            "above 0": (values > _ABOVE) & np.isfinite(values),
            f"below {_BEYOND:g}": (values < _BEYOND) & np.isfinite(values),
        } | {f"exactly {fill:g}": (values == np.float32(fill)) & off for fill in _FILLS}
        for kind, mask in kinds.items():
            found = np.flatnonzero(mask & evidence.both_active)
            if not found.size:
                continue
            share = found.size / max(1, int(np.count_nonzero(evidence.both_active)))
            seen = ", ".join(f"{evidence.place(i)}: {_text(values[i])} against {_text(other.logprobs[i])}"
                             for i in found[:_SHOWN])  # fmt: skip
            lines.append(f"{file.side}: {found.size} active tokens ({share:.2%}) are {kind}: {seen}")
            beside.append(_explained(evidence, found))
    if evidence.count >= _LEAST and not evidence.r.any() and not evidence.t.any():
        lines.append(f"all {evidence.count} logprobs are exactly 0 on both sides: every token a probability of 1")
        beside.append(0.0)
    if not lines:
        return None
    if any(beside):
        lines += [f"{share:.0%} of the sum of |training - rollout| is theirs" for share in [max(beside)] if share]
    return Finding("fill-values", FACT, "values that stand for \"not scored\" are compared as logprobs", lines, [
        "write NaN or null where nothing was scored, and leave such tokens out of the mask",
        "look for a length mismatch, an appended end token, observation tokens: what pads logprobs there?",
    ])  # fmt: skip


def _explained(evidence: Evidence, found: np.ndarray) -> float:
    total = evidence.magnitude.sum()
    if not total:
        return 0.0
    return float(evidence.magnitude[np.isin(evidence.cells, found)].sum() / total)


def _text(value: float) -> str:
    return f"{float(value):.4g}"


