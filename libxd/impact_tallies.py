"""What a pass over a pair counts and sums: of the ratios of a level, of a correction, of an objective."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from libxd.functional import objectives, ratios
from libxd.functional.corrections import Correction
from libxd.functional.objectives import Objective
from libxd.functional.ratios import Moments
from libxd.functional.segments import Segments
from libxd.quantiles import Distribution, Selection

#: by how much of itself a coefficient must have changed to be counted, beside any change
PARTS = {"over_1_percent": 0.01, "over_10_percent": 0.1}
QUANTILES = {"p01": Fraction(1, 100), "p50": Fraction(1, 2), "p99": Fraction(99, 100)}


class RatioTally:
    """The ratios of one level, given by their logarithms: first `add` all, then `select`, and `add_again` all.

    Quantiles are exact but for the rounding of log r to float32: of n ratios the smallest that at least q n do not
    exceed. Negative and other logarithms are kept apart, since a `Distribution` orders magnitudes.
    """

    def __init__(self) -> None:
        self._moments = Moments()
        self._low, self._high = math.inf, -math.inf
        self._halves = (Distribution(), Distribution())
        self._selections: list[Selection] = []
        self._wanted: dict[str, tuple[int, int]] = {}  # quantile -> half, place in what is asked of it

    def add(self, log_ratios: np.ndarray) -> None:
        """Take in log ratios, float64 [S]."""
        if not len(log_ratios):
            return
        self._moments.add(log_ratios)
        self._low, self._high = min(self._low, float(log_ratios.min())), max(self._high, float(log_ratios.max()))
        for half, values in zip(self._halves, _halves(log_ratios), strict=True):
            half.add(values)

    def select(self) -> None:
        """The end of the first pass."""
        negative, other = (half.count for half in self._halves)
        asked: tuple[list[Fraction], list[Fraction]] = ([], [])
        for name, quantile in QUANTILES.items():
            rank = -(-(negative + other) * quantile.numerator // quantile.denominator)
            if rank <= negative:  # the largest magnitude is the smallest value
                half, ratio = 0, Fraction(negative + 1 - rank, negative)
            else:
                half, ratio = 1, Fraction(rank - negative, other)
            self._wanted[name] = half, len(asked[half])
            asked[half].append(ratio)
        self._selections = [half.select(ratios) for half, ratios in zip(self._halves, asked, strict=True)]

    def add_again(self, log_ratios: np.ndarray) -> None:
        """Take in the same log ratios once more."""
        for selection, values in zip(self._selections, _halves(log_ratios), strict=True):
            selection.add(values)

    def as_json(self) -> dict[str, Any]:
        found = [selection.result() for selection in self._selections]
        quantiles = {name: found[half][place] for name, (half, place) in self._wanted.items()}
        return {
            "count": self._moments.count,
            "min": _exp(self._low),
            **{name: _exp(-value if self._wanted[name][0] == 0 else value) for name, value in quantiles.items()},
            "max": _exp(self._high),
            "mean": self._moments.mean,
            "ess_fraction": self._moments.ess_fraction,
            "chi_square": self._moments.chi_square,
        }


def _halves(log_ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values = log_ratios.astype(np.float32)
    return values[values < 0], values[values >= 0]


class _Change:
    """Coefficients with the difference, c, against those without, c0: sums of their products over all tokens."""

    def __init__(self) -> None:
        self._squares = self._before = self._apart = self._common = 0.0

    def add(self, c: np.ndarray, before: np.ndarray, factors: np.ndarray | float = 1.0) -> None:
        """Take in both, [N], each to be multiplied with `factors`."""
        with np.errstate(over="ignore", invalid="ignore"):
            c, before = c * factors, before * factors
            self._squares += float(c @ c)
            self._before += float(before @ before)
            self._common += float(c @ before)
            apart = c - before
            self._apart += float(apart @ apart)

    def as_json(self) -> dict[str, float | None]:
        def root(over: float, below: float) -> float | None:
            return math.sqrt(over / below) if below and math.isfinite(over) else None

        cosine = None
        if self._squares and self._before and math.isfinite(self._squares) and math.isfinite(self._common):
            cosine = max(-1.0, min(1.0, self._common / math.sqrt(self._squares) / math.sqrt(self._before)))
        return {
            "relative_norm": root(self._apart, self._before),
            "norm_ratio": root(self._squares, self._before),
            "cosine": cosine,
        }


class CorrectionTally:
    """What a correction does to the weights of tokens, and to coefficients that would else be -A."""

    def __init__(self, correction: Correction) -> None:
        self.correction = correction
        self._low = self._high = self._sequences = 0
        self._moments, self._change = Moments(), _Change()
        self._credited = False

    def add(self, d: np.ndarray, sequences: Segments, advantages: np.ndarray | None) -> None:
        """Take in whole sequences: log ratios [N] of tokens, and advantages [N] or none."""
        if self.correction.ratio == "token":
            logs, low, high = self.correction.weights(d)
        else:
            made = ratios.product if self.correction.ratio == "product" else ratios.geometric_mean
            logs, low, high = map(sequences.at_tokens, self.correction.weights(made(d, sequences)))
        self._low += int(np.count_nonzero(low))
        self._high += int(np.count_nonzero(high))
        self._sequences += len(np.unique(sequences.index[low | high]))
        self._moments.add(logs)
        if advantages is not None:
            self._credited = True
            with np.errstate(over="ignore"):
                self._change.add(-np.exp(logs) * advantages, -advantages)

    def as_json(self) -> dict[str, Any]:
        correction = self.correction
        return {
            **{name: getattr(correction, name) for name in ("name", "ratio", "action", "low", "high")},
            "tokens_low": self._low,
            "tokens_high": self._high,
            "sequences": self._sequences,
            "mean_weight": self._moments.mean,
            "ess_fraction": self._moments.ess_fraction,
            "change": self._change.as_json() if self._credited else None,
        }


class ObjectiveTally:
    """What the difference does to an objective's coefficients where rollout's logprobs are the old ones."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._outside = dict.fromkeys(("low", "high"), 0)
        self._clipped = {bound: dict.fromkeys(("positive", "negative"), 0) for bound in ("low", "high")}
        self._sign = dict.fromkeys(("to_zero", "from_zero", "reversed"), 0)
        self._weight = dict.fromkeys(("changed", *PARTS), 0)
        self._change = _Change()
        self._credited = False

    def add(
        self,
        logprobs: np.ndarray,
        d: np.ndarray,
        sequences: Segments,
        advantages: np.ndarray | None,
        penalty: tuple[np.ndarray, np.ndarray] | None,
    ) -> None:
        """Take in whole sequences: training's logprobs and log ratios of tokens [N], advantages [N] or none; penalty:
        what is added to the coefficients with the difference and without it, [N] each."""
        if self.objective.ratio == "sequence":
            d = sequences.at_tokens(ratios.geometric_mean(d, sequences))
        lower, upper = self.objective.bounds
        with np.errstate(over="ignore"):
            r = np.exp(d)
        self._outside["low"] += int(np.count_nonzero(r < lower))
        self._outside["high"] += int(np.count_nonzero(r > upper))
        if advantages is None:
            return
        self._credited = True
        found = objectives.terms(self.objective, logprobs, d, advantages)
        for bound, clipped in (("low", found.clipped_low), ("high", found.clipped_high)):
            self._clipped[bound]["positive"] += int(np.count_nonzero(clipped & (advantages > 0)))
            self._clipped[bound]["negative"] += int(np.count_nonzero(clipped & (advantages < 0)))
        with np.errstate(over="ignore"):
            c, before = found.slopes, -advantages
            if penalty is not None:
                c, before = c + penalty[0], before + penalty[1]
        self._count(c, before)
        # a denominator of the whole batch is in both norms, and goes out of their ratio
        self._change.add(c, before, objectives.weights(self.objective, sequences, denominator=1.0))

    def _count(self, c: np.ndarray, before: np.ndarray) -> None:
        self._sign["to_zero"] += int(np.count_nonzero((c == 0) & (before != 0)))
        self._sign["from_zero"] += int(np.count_nonzero((c != 0) & (before == 0)))
        self._sign["reversed"] += int(np.count_nonzero(np.sign(c) * np.sign(before) < 0))
        with np.errstate(invalid="ignore", over="ignore"):
            apart, size = np.abs(c - before), np.abs(before)
            self._weight["changed"] += int(np.count_nonzero(c != before))
            for name, part in PARTS.items():
                self._weight[name] += int(np.count_nonzero(apart > part * size))

    def as_json(self, why: str | None) -> dict[str, Any]:
        """why: the reason for which the advantages that were given are not for it, and none came in."""
        objective, credited = self.objective, self._credited
        return {
            **{name: getattr(objective, name) for name in ("name", "ratio", "average", "eps_low", "eps_high")},
            "outside": self._outside,
            "why": why,
            "clipped": self._clipped if credited else None,
            "sign": self._sign if credited else None,
            "weight": self._weight if credited else None,
            "change": self._change.as_json() if credited else None,
        }


def _exp(value: float) -> float | None:
    try:
        return math.exp(value) if math.isfinite(value) else None
    except OverflowError:
        return None
