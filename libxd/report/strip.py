"""Windows of tokens around the worst ones of a pair, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np

from libxd.difference import Difference
from libxd.report.vocabulary import Vocabulary


def strips(
    difference: Difference, worst: list[tuple[int, int]], width: int, vocabulary: Vocabulary | None, redact: bool
) -> list[dict[str, Any]]:
    """One strip a (sequence, flat index of its worst token): at most `width` neighbouring tokens of that sequence.

    A logprob that is not finite is null. redact: neither text nor token ids.
    """
    bounds = difference.rollout.cu_seqlens
    out = []
    for sequence, index in worst:
        begin, end = int(bounds[sequence]), int(bounds[sequence + 1])
        start = max(begin, min(index - 2 * width // 3, end - width))  # most of it shows what led to the worst
        where = slice(start, min(start + width, end))
        out.append({
            "sequence": sequence,
            "length": end - begin,
            "first": start - begin,
            "worst": index - begin,
            "tokens": _tokens(difference, where, vocabulary, redact),
        })  # fmt: skip
    return out


def _tokens(
    difference: Difference, where: slice, vocabulary: Vocabulary | None, redact: bool
) -> list[dict[str, Any]]:
    """Tokens of a slice; `difference` is training - rollout in float32, null unless both are finite."""
    ids = difference.rollout.token_ids[where].tolist()
    active, mismatch = difference.active(where).tolist(), difference.mismatch(where).tolist()
    sides = [_finite(file.logprobs[where]) for file in (difference.rollout, difference.training)]
    apart = _finite(difference.all(where))
    return [
        {
            "id": None if redact else token,
            "text": vocabulary.text(token) if vocabulary and not redact else None,
            "active": active[i],
            "mismatch": mismatch[i],
            "rollout": sides[0][i],
            "training": sides[1][i],
            "difference": apart[i],
        }
        for i, token in enumerate(ids)
    ]


def _finite(values: np.ndarray) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values.tolist()]

