"""Positions: a difference that begins at a position, or grows along the sequence."""

from __future__ import annotations

import numpy as np

from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import SYMPTOM, Finding, Rule
from libxd.doctor.rounding import USUAL, usual_mean
from libxd.doctor.statistics import two_sided

_TIMES = 3.0
_CUTS = np.arange(0.1, 0.95, 0.05)
_PART, _EACH, _P = 24, 4, 0.01
_AGREE = 0.9

RULE = Rule(
    "positions",
    ("position",),
    "|d| over the median |d| of tokens of about the same logprob (ten strata): for one of 17 cuts along the position, "
    "with 24 tokens or more on either side, its median behind the cut is at least 3 times that before it, and so it "
    "is, by 1.5 times, in 90 % of the sequences with 4 tokens on either side, as coins would do once in 100 times; "
    f"and mean |d| behind it is more than rounding makes ({USUAL}).",
    "Of the clean pairs none (docs/doctor.md): there the ratio reaches 3.1, but not in all sequences alike.",
    least_tokens=96,
    least_sequences=2,
)


def examine(evidence: Evidence) -> Finding | None:
    position, ratio = evidence.position, evidence.ratio
    best: tuple[float, int] | None = None
    for cut in np.unique(np.quantile(position, _CUTS, method="inverted_cdf")):
        behind = position >= cut
        if min(behind.sum(), (~behind).sum()) < _PART:
            continue
        before, after = np.median(ratio[~behind]), np.median(ratio[behind])
        times = float(after / before) if before else (np.inf if after else 1.0)
        if best is None or times > best[0]:
            best = times, int(cut)
    if best is None or best[0] < _TIMES:
        return None
    times, cut = best
    along, tried = _sequences(evidence, cut)
    if not tried or along < _AGREE * tried or two_sided(along, tried) > _P:
        return None
    first = _first_bad(evidence, cut)
    d = evidence.magnitude
    before, after = d[position < cut], d[position >= cut]
    if after.mean() <= usual_mean(evidence):
        return None
    lines = [
        f"|training - rollout| is {times:.3g} times as large from position {cut} on, for tokens as likely; so it is in "
        f"{along} of {tried} sequences",
        f"mean {before.mean():.3g} before position {cut}, {after.mean():.3g} from there on",
    ]
    if first is not None:
        lines.append(f"first bad: {evidence.place(evidence.cells[first])}, {d[first]:.3g} nats")
    return Finding("position", SYMPTOM, "the difference begins or grows along the sequence", lines, [
        "compare position ids, the rotary base and its scaling, the context length and a sliding window of both sides",
        "a jump at a multiple of a block or chunk size is a cache's or a chunked prefill's",
    ])  # fmt: skip


def _sequences(evidence: Evidence, cut: int) -> tuple[int, int]:
    along = tried = 0
    for own in evidence.parts:
        behind = evidence.position[own] >= cut
        if min(behind.sum(), (~behind).sum()) < _EACH:
            continue
        tried += 1
        ratio = evidence.ratio[own]
        along += bool(np.median(ratio[behind]) > 1.5 * np.median(ratio[~behind]))
    return along, tried


def _first_bad(evidence: Evidence, cut: int) -> int | None:
    """Of the tokens in order of their position, the first beyond all but one percent of those before the cut."""
    before = evidence.magnitude[evidence.position < cut]
    bad = np.flatnonzero((evidence.magnitude > np.quantile(before, 0.99)) & (evidence.position >= cut))
    return int(bad[evidence.position[bad].argmin()]) if bad.size else None
