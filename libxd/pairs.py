"""Two score files of the same tokens, of an attempt or by themselves: what is read of a difference, whoever asks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from libxd import shards
from libxd.difference import subtract
from libxd.errors import Status, XdError
from libxd.rundir import SIDES, Attempt
from libxd.scores import ScoreFile


@dataclass(frozen=True)
class Pair:
    """What both sides said of T tokens of B sequences. `attempt` is None for two files by themselves.

    Both files are sound and of the same number of tokens; whether they hold the same ids and masks is for who asks.
    """

    rollout: ScoreFile
    training: ScoreFile
    attempt: Attempt | None = None

    def __str__(self) -> str:
        return str(self.attempt or f"{self.rollout.path} {self.training.path}")

    @property
    def tokens(self) -> int:
        return self.rollout.tokens

    @property
    def cu_seqlens(self) -> np.ndarray:
        """int64 [B+1], the rollout side's."""
        return self.rollout.cu_seqlens

    @cached_property
    def active(self) -> np.ndarray:
        """bool [T]: the tokens that both sides call active."""
        return np.asarray(self.rollout.active_mask) & np.asarray(self.training.active_mask)

    @cached_property
    def difference(self) -> np.ndarray:
        """float32 [T]: training - rollout, in nats; of all tokens, NaN where one was not scored."""
        return subtract(np.asarray(self.training.logprobs), np.asarray(self.rollout.logprobs))


def of_attempt(attempt: Attempt) -> Pair:
    """The scores of an attempt. XdError 69 when it was refused, 66 when it has no scores, 65 for unsound ones."""
    if refusal := attempt.refusal():
        raise refusal.error(attempt, "it has no scores to look at")
    materialized, tokens = attempt.materialized(), attempt.identity()["sequences"]["num_tokens"]
    return _pair(*(ScoreFile.of(attempt, side, materialized, tokens) for side in SIDES), attempt=attempt)


def of_files(paths: Sequence[str | os.PathLike[str]]) -> Pair:
    """Two score files by themselves, in either order. XdError 2 for another number, 65 or 66 as `of_attempt`."""
    return _pair(*two_files(paths))


def two_files(paths: Sequence[str | os.PathLike[str]]) -> tuple[ScoreFile, ScoreFile]:
    """The rollout's and the training side's, given in either order; sound each, whatever tokens the other holds.

    Shards stand for their set, one of it or all.
    """
    opened: list[tuple[Path, ...]] = []
    for files in map(shards.beside, paths):
        if len(files) == 1 or files not in opened:
            opened.append(files)
    if len(opened) != len(SIDES):
        raise XdError("two score files make a pair", status=Status.USAGE, code="bad-pair", found=len(opened),
                      expected=2)  # fmt: skip
    found = {file.side: file for file in (ScoreFile.alone(files[0]) for files in opened)}
    if len(found) != len(SIDES):
        raise XdError("are both of one side", code="bad-pair", where=" ".join(map(str, paths)), found=next(iter(found)),
                      expected=" and ".join(SIDES))  # fmt: skip
    for file in found.values():
        file.require_sound()
    return found[SIDES[0]], found[SIDES[1]]


def _pair(rollout: ScoreFile, training: ScoreFile, attempt: Attempt | None = None) -> Pair:
    for file in (rollout, training):
        file.require_sound()
    if rollout.tokens != training.tokens:
        raise XdError("the two sides scored other numbers of tokens", code="bad-pair", where=str(training.path),
                      found=training.tokens, expected=f"{rollout.tokens} as in {rollout.path}")  # fmt: skip
    return Pair(rollout, training, attempt)
