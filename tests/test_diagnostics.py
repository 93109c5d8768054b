"""Value grids, KL estimators, worst and first token."""

from __future__ import annotations

import math

import numpy as np
import pytest
from comparison_fixtures import floats
from tolerances import EXPM1_MINUS_RELATIVE, TINY_K3_RELATIVE, TREE_MEAN_RELATIVE

from libxd import diagnostics

RANDOM = np.random.default_rng(11)
LOGPROBS = (-np.abs(RANDOM.standard_normal(5000)) * 3).astype(np.float32)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Truncated to bfloat16: on its grid, whichever way one rounds."""
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def grid(*blocks: np.ndarray) -> str | None:
    found = diagnostics.ValueGrid()
    for block in blocks:
        found.add(block)
    return found.name()


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (bfloat16(LOGPROBS), "bfloat16"),
        (LOGPROBS.astype(np.float16).astype(np.float32), "float16"),
        (np.round(LOGPROBS.astype(np.float64), 1).astype(np.float32), "decimal_1"),
        (np.round(LOGPROBS.astype(np.float64), 3).astype(np.float32), "decimal_3"),
        (np.round(LOGPROBS.astype(np.float64), 4).astype(np.float32), "decimal_4"),
        (LOGPROBS, "none"),
    ],
)
def test_a_grid_is_found_and_one_value_off_it_ends_it(values: np.ndarray, name: str) -> None:
    assert grid(values) == name
    assert grid(values[:100], values[100:]) == name
    off = values.copy()
    off[-1] = np.nextafter(off[-1], np.float32(-100))
    assert grid(off) == "none"


def test_no_values_have_no_grid() -> None:
    assert grid() is None
    assert grid(np.zeros(0, np.float32)) is None


def test_a_decimal_grid_as_fine_as_float32_says_nothing() -> None:
    values = (-1000 - np.abs(RANDOM.standard_normal(2))).astype(np.float32)
    assert grid(values) == "none"


def test_float16_overflow_is_off_its_grid() -> None:
    assert grid(np.array([-70000.5], np.float32)) != "float16"


def test_kl_estimators_are_schulmans() -> None:
    d = (RANDOM.standard_normal(300_000) * 0.05).astype(np.float32)
    d[:5] = [0.0, 3.0, -7.0, 0.51, -0.49]
    kl = diagnostics.KullbackLeibler()
    for start in range(0, d.size, 1 << 17):
        kl.add(d[start : start + (1 << 17)])
    wide = d.astype(np.longdouble)
    assert kl.k2(d.size) == pytest.approx(float((wide**2).mean() / 2), rel=TREE_MEAN_RELATIVE, abs=0)
    assert kl.k3(d.size) == pytest.approx(float((np.expm1(wide) - wide).mean()), rel=EXPM1_MINUS_RELATIVE, abs=0)
    assert kl.k2(d.size) != pytest.approx(kl.k3(d.size), rel=EXPM1_MINUS_RELATIVE, abs=0)


def test_k3_of_tiny_differences_keeps_its_digits() -> None:
    """exp(d) - 1 - d computed literally has no correct digit left here."""
    x = np.array([1e-9])
    assert diagnostics.expm1_minus(x)[0] == pytest.approx(0.5e-18, rel=TINY_K3_RELATIVE, abs=0)
    assert math.exp(1e-9) - 1 - 1e-9 != pytest.approx(0.5e-18, rel=TINY_K3_RELATIVE, abs=0)


def test_the_series_over_the_range() -> None:
    x = np.concatenate([np.linspace(-700, 700, 997), np.linspace(-1, 1, 997), np.geomspace(1e-12, 0.5, 50)])
    x = x[x != 0]
    wide = x.astype(np.longdouble)
    far = np.abs(x) > 1e-3
    reference = np.where(far, np.expm1(wide) - wide, wide**2 / 2 * (1 + wide / 3 * (1 + wide / 4 * (1 + wide / 5))))
    assert np.abs(diagnostics.expm1_minus(x) / reference.astype(np.float64) - 1).max() < EXPM1_MINUS_RELATIVE


def test_undefined_kl_is_none() -> None:
    assert diagnostics.KullbackLeibler().k2(0) is None
    assert diagnostics.KullbackLeibler().k3(0) is None
    beyond = diagnostics.KullbackLeibler()
    beyond.add(np.array([800.0], np.float32))
    assert beyond.k3(1) is None
    assert beyond.k2(1) == 320000.0


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000, 4096])
def test_the_tree_adds_everything_once(size: int) -> None:
    values = RANDOM.integers(-1000, 1000, size).astype(np.float64)
    expected = values.sum()  # of whole numbers: exact in any order
    assert diagnostics.tree_sum(values) == expected


def test_extremes_over_blocks() -> None:
    found = diagnostics.Extremes()
    found.add(np.array([0, 2]), floats(0.5, -0.25), np.array([False, False]))
    found.add(np.array([3, 4]), floats(0.125, -0.5), np.array([False, True]))
    assert found.worst == 0, "of equals the first"
    assert found.first_mismatch == 4
    found.add(np.array([6]), floats(-0.75), np.array([True]))
    assert found.worst == 6
    assert found.first_mismatch == 4


def test_no_active_token_is_no_extreme() -> None:
    found = diagnostics.Extremes()
    found.add(np.zeros(0, np.int64), floats(), np.zeros(0, bool))
    assert found.worst is None
    assert found.first_mismatch is None


@pytest.mark.parametrize(("index", "place"), [(0, (0, 0)), (3, (0, 3)), (4, (2, 0)), (6, (2, 2))])
def test_a_flat_index_is_located_past_empty_sequences(index: int, place: tuple[int, int]) -> None:
    assert diagnostics.locate(index, np.array([0, 4, 4, 7])) == place
