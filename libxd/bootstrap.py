"""Bootstrap over sequences: how sure a mean over tokens is.

Tokens of one sequence are no draws of their own, so whole sequences are drawn, with replacement. The draws are the same
ones each time, and for every quantity over the same sequences: what two cases have in common falls out of their
difference, which is a paired bootstrap (B. Efron and R. Tibshirani, An Introduction to the Bootstrap, chapters 8, 13).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

DRAWS = 1000
LEVEL = 0.95
_BLOCKS = 1024  # sequences are put together into so many blocks at most
_SEED = 20240


@dataclass(frozen=True)
class Interval:
    """A value, and where 95 % of bootstrap draws over sequences fall; None with fewer than two sequences."""

    value: float
    low: float | None
    high: float | None


def draws(counts: np.ndarray) -> np.ndarray | None:
    """How often each block of sequences is drawn: float64 [D, blocks], the same each time.

    counts int64 [B]: tokens of each sequence. A draw without a token is left out. None with fewer than two sequences
    that have any.
    """
    if np.count_nonzero(counts) < 2:
        return None
    of_block = blocks(counts)
    drawn = _drawn(of_block.size)
    return drawn[drawn @ of_block > 0]


@lru_cache(maxsize=1)
def _drawn(size: int) -> np.ndarray:
    """How often each of `size` blocks is drawn in each draw: float64 [D, size], read-only."""
    stream = np.random.RandomState(_SEED)  # the old kind, which is frozen: the same interval under any numpy
    drawn = stream.multinomial(size, np.full(size, 1 / size), DRAWS).astype(np.float64)
    drawn.flags.writeable = False
    return drawn


def blocks(values: np.ndarray) -> np.ndarray:
    """Sums over at most `_BLOCKS` runs of neighbouring sequences: float64."""
    edges = np.linspace(0, values.size, min(values.size, _BLOCKS) + 1).astype(np.intp)[:-1]
    return np.add.reduceat(values.astype(np.float64), edges)


def means(sums: np.ndarray, counts: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """The mean over tokens of each draw: float64 [D]. sums float64 [B], counts int64 [B]: of each sequence."""
    return (drawn @ blocks(sums)) / (drawn @ blocks(counts))


def span(values: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of draws."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)


def mean(sums: np.ndarray, counts: np.ndarray, less: np.ndarray | None = None) -> Interval | None:
    """The mean over tokens and its interval; None without a token.

    sums float64 [B], counts int64 [B]: of each sequence. less float64 [B]: sums of another quantity over the same
    tokens, whose mean is taken off, draw by draw.
    """
    total = counts.sum()
    if not total:
        return None
    kept = sums if less is None else sums - less
    value = float(kept.sum() / total)
    drawn = draws(counts)
    return Interval(value, *(span(means(kept, counts, drawn)) if drawn is not None else (None, None)))
