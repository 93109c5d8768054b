"""Distribution-free statistics: exact tails of signs, ranks, and bounds that hold for a family of tests."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np


def ranks(values: np.ndarray) -> np.ndarray:
    """0-based ranks of [N] as float64, ties at their mean."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[place]


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's: the correlation of the ranks of [N] and [N]; 0 where one of them is constant."""
    x, y = (ranks(each) - (each.size - 1) / 2 for each in (a, b))
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale else 0.0


def sign_tail(successes: int, trials: int) -> float:
    """The probability that so many or more of `trials` fair coins show heads, exactly up to 2^12 of them.

    Beyond, Hoeffding's bound, which is larger (W. Hoeffding, "Probability inequalities for sums of bounded random
    variables", 1963).
    """
    if not trials:
        return 1.0
    if trials > 1 << 12:
        excess = max(successes / trials - 0.5, 0.0)
        return math.exp(-2 * trials * excess * excess)
    total = sum(math.comb(trials, k) for k in range(successes, trials + 1))
    return total / 2**trials


def two_sided(successes: int, trials: int) -> float:
    """`sign_tail` of the commoner face, doubled: at most 1."""
    return min(1.0, 2 * sign_tail(max(successes, trials - successes), trials))


def means_by(groups: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """The mean of `values` [A] in each of `size` groups (ints [A]): float64 [size]; NaN for an empty one."""
    counts = np.bincount(groups, minlength=size)
    with np.errstate(invalid="ignore"):
        return np.bincount(groups, values, minlength=size) / counts


def medians_by(groups: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Likewise, medians. `groups` must not fall."""
    edges = np.searchsorted(groups, np.arange(size + 1))
    return np.array([np.median(values[a:b]) if b > a else np.nan for a, b in pairwise(edges)])
