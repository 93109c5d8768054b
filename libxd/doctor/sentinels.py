"""Fill values inside the active mask: numbers that stand for "not scored" and are taken for logprobs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from libxd.difference import subtract
from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import FACT, Finding, Rule
from libxd.doctor.places import Places
from libxd.scores import ScoreFile

#: nats by which a token must be off for its 0.0 to be a fill value
_OFF = 1.0
_FILLS = (0.0, -1.0, -10.0, -100.0, -999.0, -1000.0, -9999.0, -10000.0, -99999.0, -100000.0)
#: nats above 0 that rounding a log-softmax, or a difference of bfloat16 logits, may reach
_ABOVE = 0.1
_BEYOND = -1e5  # nats: no logprob of a float32 softmax over logits that a model gives
_KINDS = ("NaN", "infinite", "above 0", f"below {_BEYOND:g}", *(f"exactly {fill:g}" for fill in _FILLS))

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
_LEAST = 8


def examine(evidence: Evidence) -> Finding | None:
    if not evidence.side_by_side:
        return None
    lines, beside = [], []
    active = evidence.find(evidence.active).size
    for file, other in (evidence.files, evidence.files[::-1]):
        for kind, (found, cells) in _filled(evidence, file, other).items():
            share = found.size / max(1, active)
            seen = ", ".join(f"{evidence.place(i)}: {_text(file.logprobs[i])} against {_text(other.logprobs[i])}"
                             for i in found.first)  # fmt: skip
            lines.append(f"{file.side}: {found.size} active tokens ({share:.2%}) are {kind}: {seen}")
            beside.append(_explained(evidence, cells))
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


def _filled(evidence: Evidence, file: ScoreFile, other: ScoreFile) -> dict[str, tuple[Places, np.ndarray]]:
    """Kind of fill -> its active tokens, and which of those that are looked at are among them: bool [A]."""
    found: dict[str, tuple[Places, np.ndarray]] = {}
    for where in evidence.blocks():
        values, active = file.logprobs[where], evidence.active(where)
        first, last = np.searchsorted(evidence.cells, (where.start, where.stop))
        for kind, mask in _kinds(values, other.logprobs[where]):
            if not (mask := mask & active).any():
                continue
            places, cells = found.setdefault(kind, (Places(), np.zeros(evidence.count, bool)))
            places.add(where.start + np.flatnonzero(mask))
            cells[first:last] = mask[evidence.cells[first:last] - where.start]
    return {kind: found[kind] for kind in _KINDS if kind in found}


def _kinds(values: np.ndarray, others: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """By the names of `_KINDS`, which of a block's logprobs are so: bool [N]."""
    with np.errstate(invalid="ignore"):
        off = ~(np.abs(subtract(values, others)) <= _OFF)
    finite = np.isfinite(values)
    masks = (np.isnan(values), np.isposinf(values), (values > _ABOVE) & finite, (values < _BEYOND) & finite)
    fills = ((values == np.float32(fill)) & off for fill in _FILLS)
    return zip(_KINDS, (*masks, *fills), strict=True)


def _explained(evidence: Evidence, cells: np.ndarray) -> float:
    total = evidence.magnitude.sum()
    if not total:
        return 0.0
    return float(evidence.magnitude[cells].sum() / total)


def _text(value: float) -> str:
    return f"{float(value):.4g}"


