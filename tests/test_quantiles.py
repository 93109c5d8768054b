"""Quantiles and means are exact: against sorting and rational arithmetic, whatever the values, the ties, the blocks."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from libxd.quantiles import Distribution

RATIOS = [Fraction(1, 2), Fraction(9, 10), Fraction(99, 100), Fraction(999, 1000), Fraction(1)]


def measure(values: np.ndarray, block: int) -> tuple[Distribution, list[float | None]]:
    distribution = Distribution()
    blocks = [values[i : i + block] for i in range(0, values.size, block)]
    for part in blocks:
        distribution.add(part)
    selection = distribution.select(RATIOS)
    for part in blocks:
        selection.add(part)
    return distribution, selection.result()


def by_sorting(values: np.ndarray) -> list[float]:
    """The value of rank ceil(q n), counted from 1."""
    ordered = np.sort(np.abs(values)).tolist()
    return [ordered[math.ceil(ratio * len(ordered)) - 1] for ratio in RATIOS]


def exact_mean(values: np.ndarray) -> float:
    return float(sum(map(Fraction, values.tolist()), Fraction(0)) / values.size)


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=200, deadline=None)
@given(hnp.arrays(np.float32, st.integers(1, 60), elements=finite), st.integers(1, 70))
def test_any_values_in_any_blocks(values: np.ndarray, block: int) -> None:
    distribution, quantiles = measure(values, block)
    assert quantiles == by_sorting(values)
    assert distribution.count == values.size
    assert distribution.mean_signed() == exact_mean(values)
    assert distribution.mean_absolute() == exact_mean(np.abs(values))
    assert distribution.maximum_absolute() == float(np.abs(values).max())


@pytest.mark.parametrize("scale", [1e-7, 0.02, 1.0, 1e30])
def test_random_values_against_numpy(scale: float) -> None:
    values = (np.random.default_rng(3).standard_normal(99_991) * scale).astype(np.float32)
    _, quantiles = measure(values, 1 << 12)
    assert quantiles == by_sorting(values)
    assert quantiles == np.quantile(np.abs(values), [float(q) for q in RATIOS], method="inverted_cdf").tolist()


def test_ties_of_few_distinct_values() -> None:
    values = np.random.default_rng(4).choice(np.array([0.0, -0.0, 2**-149, 0.0625, -0.0625, 3.0], np.float32), 10_000)
    distribution, quantiles = measure(values, 777)
    assert quantiles == by_sorting(values)
    assert distribution.mean_signed() == exact_mean(values)


def test_neighbours_in_one_coarse_bin_are_told_apart() -> None:
    """Values that share their upper 16 bits: only the second pass can order them."""
    values = (np.uint32(0x3C230000) + np.arange(1000, dtype=np.uint32)).view(np.float32)
    shuffled = np.random.default_rng(5).permutation(values)
    assert measure(shuffled, 64)[1] == by_sorting(values)


def test_the_mean_is_not_what_adding_in_float32_or_float64_gives() -> None:
    """The control of exactness: large terms that cancel would swallow the small one."""
    values = np.array([3e38, 1e-30, -3e38], np.float32)
    distribution, _ = measure(values, 2)
    assert distribution.mean_signed() == exact_mean(values) > 0
    assert float(np.sum(values.astype(np.float64))) == 0.0


def test_nothing_is_undefined_not_zero() -> None:
    distribution, quantiles = measure(np.zeros(0, np.float32), 1)
    assert distribution.mean_signed() is None
    assert distribution.mean_absolute() is None
    assert distribution.maximum_absolute() is None
    assert quantiles == [None] * len(RATIOS)


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_leaves_all_undefined(strange: float) -> None:
    distribution, quantiles = measure(np.array([1.0, strange, 2.0], np.float32), 2)
    assert not distribution.finite
    assert distribution.mean_absolute() is None
    assert distribution.maximum_absolute() is None
    assert quantiles == [None] * len(RATIOS)


def test_other_dtypes_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(TypeError, match="float32"):
        Distribution().add(np.zeros(3))
