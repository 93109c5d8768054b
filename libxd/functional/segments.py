"""Tokens by the sequence or the turn they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Segments:
    """A partition of N tokens. index: int64 [N], each in [0, size); a segment may have no token."""

    index: np.ndarray
    size: int

    @cached_property
    def counts(self) -> np.ndarray:
        """int64 [size]: tokens a segment."""
        return np.bincount(self.index, minlength=self.size)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """float64 [size]: the sums of values [N], added in token order; 0 of a segment without a token."""
        return np.bincount(self.index, np.asarray(values, np.float64), self.size)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """float64 [size]: the means of values [N]; 0 of a segment without a token."""
        return self.sum(values) / np.maximum(self.counts, 1)

    def at_tokens(self, values: np.ndarray) -> np.ndarray:
        """[N]: what the segment of each token has of values [size]."""
        return values[self.index]


def by_sequence(places: np.ndarray, cu_seqlens: np.ndarray) -> Segments:
    """The sequences of the active tokens at flat indices `places` (int64 [N]); cu_seqlens: int64 [B+1]."""
    return Segments(np.searchsorted(cu_seqlens, places, side="right") - 1, len(cu_seqlens) - 1)


def by_turn(places: np.ndarray, sequences: Segments) -> Segments:
    """The turns of the same tokens: unbroken runs of active tokens within a sequence.

    What stands between two turns of a conversation (a user, a tool) is inactive, so the runs of the mask are the turns;
    two turns without a token between them are one.
    """
    if not len(places):
        return Segments(np.zeros(0, np.int64), 0)
    starts = (np.diff(places) > 1) | (np.diff(sequences.index) > 0)
    index = np.concatenate(([0], np.cumsum(starts)))
    return Segments(index, int(index[-1]) + 1)
