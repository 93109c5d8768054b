"""What comparison.json reports of the differences beside the verdict, which none of it decides."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from libxd import diagnostics
from libxd.difference import DEFINITION, Difference
from libxd.quantiles import Distribution
from libxd.tally import Tally

QUANTILES = {
    "p50_absolute": Fraction(1, 2),
    "p90_absolute": Fraction(9, 10),
    "p99_absolute": Fraction(99, 100),
    "p99_9_absolute": Fraction(999, 1000),
}
DIRECTION = "rollout||training, tokens sampled by rollout"


class Measurement:
    """What is reported of a `Difference`, in the terms of comparison.json; null where undefined."""

    def __init__(self, difference: Difference, tally: Tally) -> None:
        self.difference = difference
        self.tally = tally
        self.counts = tally.counts
        self._distribution = tally.distribution
        self._quantiles = _quantiles(difference, tally.distribution)

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
            "k2": self.tally.kl.k2(count),
            "k3": self.tally.kl.k3(count),
        }

    def value_grid(self) -> dict[str, str | None]:
        """The grid all active values of a side lie on; null when there are none or one is not finite."""
        return {
            side: None if self.counts[f"nonfinite_{side}"] else grid.name() for side, grid in self.tally.grids.items()
        }

    def worst(self) -> dict[str, Any] | None:
        """The active token with the largest difference; null unless all are finite."""
        return self._place(self.tally.extremes.worst)

    def first_mismatch(self) -> dict[str, Any] | None:
        """The first token that is a mismatch; null unless all are finite."""
        return self._place(self.tally.extremes.first_mismatch)

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


def _quantiles(difference: Difference, distribution: Distribution) -> dict[str, float | None]:
    """The quantiles of |active difference| in nats: a second pass, after that of the `Tally`."""
    selection = distribution.select(list(QUANTILES.values()))
    if distribution.finite:
        for where in difference.places():
            selection.add(difference.all(where)[np.flatnonzero(difference.active(where))])
    return dict(zip(QUANTILES, selection.result(), strict=True))
