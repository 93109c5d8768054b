"""Estimates of the KL divergence between the two sides from tokens that rollout sampled; the direction is in the name.

Every function gives the terms float64 [N], in nats, whose mean is the estimate; d = log r = training - rollout [N].
k1 and k3 have the divergence as their expectation, k2 up to third order (J. Schulman, "Approximating KL divergence",
2020). The tokens are rollout's, so for KL(training || rollout) each term is weighted by its ratio r: E_training[f] =
E_rollout[r f] a token, given the tokens before it. (What stood before it was rollout's choice, too, in either
direction: an expectation under training's own prefixes would need the ratios of those as well.)
"""

from __future__ import annotations

import numpy as np


def k1_rollout_training(d: np.ndarray) -> np.ndarray:
    """-d: of KL(rollout || training). A term may be negative, and so may a mean."""
    return -_float64(d)


def k2_rollout_training(d: np.ndarray) -> np.ndarray:
    """d^2 / 2: of KL(rollout || training)."""
    return np.square(_float64(d)) / 2


def k3_rollout_training(d: np.ndarray) -> np.ndarray:
    """exp(d) - 1 - d, at least 0: of KL(rollout || training) (arXiv:2402.03300, eq. 4, is this form)."""
    d = _float64(d)
    return np.maximum(np.expm1(d) - d, 0.0)  # rounding alone can bring it below


def k1_training_rollout(d: np.ndarray) -> np.ndarray:
    """r d: of KL(training || rollout)."""
    d = _float64(d)
    return np.exp(d) * d


def k2_training_rollout(d: np.ndarray) -> np.ndarray:
    """r d^2 / 2: of KL(training || rollout)."""
    d = _float64(d)
    return np.exp(d) * np.square(d) / 2


def k3_training_rollout(d: np.ndarray) -> np.ndarray:
    """r (exp(-d) - 1 + d), at least 0: of KL(training || rollout)."""
    d = _float64(d)
    return np.maximum(d * np.exp(d) - np.expm1(d), 0.0)


#: direction -> estimator -> terms
ESTIMATORS = {
    "rollout_training": {"k1": k1_rollout_training, "k2": k2_rollout_training, "k3": k3_rollout_training},
    "training_rollout": {"k1": k1_training_rollout, "k2": k2_training_rollout, "k3": k3_training_rollout},
}


def _float64(d: np.ndarray) -> np.ndarray:
    return np.asarray(d, np.float64)
