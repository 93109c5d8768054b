"""training - rollout over all tokens, block by block, and the mismatch mask."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from libxd import scores
from libxd.scores import ScoreFile

DEFINITION = "training - rollout, nats"


def subtract(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a - b in float32; not finite where a value is not, or where it is beyond float32."""
    with np.errstate(invalid="ignore", over="ignore"):
        return a - b


class Difference:
    """The differences between two score files of the same form (no `problems`, equal numbers of tokens).

    A token is active when both files say so; when they disagree, that is a violation of identity and not judged here.
    Methods take a place: a slice of N of the flat tokens.
    """

    def __init__(self, rollout: ScoreFile, training: ScoreFile, threshold: float) -> None:
        self.rollout = rollout
        self.training = training
        self.threshold = np.float32(threshold)
        self.tokens = rollout.tokens

    def places(self) -> Iterator[slice]:
        """All tokens in order, `scores.BLOCK` at a time."""
        return scores.blocks(self.tokens, self.rollout, self.training)

    def active(self, where: slice) -> np.ndarray:
        """The tokens that both files call active: bool [N]."""
        return self.rollout.active_mask[where] & self.training.active_mask[where]

    def all(self, where: slice) -> np.ndarray:
        """training - rollout of every token: float32 [N]."""
        return subtract(self.training.logprobs[where], self.rollout.logprobs[where])

    def mismatch(self, where: slice) -> np.ndarray:
        """active & (abs(training - rollout) > threshold): bool [N]."""
        return self.active(where) & self.exceeds(self.all(where))

    def exceeds(self, differences: np.ndarray) -> np.ndarray:
        """Whether float32 differences are beyond the threshold, in float32; equality and NaN are not."""
        with np.errstate(invalid="ignore"):
            return np.abs(differences) > self.threshold
