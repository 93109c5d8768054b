"""Generalised advantage estimation over flat tokens."""

from __future__ import annotations

import numpy as np


def gae(
    rewards: np.ndarray, values: np.ndarray, cu_seqlens: np.ndarray, gamma: float = 1.0, lam: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns of N tokens, float64 [N] each (arXiv:1506.02438, eq. 16).

    delta_t = R_t + gamma V_(t+1) - V_t, A_t = delta_t + gamma lam A_(t+1), return_t = A_t + V_t; behind a sequence's
    last token value and advantage are 0. rewards, values: [N], of the tokens that count alone: what stands between two
    turns was dropped, so the next value is that of the next token of the policy's. cu_seqlens: int64 [B+1], of these.
    """
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    if rewards.shape != values.shape or len(rewards) != cu_seqlens[-1]:
        raise ValueError(f"{len(rewards)} rewards and {len(values)} values for {cu_seqlens[-1]} tokens")
    starts, lengths = np.asarray(cu_seqlens[:-1]), np.diff(cu_seqlens)
    advantages = np.zeros_like(values)
    next_value, next_advantage = np.zeros(len(lengths)), np.zeros(len(lengths))
    for position in range(int(lengths.max(initial=0)) - 1, -1, -1):  # all sequences that reach so far, at once
        alive = lengths > position
        at = starts[alive] + position
        delta = rewards[at] + gamma * next_value[alive] - values[at]
        advantages[at] = delta + gamma * lam * next_advantage[alive]
        next_value[alive], next_advantage[alive] = values[at], advantages[at]
    return advantages, advantages + values
