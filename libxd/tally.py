"""What one pass over the differences counts and sums."""

from __future__ import annotations

import numpy as np

from libxd import diagnostics
from libxd.difference import Difference, subtract
from libxd.quantiles import Distribution
from libxd.rundir import SIDES


class Tally:
    """Counts and sums of all kinds over the tokens of a `Difference`, by one pass.

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
        self.sequence_mismatches = np.zeros(sequences, np.int64)
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
        differences = subtract(training, rollout)
        mismatch = difference.exceeds(differences)
        self.counts["active"] += active.size
        self.counts["mismatches"] += int(np.count_nonzero(mismatch))
        self.counts["bitwise_equal"] += int(np.count_nonzero(rollout.view(np.uint32) == training.view(np.uint32)))
        self.distribution.add(differences)
        self._add_to_sequences(where, active, differences.astype(np.float64), mismatch)
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

    def _add_to_sequences(
        self, where: slice, active: np.ndarray, differences: np.ndarray, mismatch: np.ndarray
    ) -> None:
        bounds = self._cu_seqlens
        first = int(np.searchsorted(bounds, where.start, side="right")) - 1
        last = int(np.searchsorted(bounds, where.stop, side="left"))
        inside = np.clip(bounds[first : last + 1], where.start, where.stop) - where.start
        edges = np.searchsorted(active, inside)
        counts = np.diff(edges)
        self.sequence_active[first:last] += counts
        some = np.flatnonzero(counts)  # reduceat knows no empty segment
        if some.size:
            self.sequence_mismatches[first + some] += np.add.reduceat(mismatch, edges[some], dtype=np.int64)
            with np.errstate(invalid="ignore"):  # of opposite infinities there is no sum
                self.sequence_sum_signed[first + some] += np.add.reduceat(differences, edges[some])
                self.sequence_sum_absolute[first + some] += np.add.reduceat(np.abs(differences), edges[some])
