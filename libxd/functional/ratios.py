"""Importance ratios training / rollout of a token, a turn and a sequence, and what their spread costs.

All ratios are given and kept as logarithms (nats): a product over a long sequence is beyond any float.
"""

from __future__ import annotations

import math

import numpy as np

from libxd.functional.segments import Segments


def log_ratios(training: np.ndarray, rollout: np.ndarray) -> np.ndarray:
    """float64 [N]: log r of each token, from logprobs [N] in nats."""
    return np.asarray(training, np.float64) - np.asarray(rollout, np.float64)


def geometric_mean(d: np.ndarray, segments: Segments) -> np.ndarray:
    """float64 [S]: log of (prod r)^(1 / tokens), the length-normalised ratio of GSPO (arXiv:2507.18071, eq. 7)."""
    return segments.mean(d)


def product(d: np.ndarray, segments: Segments) -> np.ndarray:
    """float64 [S]: log of prod r, the ratio of the probabilities of the whole segment: its true importance weight."""
    return segments.sum(d)


class Moments:
    """Mean, effective sample size and chi-square of weights given by their logarithms, block by block.

    Sums are float64 and scaled by the largest weight so far, so that no weight overflows them.
    """

    def __init__(self) -> None:
        self.count = 0
        self._top = -math.inf
        self._sum = self._squares = self._deviations = 0.0

    def add(self, log_weights: np.ndarray) -> None:
        """Take in log weights [N]; -inf is a weight of 0."""
        if not len(log_weights):
            return
        log_weights = np.asarray(log_weights, np.float64)
        self.count += len(log_weights)
        with np.errstate(over="ignore"):
            self._deviations += float(np.square(np.expm1(log_weights)).sum())
        top = max(self._top, float(log_weights.max()))
        if top == -math.inf:
            return
        shrink = math.exp(self._top - top)
        scaled = np.exp(log_weights - top)
        self._sum = self._sum * shrink + float(scaled.sum())
        self._squares = self._squares * shrink**2 + float(np.square(scaled).sum())
        self._top = top

    @property
    def mean(self) -> float | None:
        """The mean weight: near 1 where the weights are ratios of two policies. None for none, or beyond float64."""
        if not self.count:
            return None
        if not self._sum:
            return 0.0
        return _finite(lambda: math.exp(self._top + math.log(self._sum / self.count)))

    @property
    def ess_fraction(self) -> float | None:
        """(sum w)^2 / (n sum w^2), in (0, 1]: Kish's effective sample size over n (L. Kish, Survey Sampling, 1965).

        None where no weight is above 0.
        """
        return min(self._sum**2 / (self.count * self._squares), 1.0) if self._squares else None

    @property
    def chi_square(self) -> float | None:
        """mean((w - 1)^2): estimates chi^2(training || rollout) = E_rollout[r^2] - 1, for w = r of rollout's samples.

        Equal in expectation to mean(w^2) - 1, which some trainers log, since E[r] = 1; of a sample that one is larger
        by 2 (mean(w) - 1) and may be negative. None for none, or beyond float64.
        """
        return _finite(lambda: self._deviations / self.count) if self.count else None


def ess_fraction(log_weights: np.ndarray) -> float | None:
    """`Moments.ess_fraction` of log weights [N]."""
    return _of(log_weights).ess_fraction


def chi_square(log_weights: np.ndarray) -> float | None:
    """`Moments.chi_square` of log weights [N]."""
    return _of(log_weights).chi_square


def _of(log_weights: np.ndarray) -> Moments:
    moments = Moments()
    moments.add(log_weights)
    return moments


def _finite(value) -> float | None:
    try:
        found = value()
    except OverflowError:
        return None
    return found if math.isfinite(found) else None
