"""Policy objectives as losses to be minimised: the term of a token, and its derivative in the token's logprob.

| objective | term of a token                         | averaged over   | epsilons, by default | source (arXiv, eq.) |
|-----------|-----------------------------------------|-----------------|----------------------|---------------------|
| ppo       | -min(r A, clip(r, 1 - low, 1 + high) A) | tokens          | 0.2                  | 1707.06347, 7       |
| grpo      | as ppo                                  | sequences       | 0.2                  | 2402.03300, 3       |
| dapo      | as ppo                                  | tokens          | 0.2, 0.28            | 2503.14476, 8       |
| dr_grpo   | as ppo                                  | by a constant   | 0.2                  | 2503.20783, sec. 3  |
| cispo     | -sg(clip(r, 1 - low, 1 + high)) A lp    | tokens          | no lower one, 4      | 2506.13585, 3-5     |
| gspo      | as ppo, r of the sequence               | sequences       | 3e-4, 4e-4           | 2507.18071, 5-7     |

lp: the logprob under the policy that is updated (here training), r: its ratio to the one that sampled (rollout), A:
advantage, sg: stop-gradient. Papers maximise; the signs here are those of a loss. "sequences": a sequence's mean, then
the mean of all. Epsilons are those of the papers named; the 0.2 of grpo and dr_grpo is PPO's, which trainers keep, and
cispo's upper bound 1 + 4 is arXiv:2510.13786's.
`xdkernels.objectives` states the same over torch; a test holds the two together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from libxd.functional.segments import Segments


@dataclass(frozen=True)
class Objective:
    """ratio: "token", or "sequence" (geometric mean). average: "tokens", "sequences" of their tokens' means, or a
    "constant". clips_weight: the clipped ratio is a constant weight (cispo). eps_low None: no lower bound."""

    name: str
    average: str
    eps_low: float | None
    eps_high: float
    ratio: str = "token"
    clips_weight: bool = False

    @property
    def bounds(self) -> tuple[float, float]:
        """Those of the ratio: 1 - eps_low (-inf without one) and 1 + eps_high."""
        return -math.inf if self.eps_low is None else 1.0 - self.eps_low, 1.0 + self.eps_high

    def with_epsilons(self, eps_low: float | None, eps_high: float) -> Objective:
        """The same with other epsilons. ValueError unless they are finite and 0 or more; of cispo alone the lower one
        may be None."""
        for epsilon in (eps_high,) if eps_low is None and self.clips_weight else (eps_low, eps_high):
            if epsilon is None or not 0 <= epsilon < math.inf:
                raise ValueError(f"{self.name}: an epsilon is a finite number, 0 or more, not {epsilon}")
        return replace(self, eps_low=eps_low, eps_high=eps_high)


OBJECTIVES = (
    Objective("ppo", "tokens", 0.2, 0.2),
    Objective("grpo", "sequences", 0.2, 0.2),
    Objective("dapo", "tokens", 0.2, 0.28),
    Objective("dr_grpo", "constant", 0.2, 0.2),
    Objective("cispo", "tokens", None, 4.0, clips_weight=True),
    Objective("gspo", "sequences", 3e-4, 4e-4, ratio="sequence"),
)


class Terms(NamedTuple):
    """Of each token, [N]: the term and its derivative in the logprob (float64), and whether a bound changed it (bool).

    Not yet averaged: `weights` has the factors.
    """

    values: np.ndarray
    slopes: np.ndarray
    clipped_low: np.ndarray
    clipped_high: np.ndarray


def terms(objective: Objective, logprobs: np.ndarray, d: np.ndarray, advantages: np.ndarray) -> Terms:
    """The terms of N tokens. logprobs [N], nats; d [N]: log r at the objective's level; advantages [N], constant over
    a sequence where the ratio is the sequence's (else the credit of single tokens would be lost)."""
    with np.errstate(over="ignore"):
        ratios = np.exp(np.asarray(d, np.float64))
    advantages = np.asarray(advantages, np.float64)
    if objective.clips_weight:
        return clipped_weight(np.asarray(logprobs, np.float64), ratios, advantages, *objective.bounds)
    return clipped_surrogate(ratios, advantages, *objective.bounds)


def clipped_surrogate(ratios: np.ndarray, advantages: np.ndarray, lower: float, upper: float) -> Terms:
    """-min(r A, clip(r, lower, upper) A) and its derivative, with dr / dlp = r (arXiv:1707.06347, eq. 7).

    The clip acts where it lowers the gain: above `upper` for A > 0, below `lower` for A < 0; there the derivative is 0.
    *At* a bound it does not act yet. With A = 0 term and derivative are 0.
    """
    low = (advantages < 0) & (ratios < lower)
    high = (advantages > 0) & (ratios > upper)
    acting = np.where((advantages == 0) & np.isinf(ratios), 1.0, ratios)  # inf times 0 would be NaN
    acting = np.where(low, lower, np.where(high, upper, acting))
    values = -advantages * acting
    return Terms(values, np.where(low | high, 0.0, values), low, high)


def clipped_weight(
    logprobs: np.ndarray, ratios: np.ndarray, advantages: np.ndarray, lower: float, upper: float
) -> Terms:
    """-sg(clip(r, lower, upper)) A lp and its derivative: a clipped token keeps one (arXiv:2506.13585, eq. 4)."""
    slopes = -advantages * np.clip(ratios, lower, upper)
    values = np.where(slopes == 0, 0.0, slopes * np.where(slopes == 0, 0.0, logprobs))
    acts = advantages != 0
    return Terms(values, slopes, acts & (ratios < lower), acts & (ratios > upper))


def k3_penalty(logprobs: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """exp(ref - lp) - (ref - lp) - 1 and its derivative in lp, float64 [N] (arXiv:2402.03300, eq. 4): what a KL
    coefficient beta times is added to each term, inside the average. Estimates KL(policy || reference)."""
    difference = np.asarray(reference, np.float64) - np.asarray(logprobs, np.float64)
    excess = np.expm1(difference)
    return excess - difference, -excess


def weights(objective: Objective, sequences: Segments, denominator: float | None = None) -> np.ndarray:
    """float64 [N]: what term and derivative of each token are multiplied with, so that the loss is their sum.

    denominator: what is divided by instead of the number of tokens, or of sequences that have one; needed for a
    "constant" average.
    """
    found = np.ones(len(sequences.index))
    if objective.average == "sequences":
        found /= sequences.at_tokens(sequences.counts)
        denominator = np.count_nonzero(sequences.counts) if denominator is None else denominator
    elif denominator is None:
        if objective.average == "constant":
            raise ValueError(f"{objective.name} needs a denominator")
        denominator = len(found)
    return found / denominator
