"""training - rollout over all tokens, block by block: the mismatch mask, and everything that is reported beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from libxd import diagnostics, scores
from libxd.quantiles import Distribution
from libxd.scores import ScoreFile

QUANTILES = {
    "p50_absolute": Fraction(1, 2),
    "p90_absolute": Fraction(9, 10),
    "p99_absolute": Fraction(99, 100),
    "p99_9_absolute": Fraction(999, 1000),
}
DEFINITION = "training - rollout, nats"
DIRECTION = "rollout||training, tokens sampled by rollout"


@dataclass(frozen=True)
class Block:
    """Tokens `where` of the flat arrays (N of them).

    rollout, training: float32 [N]; active: bool [N]; difference: float32 [N], training - rollout; mismatch: bool [N],
    active & (abs(difference) > threshold), all of it in float32.
    """

    where: slice
    rollout: np.ndarray
    training: np.ndarray
    active: np.ndarray
    difference: np.ndarray
    mismatch: np.ndarray


class Difference:
    """The differences between two score files of the same form (no `problems`, equal numbers of tokens).

    A token is active when both files say so; when they disagree, that is a violation of identity and not judged here.
    """

    def __init__(self, rollout: ScoreFile, training: ScoreFile, threshold: float) -> None:
        self.rollout = rollout
        self.training = training
        self.threshold = np.float32(threshold)
        self.tokens = rollout.tokens

    def blocks(self) -> Iterator[Block]:
        """All tokens in order, `scores.BLOCK` at a time."""
        for where in scores.blocks(self.tokens, self.rollout, self.training):
            rollout, training = self.rollout.logprobs[where], self.training.logprobs[where]
            active = self.rollout.active_mask[where] & self.training.active_mask[where]
            with np.errstate(invalid="ignore", over="ignore"):
                difference = training - rollout
                mismatch = active & (np.abs(difference) > self.threshold)
            yield Block(where, rollout, training, active, difference, mismatch)


class Measurement:
    """What is reported of a `Difference`; made in two passes over it.

    counts: as in comparison.json. sequence_*: of the active tokens of each sequence, [B]: sums in float64, added one
    after another in token order inside a block and then block by block.
    """

    def __init__(self, difference: Difference) -> None:
        self._difference = difference
        self._cu_seqlens = difference.rollout.cu_seqlens
        sequences = self._cu_seqlens.size - 1
        self.sequence_sum_signed = np.zeros(sequences, np.float64)
        self.sequence_sum_absolute = np.zeros(sequences, np.float64)
        self.sequence_active = np.zeros(sequences, np.int64)
        self.counts = dict.fromkeys(
            ("tokens", "active", "mismatches", "bitwise_equal", "nonfinite_rollout", "nonfinite_training"), 0
        )
        self.counts["tokens"] = difference.tokens
        self.first_nonfinite: dict[str, int | None] = {"rollout": None, "training": None}
        self._distribution = Distribution()
        self._kl = diagnostics.KullbackLeibler()
        self._extremes = diagnostics.Extremes()
        self._grids = {"rollout": diagnostics.ValueGrid(), "training": diagnostics.ValueGrid()}
        for block in difference.blocks():
            self._add(block)
        self._selection = self._distribution.select(list(QUANTILES.values()))
        if self.finite:
            for block in difference.blocks():
                self._selection.add(block.difference[block.active])

    @property
    def finite(self) -> bool:
        """Whether every active difference is a finite float32."""
        return self._distribution.finite

    def _add(self, block: Block) -> None:
        active = np.flatnonzero(block.active)
        rollout, training, difference = (a[active] for a in (block.rollout, block.training, block.difference))
        self.counts["active"] += active.size
        self.counts["mismatches"] += int(np.count_nonzero(block.mismatch))
        self.counts["bitwise_equal"] += int(np.count_nonzero(rollout.view(np.uint32) == training.view(np.uint32)))
        self._distribution.add(difference)
        self._add_to_sequences(block.where, active, difference.astype(np.float64))
        finite = True
        for side, values in (("rollout", rollout), ("training", training)):
            strange = np.flatnonzero(~np.isfinite(values))
            if strange.size:
                finite = False
                self.counts[f"nonfinite_{side}"] += strange.size
                if self.first_nonfinite[side] is None:
                    self.first_nonfinite[side] = block.where.start + int(active[strange[0]])
            else:
                self._grids[side].add(values)
        if finite:
            self._kl.add(difference)
            self._extremes.add(block.where.start, active, np.abs(difference), block.mismatch)

    def _add_to_sequences(self, where: slice, active: np.ndarray, difference: np.ndarray) -> None:
        bounds = self._cu_seqlens
        first = int(np.searchsorted(bounds, where.start, side="right")) - 1
        last = int(np.searchsorted(bounds, where.stop, side="left"))
        inside = np.clip(bounds[first : last + 1], where.start, where.stop)
        sequence = np.repeat(np.arange(last - first), np.diff(inside))[active]
        for total, weights in (
            (self.sequence_sum_signed, difference),
            (self.sequence_sum_absolute, np.abs(difference)),
            (self.sequence_active, None),
        ):
            total[first:last] += np.bincount(sequence, weights=weights, minlength=last - first)

    def ratio(self, count: str) -> float | None:
        """A count over the active tokens; None without any."""
        return self.counts[count] / self.counts["active"] if self.counts["active"] else None

    def logprob_difference(self) -> dict[str, Any]:
        """Means and quantiles of the active differences in nats; null where undefined."""
        distribution = self._distribution
        return {
            "definition": DEFINITION,
            "mean_signed": distribution.mean_signed(),
            "mean_absolute": distribution.mean_absolute(),
            **dict(zip(QUANTILES, self._selection.result(), strict=True)),
            "max_absolute": distribution.maximum_absolute(),
        }

    def kl(self) -> dict[str, Any]:
        """The estimators k1, k2, k3 in nats a token; null where undefined."""
        count = self._distribution.count if self.finite else 0
        mean = self._distribution.mean_signed()
        return {
            "direction": DIRECTION,
            "k1": None if mean is None else 0.0 - mean,
            "k2": self._kl.k2(count),
            "k3": self._kl.k3(count),
        }

    def value_grid(self) -> dict[str, str | None]:
        """The grid all active values of a side lie on; null when there are none or one is not finite."""
        return {side: None if self.counts[f"nonfinite_{side}"] else grid.name() for side, grid in self._grids.items()}

    def worst(self) -> dict[str, Any] | None:
        """The active token with the largest difference; null unless all are finite."""
        return self._place(self._extremes.worst)

    def first_mismatch(self) -> dict[str, Any] | None:
        """The first token that is a mismatch; null unless all are finite."""
        return self._place(self._extremes.first_mismatch)

    def where(self, index: int) -> tuple[int, int]:
        """The sequence of a flat index, and its position there."""
        return diagnostics.locate(index, self._cu_seqlens)

    def _place(self, index: int | None) -> dict[str, Any] | None:
        if index is None or not self.finite:
            return None
        sequence, position = self.where(index)
        rollout, training = self._difference.rollout, self._difference.training
        return {
            "sequence": sequence,
            "position": position,
            "token_id": int(rollout.token_ids[index]),
            "rollout_logprob": float(rollout.logprobs[index]),
            "training_logprob": float(training.logprobs[index]),
        }
