"""Rewards of sequences before they become advantages."""

from __future__ import annotations

import numpy as np


def soft_overlong(lengths: np.ndarray, max_length: int, cache_length: int) -> np.ndarray:
    """The soft overlong punishment, float64 [B], in [-1, 0], to be added to rewards (arXiv:2503.14476, eq. 13).

    0 up to max_length - cache_length response tokens; from there falling linearly, to -1 at max_length; -1 beyond.
    lengths: response tokens a sequence, [B]. ValueError unless 0 < cache_length <= max_length.
    """
    if not 0 < cache_length <= max_length:
        raise ValueError(f"the cache of {cache_length} tokens must lie within the {max_length} of a response")
    over = np.asarray(lengths, np.float64) - (max_length - cache_length)
    return -np.clip(over / cache_length, 0.0, 1.0)
