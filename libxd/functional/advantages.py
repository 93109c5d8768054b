"""Advantages of B sequences from a reward each, float64 [B]: what every token of a sequence is credited with.

Samples of one prompt are a group. A group of one has nothing to be compared with: ValueError, never an advantage of 0
or of the bare reward. Standard deviations have n - 1 below, as torch.std.
"""

from __future__ import annotations

import numpy as np

from libxd.functional.segments import Segments

#: beside a group's standard deviation, against a division by 0 (the papers have none; trainers have 1e-4 to 1e-8)
EPSILON = 1e-6


def grpo(rewards: np.ndarray, groups: Segments, epsilon: float = EPSILON) -> np.ndarray:
    """(R - mean) / (std + epsilon), both of the group (arXiv:2402.03300, section 4.1.2). rewards: [B].

    A group of equal rewards has advantages of 0.
    """
    centred = dr_grpo(rewards, groups)
    variance = groups.sum(np.square(centred)) / np.maximum(groups.counts - 1, 1)
    return centred / (groups.at_tokens(np.sqrt(variance)) + epsilon)


def dr_grpo(rewards: np.ndarray, groups: Segments) -> np.ndarray:
    """R - mean of the group: without the division that favours questions of little spread (arXiv:2503.20783, 3.1)."""
    rewards = _checked(rewards, groups)
    first = np.zeros(groups.size)
    first[groups.index[::-1]] = rewards[::-1]
    apart = rewards - groups.at_tokens(first)  # so that equal rewards have a mean of exactly 0
    return apart - groups.at_tokens(groups.mean(apart))


def rloo(rewards: np.ndarray, groups: Segments) -> np.ndarray:
    """R - mean of the *other* rewards of the group (arXiv:2402.14740, the leave-one-out baseline).

    n / (n - 1) times that of `dr_grpo`, for a group of n.
    """
    counts = groups.at_tokens(groups.counts)
    centred = dr_grpo(rewards, groups)
    return centred * counts / (counts - 1)


def reinforce_plus_plus(rewards: np.ndarray, lengths: np.ndarray, epsilon: float = 1e-8) -> np.ndarray:
    """(R - mean) / sqrt(variance + epsilon), both over the tokens of the batch (arXiv:2501.03262).

    With a discount of 1 each token's return is its sequence's reward, so a sequence counts as often as it has tokens.
    rewards: [B]; lengths: tokens a sequence, [B]; one without tokens counts nothing.
    """
    rewards, lengths = np.asarray(rewards, np.float64), np.asarray(lengths, np.float64)
    if rewards.shape != lengths.shape:
        raise ValueError(f"{rewards.shape} rewards for {lengths.shape} lengths")
    tokens = lengths.sum()
    if tokens < 2:
        raise ValueError(f"a batch of {int(tokens)} tokens has no variance")
    centred = rewards - (lengths @ rewards) / tokens
    variance = (lengths @ np.square(centred)) / (tokens - 1)
    return centred / np.sqrt(variance + epsilon)


def reinforce_plus_plus_baseline(rewards: np.ndarray, groups: Segments, lengths: np.ndarray) -> np.ndarray:
    """`reinforce_plus_plus` of R - mean of the group (arXiv:2501.03262, the variant with a group baseline)."""
    return reinforce_plus_plus(dr_grpo(rewards, groups), lengths)


def _checked(rewards: np.ndarray, groups: Segments) -> np.ndarray:
    rewards = np.asarray(rewards, np.float64)
    if rewards.shape != groups.index.shape:
        raise ValueError(f"{len(groups.index)} sequences have groups, {len(rewards)} a reward")
    if (groups.counts == 1).any():
        raise ValueError("a group of one has no advantage over the others")
    return rewards
