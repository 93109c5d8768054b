"""Outliers: a few sequences, the samples of a prompt, or a pack far worse than the rest."""

from __future__ import annotations

import numpy as np

from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import SYMPTOM, Finding, Rule
from libxd.doctor.rounding import USUAL, usual_mean
from libxd.doctor.statistics import medians_by

_TIMES, _MEAN, _RANK, _MOST, _TOKENS = 5.0, 4.0, 0.75, 0.5, 16

RULE = Rule(
    "outliers",
    ("outlying-prompt", "outlying-sequences"),
    "A sequence of 16 tokens or more is outlying when its median |d|, for tokens as likely (ten strata), is at least "
    "5 times the median sequence's, its mean |d| at least 4 times, its mean rank among such tokens above 0.75, and "
    f"its mean |d| more than rounding makes ({USUAL}). "
    "Named when no more than half of the sequences are. Sequences of one prompt, all of its samples and no other: "
    "outlying-prompt.",
    "Of the clean pairs none (docs/doctor.md): there the ratio reaches 2.4, and 4.2 in synthetic ones.",
    least_tokens=64,
    least_sequences=4,
)
_SHOWN = 4


def examine(evidence: Evidence) -> Finding | None:
    size = evidence.sequences.size
    counts = np.bincount(evidence.index, minlength=size)
    own = medians_by(evidence.index, evidence.ratio, size)
    rank = np.bincount(evidence.index, evidence.rank, minlength=size) / counts
    middle = float(np.median(own))
    means = np.bincount(evidence.index, evidence.magnitude, minlength=size) / counts
    outlying = (own >= _TIMES * middle) & (rank > _RANK) & (counts >= _TOKENS) & (
        means > max(usual_mean(evidence), _MEAN * float(np.median(means)))
    )
    if not outlying.any() or outlying.mean() > _MOST:
        return None
    found = np.flatnonzero(outlying)
    rest = float(means[~outlying].mean())
    lines = [f"{found.size} of {size} sequences: mean |training - rollout| {means[found].mean():.3g} against "
             f"{rest:.3g} in the others"]  # fmt: skip
    lines += [f"sequence {evidence.sequences[s]}: {means[s]:.3g} over {counts[s]} tokens, median "
              + (f"{own[s] / middle:.3g} times the usual" if middle else "not 0 as usual")
              for s in found[np.argsort(-own[found])][:_SHOWN]]  # fmt: skip
    prompts = np.unique(evidence.prompt[found])
    whole = np.isin(evidence.prompt, prompts)
    if np.array_equal(whole, outlying) and np.unique(evidence.prompt).size > prompts.size:
        several = bool((np.bincount(evidence.prompt)[prompts] > 1).all())
        lines.append(f"they are all samples of {prompts.size} prompt{'s' if prompts.size > 1 else ''}")
        if several:
            return Finding("outlying-prompt", SYMPTOM, "the samples of some prompts alone are far off", lines, [
                "render those prompts on both sides and compare the ids: template, system turn, begin token",
                "a prefix that a cache shares is computed once for all: try rollout.enable_prefix_caching=false",
            ])  # fmt: skip
    return Finding("outlying-sequences", SYMPTOM, "some sequences alone are far off", lines, [
        "score one of them by itself (batch.size 1): alone right is a batch's doing: padding, packing, masks",
    ])  # fmt: skip
