"""Batches: sequences that are right only as the first of a pack, or worse the more they were padded."""

from __future__ import annotations

import numpy as np

from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import SYMPTOM, Finding, Rule
from libxd.doctor.rounding import USUAL, usual_mean
from libxd.doctor.statistics import medians_by, rank_correlation

_BETTER, _HALF, _LEAST_PACKS, _MOST_A_PACK = 0.3, 0.5, 2, 64
_CORRELATION, _TIMES, _TOKENS = -0.7, 3.0, 16

RULE = Rule(
    "batches",
    ("pack", "padded-batch"),
    "By the median |d| of each sequence, for tokens as likely (ten strata), where mean |d| is more than rounding "
    f"makes ({USUAL}). pack: those below 0.3 times the "
    "median sequence's are just every n-th from the first on, for an n of 2 to 64, two or more, and their mean |d| is "
    "at most half the others'. padded-batch: of 8 sequences or more with 16 tokens each, it falls with the length of "
    "the sequence (rank correlation below -0.7), that of the shorter third is at least 3 times that of the longer "
    "third, and the shorter third's mean |d| twice what rounding makes.",
    "Of the clean pairs none (docs/doctor.md), after padded-batch was narrowed; two of 1404 before, of eight tokens a "
    "sequence.",
    least_tokens=64,
    least_sequences=8,
)


def examine(evidence: Evidence) -> Finding | None:
    if evidence.magnitude.mean() <= usual_mean(evidence):
        return None
    own = medians_by(evidence.index, evidence.ratio, evidence.sequences.size)
    return _pack(evidence, own) or _padded(evidence, own)


def _pack(evidence: Evidence, own: np.ndarray) -> Finding | None:
    better = np.flatnonzero(own < _BETTER * np.median(own))
    if better.size < _LEAST_PACKS:
        return None
    step = int(better[1] - better[0])
    if not 2 <= step <= _MOST_A_PACK or not np.array_equal(better, np.arange(0, own.size, step)):
        return None
    first = np.isin(evidence.index, better)
    if evidence.magnitude[first].mean() > _HALF * evidence.magnitude[~first].mean():
        return None
    return Finding("pack", SYMPTOM, "each first sequence of a pack alone is right", [
        f"sequences {', '.join(map(str, evidence.sequences[better][:4]))} … (every {step}.) differ by "
        f"{evidence.magnitude[first].mean():.3g} on average, the others by {evidence.magnitude[~first].mean():.3g}",
    ], [
        f"look at the mask and the positions of packed rows of {step}: a sequence sees the one before it",
        "score one of the others by itself (batch.size 1)",
    ])  # fmt: skip


def _padded(evidence: Evidence, own: np.ndarray) -> Finding | None:
    kept = np.flatnonzero(np.bincount(evidence.index, minlength=own.size) >= _TOKENS)
    if kept.size < RULE.least_sequences:
        return None
    lengths, own = np.diff(evidence.cu_seqlens)[evidence.sequences][kept], own[kept]
    falls = rank_correlation(own, lengths)
    order = np.argsort(lengths, kind="stable")
    third = max(1, own.size // 3)
    parts = order[:third], order[-third:]
    shorter, longer = (np.median(own[part]) for part in parts)
    if falls > _CORRELATION or shorter < _TIMES * longer:
        return None
    means = [evidence.magnitude[np.isin(evidence.index, kept[part])].mean() for part in parts]
    if means[0] < 2 * usual_mean(evidence):
        return None
    return Finding("padded-batch", SYMPTOM, "the shorter a sequence, the worse: padding is seen", [
        f"rank correlation of a sequence's |training - rollout| with its length {falls:.2f}; mean {means[0]:.3g} over "
        f"the {third} shortest ({lengths[order[0]]} tokens and more), {means[1]:.3g} over the {third} longest",
    ], [
        "look at the attention mask and the position ids of padded rows, on the left above all",
        "score one of the short ones by itself (batch.size 1)",
    ])  # fmt: skip
