"""Importance corrections: a weight a token for what rollout sampled and training did not, or a token left out.

A trainer that computes the old logprobs anew has a ratio of 1 in its objective at the first step, and the difference
between the two sides appears in no term. A correction multiplies each term by a weight made of r = training / rollout:

| correction        | ratio          | weight                        | default      | as in                            |
|-------------------|----------------|-------------------------------|--------------|----------------------------------|
| token_truncate    | token          | min(r, high)                  | 2            | [1]; verl `rollout_is: token`    |
| token_mask        | token          | r within low and high, else 0 | 0.5, 5       | [2]; verl's token IcePop         |
| sequence_truncate | product        | min(r, high)                  | 2            | verl `rollout_is: sequence`      |
| sequence_mask     | product        | r up to high, else 0          | 3            | TRL's default (`sequence_mask`)  |
| sequence_reject   | product        | 1 within low and high, else 0 | 0.5, 2       | verl `rollout_rs: seq_sum_k1`    |
| geometric_reject  | geometric mean | 1 within low and high, else 0 | 0.999, 1.001 | verl `rollout_rs: seq_mean_k1`   |

[1] TIS: F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025, with a cap C.
[2] IcePop: arXiv:2510.18855 (Ring-1T), with bounds alpha and beta. Defaults as verl 0.9.1 (`RolloutCorrectionConfig`)
and TRL 1.16 (`GRPOConfig`) have them. What is left out stays in the averages: nothing is divided anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

RATIOS = ("token", "product", "geometric_mean")


class Weights(NamedTuple):
    """log of the weight, float64 [S] (-inf: left out), and which ratios were below low and above high (bool [S])."""

    logs: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Correction:
    """ratio: one of RATIOS. action: what happens to a ratio out of bounds: "truncate" (it becomes the bound), "mask"
    (its weight is 0, others keep r) or "reject" (0, and 1 for others). low None: no lower bound."""

    name: str
    ratio: str
    action: str
    low: float | None
    high: float

    def with_bounds(self, low: float | None, high: float) -> Correction:
        """The same with other thresholds. ValueError unless 0 < low < high, both finite."""
        if not (0 < high < math.inf and (low is None or 0 < low < high)):
            raise ValueError(f"{self.name}: thresholds are finite and above 0, and rise: {low}, {high}")
        return replace(self, low=low, high=high)

    def weights(self, log_ratios: np.ndarray) -> Weights:
        """Of log ratios [S] at the correction's level. A ratio at a bound is within."""
        log_ratios = np.asarray(log_ratios, np.float64)
        bottom, top = -math.inf if self.low is None else math.log(self.low), math.log(self.high)
        low, high = log_ratios < bottom, log_ratios > top
        if self.action == "truncate":
            return Weights(np.clip(log_ratios, bottom, top), low, high)
        kept = np.zeros_like(log_ratios) if self.action == "reject" else log_ratios
        return Weights(np.where(low | high, -math.inf, kept), low, high)


CORRECTIONS = (
    Correction("token_truncate", "token", "truncate", None, 2.0),
    Correction("token_mask", "token", "mask", 0.5, 5.0),
    Correction("sequence_truncate", "product", "truncate", None, 2.0),
    Correction("sequence_mask", "product", "mask", None, 3.0),
    Correction("sequence_reject", "product", "reject", 0.5, 2.0),
    Correction("geometric_reject", "geometric_mean", "reject", 0.999, 1.001),
)
