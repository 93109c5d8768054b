"""Exact means and quantiles of float32 values in constant memory: a radix histogram over their bit patterns.

Non-negative float32 values sort as their bit patterns do. A first pass counts the upper 16 bits of every pattern and
adds up the lower 16 in each bin, which gives the exact sum (every float32 is a whole multiple of 2^-149) and the bin
in which each wanted rank lies; a second pass counts the lower 16 bits in those bins alone. No value is ever rounded
on the way, so the results depend neither on the order of the values nor on the blocks they come in, nor on the
machine.

Memory: about 2 MB, and 0.5 MB a wanted quantile, however many values there are.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

_HALF = 1 << 16
_SIGN_BIN = 1 << 15
_EXPONENT_ALL_ONES = 255  # infinities and NaN
_UNIT = Fraction(1, 1 << 149)  # the smallest positive float32


class Distribution:
    """Of float32 values given block by block: their count, exact means, and quantiles and maximum of their magnitudes.

    First `add` every block, then `select` ratios and `add` every block once more to what it returns.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(_HALF, np.int64)  # by the upper 16 bits: sign, exponent, 7 bits of the fraction
        self._lower = np.zeros(_HALF, np.float64)  # sums of the lower 16 bits; whole and exact below 2^53
        self._largest = 0

    def add(self, values: np.ndarray) -> None:
        """Take in float32 `values` of any shape."""
        if values.size == 0:
            return
        bits = _bits(values)
        upper = (bits >> np.uint32(16)).astype(np.intp)
        self._counts += np.bincount(upper, minlength=_HALF)
        self._lower += np.bincount(upper, weights=bits & np.uint32(0xFFFF), minlength=_HALF)
        self._largest = max(self._largest, int((bits & np.uint32(0x7FFFFFFF)).max()))

    @property
    def count(self) -> int:
        """How many values there were."""
        return int(self._counts.sum())

    @property
    def finite(self) -> bool:
        """Whether no infinity and no NaN was among them."""
        return self._largest >> 23 != _EXPONENT_ALL_ONES

    def mean_signed(self) -> float | None:
        """The mean, correctly rounded to float64; None without values or with a non-finite one."""
        positive, negative = self._sums()
        return self._mean(positive - negative)

    def mean_absolute(self) -> float | None:
        """The mean magnitude, correctly rounded to float64; None without values or with a non-finite one."""
        positive, negative = self._sums()
        return self._mean(positive + negative)

    def maximum_absolute(self) -> float | None:
        """The largest magnitude; None without values or with a non-finite one."""
        return _float(self._largest) if self.count and self.finite else None

    def _mean(self, total: int) -> float | None:
        if not self.count or not self.finite:
            return None
        return float(total * _UNIT / self.count)

    def _sums(self) -> tuple[int, int]:
        """The exact sums of the positive and of the negative magnitudes, in units of 2^-149."""
        totals = [0, 0]
        for index in np.flatnonzero(self._counts).tolist():
            exponent = (index >> 7) & 255
            leading = ((index & 127) | (128 if exponent else 0)) << 16
            mantissas = int(self._counts[index]) * leading + int(self._lower[index])
            totals[index >> 15] += mantissas << max(exponent - 1, 0)
        return totals[0], totals[1]

    def select(self, ratios: list[Fraction]) -> Selection:
        """The second pass for quantiles of the magnitudes at these ratios in (0, 1]."""
        counts = self._counts[:_SIGN_BIN] + self._counts[_SIGN_BIN:]
        return Selection(counts if self.finite else np.zeros_like(counts), ratios)


class Selection:
    """The second pass: which magnitude has each wanted rank.

    The quantile at ratio q of n values is the smallest of them that at least q n values do not exceed (rank ceil(q
    n); numpy's "inverted_cdf"): a value that did occur, never an interpolated one.
    """

    def __init__(self, counts: np.ndarray, ratios: list[Fraction]) -> None:
        running = np.cumsum(counts)
        total = int(running[-1])
        self._wanted: list[tuple[int, int] | None] = []  # a ratio: bin, rank inside the bin
        for ratio in ratios:
            if not total:
                self._wanted.append(None)
                continue
            rank = -(-total * ratio.numerator // ratio.denominator)
            index = int(np.searchsorted(running, rank))
            self._wanted.append((index, rank - int(running[index]) + int(counts[index])))
        self._bins = {wanted[0]: np.zeros(_HALF, np.int64) for wanted in self._wanted if wanted}

    def add(self, values: np.ndarray) -> None:
        """Take in the same float32 values again."""
        magnitudes = _bits(values) & np.uint32(0x7FFFFFFF)
        upper = magnitudes >> np.uint32(16)
        for index, counts in self._bins.items():
            lower = (magnitudes[upper == index] & np.uint32(0xFFFF)).astype(np.intp)
            if lower.size:
                counts += np.bincount(lower, minlength=_HALF)

    def result(self) -> list[float | None]:
        """The quantiles, in the order of the ratios; None where they are undefined."""
        return [None if wanted is None else self._value(*wanted) for wanted in self._wanted]

    def _value(self, index: int, rank: int) -> float:
        lower = int(np.searchsorted(np.cumsum(self._bins[index]), rank))
        assert lower < _HALF, "the second pass saw other values than the first"
        return _float(index << 16 | lower)


def _bits(values: np.ndarray) -> np.ndarray:
    if values.dtype != np.float32:
        raise TypeError(f"float32 values, not {values.dtype}")
    return np.ascontiguousarray(values).reshape(-1).view(np.uint32)


def _float(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))
