"""training - rollout over all tokens, block by block: the mismatch mask, and everything that is reported beside it."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from libxd import diagnostics, scores
from libxd.quantiles import Distribution
from libxd.rundir import SIDES
from libxd.scores import ScoreFile

QUANTILES = {
    "p50_absolute": Fraction(1, 2),
    "p90_absolute": Fraction(9, 10),
    "p99_absolute": Fraction(99, 100),
    "p99_9_absolute": Fraction(999, 1000),
}
DEFINITION = "training - rollout, nats"
DIRECTION = "rollout||training, tokens sampled by rollout"


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
        with np.errstate(invalid="ignore", over="ignore"):
            return self.training.logprobs[where] - self.rollout.logprobs[where]

    def mismatch(self, where: slice) -> np.ndarray:
        """active & (abs(training - rollout) > threshold): bool [N]."""
        return self.active(where) & self.exceeds(self.all(where))

    def exceeds(self, differences: np.ndarray) -> np.ndarray:
        """Whether float32 differences are beyond the threshold, in float32; equality and NaN are not."""
        with np.errstate(invalid="ignore"):
            return np.abs(differences) > self.threshold


class Tokens:
    """What one pass over a `Difference` gives: counts and sums of all kinds.

    counts: as in comparison.json. distribution: of the active differences. sequence_*: of the active tokens of each
    sequence, [B]: sums in float64, by numpy's pairwise summation inside a block and then block by block.
    first_nonfinite: by side, a flat index.
    """

    def __init__(self, difference: Difference) -> None:
        self._cu_seqlens = difference.rollout.cu_seqlens
        sequences = self._cu_seqlens.size - 1
        self.sequence_sum_signed = np.zeros(sequences, np.float64)
        self.sequence_sum_absolute = np.zeros(sequences, np.float64)
        self.sequence_active = np.zeros(sequences, np.int64)
        self.counts = dict.fromkeys(
            ("tokens", "active", "mismatches", "bitwise_equal", "nonfinite_rollout", "nonfinite_training"), 0
        )
        self.counts["tokens"] = difference.tokens
        self.first_nonfinite: dict[str, int | None] = dict.fromkeys(SIDES)
        self.distribution = Distribution()
        self.kl = diagnostics.KullbackLeibler()
        self.extremes = diagnostics.Extremes()
        self.grids = {side: diagnostics.ValueGrid() for side in SIDES}
        for where in difference.places():
            self._add(difference, where)

    def _add(self, difference: Difference, where: slice) -> None:
        active = np.flatnonzero(difference.active(where))  # indices into the block [A]
        rollout, training = difference.rollout.logprobs[where][active], difference.training.logprobs[where][active]
        differences = difference.all(where)[active]
        mismatch = difference.exceeds(differences)
        self.counts["active"] += active.size
        self.counts["mismatches"] += int(np.count_nonzero(mismatch))
        self.counts["bitwise_equal"] += int(np.count_nonzero(rollout.view(np.uint32) == training.view(np.uint32)))
        self.distribution.add(differences)
        self._add_to_sequences(where, active, differences.astype(np.float64))
        finite = True
        for side, values in (("rollout", rollout), ("training", training)):
            strange = np.flatnonzero(~np.isfinite(values))
            if strange.size:
                finite = False
                self.counts[f"nonfinite_{side}"] += strange.size
                if self.first_nonfinite[side] is None:
                    self.first_nonfinite[side] = where.start + int(active[strange[0]])
            else:
                self.grids[side].add(values)
        if finite:
            self.kl.add(differences)
            self.extremes.add(where.start + active, differences, mismatch)

    def _add_to_sequences(self, where: slice, active: np.ndarray, differences: np.ndarray) -> None:
        bounds = self._cu_seqlens
        first = int(np.searchsorted(bounds, where.start, side="right")) - 1
        last = int(np.searchsorted(bounds, where.stop, side="left"))
        inside = np.clip(bounds[first : last + 1], where.start, where.stop) - where.start
        edges = np.searchsorted(active, inside)
        counts = np.diff(edges)
        self.sequence_active[first:last] += counts
        some = np.flatnonzero(counts)  # reduceat knows no empty segment
        if some.size:
            self.sequence_sum_signed[first + some] += np.add.reduceat(differences, edges[some])
            self.sequence_sum_absolute[first + some] += np.add.reduceat(np.abs(differences), edges[some])


def quantiles(difference: Difference, distribution: Distribution) -> dict[str, float | None]:
    """The quantiles of |active difference| in nats: a second pass, after that of `Tokens`."""
    selection = distribution.select(list(QUANTILES.values()))
    if distribution.finite:
        for where in difference.places():
            selection.add(difference.all(where)[np.flatnonzero(difference.active(where))])
    return dict(zip(QUANTILES, selection.result(), strict=True))


class Measurement:
    """What is reported of a `Difference`, in the terms of comparison.json; null where undefined."""

    def __init__(self, difference: Difference, tokens: Tokens) -> None:
        self.difference = difference
        self.tokens = tokens
        self.counts = tokens.counts
        self._distribution = tokens.distribution
        self._quantiles = quantiles(difference, tokens.distribution)

    def ratio(self, count: str) -> float | None:
        """A count over the active tokens; None without any."""
        return self.counts[count] / self.counts["active"] if self.counts["active"] else None

    def logprob_difference(self) -> dict[str, Any]:
        """Means and quantiles of the active differences in nats."""
        return {
            "definition": DEFINITION,
            "mean_signed": self._distribution.mean_signed(),
            "mean_absolute": self._distribution.mean_absolute(),
            **self._quantiles,
            "max_absolute": self._distribution.maximum_absolute(),
        }

    def kl(self) -> dict[str, Any]:
        """The estimators k1, k2, k3 in nats a token."""
        count = self._distribution.count if self._distribution.finite else 0
        mean = self._distribution.mean_signed()
        return {
            "direction": DIRECTION,
            "k1": None if mean is None else 0.0 - mean,
            "k2": self.tokens.kl.k2(count),
            "k3": self.tokens.kl.k3(count),
        }

    def value_grid(self) -> dict[str, str | None]:
        """The grid all active values of a side lie on; null when there are none or one is not finite."""
        return {
            side: None if self.counts[f"nonfinite_{side}"] else grid.name() for side, grid in self.tokens.grids.items()
        }

    def worst(self) -> dict[str, Any] | None:
        """The active token with the largest difference; null unless all are finite."""
        return self._place(self.tokens.extremes.worst)

    def first_mismatch(self) -> dict[str, Any] | None:
        """The first token that is a mismatch; null unless all are finite."""
        return self._place(self.tokens.extremes.first_mismatch)

    def where(self, index: int) -> tuple[int, int]:
        """The sequence of a flat index, and its position there."""
        return diagnostics.locate(index, self.difference.rollout.cu_seqlens)

    def _place(self, index: int | None) -> dict[str, Any] | None:
        if index is None or not self._distribution.finite:
            return None
        sequence, position = self.where(index)
        rollout, training = self.difference.rollout, self.difference.training
        return {
            "sequence": sequence,
            "position": position,
            "token_id": int(rollout.token_ids[index]),
            "rollout_logprob": float(rollout.logprobs[index]),
            "training_logprob": float(training.logprobs[index]),
        }
