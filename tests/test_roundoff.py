"""The rule of the precision ladder: what shrinks with the unit roundoff is rounding, what stays is a bug."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny_pairs

from libxd import roundoff
from libxd.roundoff import LEAST_FACTOR, LIMIT, TF32_ROUNDOFF, UNIT_ROUNDOFF, Sample

DTYPES = ("bfloat16", "float16", "float32")
#: of a 135M model, in nats: the factor of means, and how many times it float32 shows
FACTOR, GROWTH = 9.0, 6.0
MODELS = 500  # pairs that are right
MISTAKES = {
    "temperature": {"temperature": 0.99},
    "weight": {"weight": 1.001},
    "attention scale": {"scale": 1.01},
    "positions shifted": {"shift": 1},
}


def rung(u: float, differences: np.ndarray) -> Sample:
    """differences [B, N] in nats."""
    d = np.abs(differences)
    return Sample(u, d.sum(1), np.full(d.shape[0], d.shape[1]), float(d.max()))


def rounding(seed: int, sequences: int = 8, tokens: int = 40) -> dict[str, np.ndarray]:
    """dtype -> differences [B, N] of a right pair: factors that differ from token to token, as heavy-tailed as seen."""
    draw = np.random.default_rng(seed)
    tokens_factor = draw.lognormal(0, 0.8, (sequences, tokens))
    return {
        dtype: UNIT_ROUNDOFF[dtype] * FACTOR * (GROWTH if dtype == "float32" else 1.0) * tokens_factor
        * draw.standard_normal((sequences, tokens))
        for dtype in DTYPES
    }  # fmt: skip


def judged(differences: dict[str, np.ndarray], *without: str) -> roundoff.Judgement:
    return roundoff.judge([rung(UNIT_ROUNDOFF[d], differences[d]) for d in differences if d not in without])


def test_no_right_pair_of_tiny_models_is_a_bug():
    for seed in range(MODELS):
        model = tiny_pairs.Model(seed)
        found = roundoff.judge(tiny_pairs.samples(model, *model.engines))
        assert found.answer == "rounding", (seed, found)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_one_of_two_tiny_models_is_a_bug(mistake):
    for seed in range(0, MODELS, 20):
        model = tiny_pairs.Model(seed)
        first, second = model.engines
        found = roundoff.judge(tiny_pairs.samples(model, first, replace(second, **MISTAKES[mistake])))
        assert found.answer == "bug", (seed, found)


def test_no_right_pair_of_drawn_differences_is_a_bug_and_a_small_one_in_each_is():
    for seed in range(1500):
        right = rounding(seed)
        assert judged(right).answer == "rounding", seed
        everywhere = {dtype: d + 1e-4 for dtype, d in right.items()}
        assert judged(everywhere).answer == "bug", seed


def test_a_mistake_at_one_token_is_a_bug():
    right = rounding(3)
    for dtype in right:
        right[dtype][2, 7] += 2e-3
    found = judged(right)
    assert (found.answer, found.why) == ("bug", "more is left than rounding explains, at few tokens")
    assert found.mean.left < found.mean.allowed


def test_a_mistake_hides_under_bfloat16_and_shows_in_float32():
    right = rounding(4)
    wrong = {dtype: d + 1e-3 for dtype, d in right.items()}
    coarse = [np.abs(each["bfloat16"]).mean() for each in (right, wrong)]
    assert coarse[1] < 1.1 * coarse[0]
    assert (judged(right).answer, judged(wrong).answer) == ("rounding", "bug")


def test_what_may_be_left_is_by_the_least_mean_and_the_greatest_maximum_of_the_coarser_rungs():
    """Rungs of 2^-8 and 2^-11 with mean factors 20 and 10, and maxima of 100 and 200 times u."""
    d = {
        "bfloat16": np.array([[100.0, 0, 0, 0, 0]]) * 2.0**-8,
        "float16": np.array([[200.0] + [0] * 19]) * 2.0**-11,
        "float32": np.full((1, 2), 2.0**-23),
    }
    found = judged(d)
    assert found.mean == roundoff.Remainder(2.0**-23, LIMIT * 10 * 2.0**-24)
    assert found.maximum == roundoff.Remainder(2.0**-23, LIMIT * 200 * 2.0**-24)


def test_engines_that_round_alike_below_float32_may_differ_in_it():
    """Bit for bit the same in bfloat16: then a model's usual factors say what float32 may show, and no more."""
    alike = {"bfloat16": np.zeros((4, 8)), "float16": np.zeros((4, 8)), "float32": np.full((4, 8), 4e-6)}
    assert judged(alike).answer == "rounding"
    assert judged(alike).mean.allowed == LIMIT * 2.0**-24 * LEAST_FACTOR["mean"]
    assert judged(alike | {"float32": np.full((4, 8), 4e-5)}).answer == "bug"


def test_nothing_left_at_all_is_rounding():
    found = judged({dtype: np.zeros((4, 8)) for dtype in DTYPES})
    assert (found.answer, found.why, found.slope) == ("rounding", "nothing is left", None)


@pytest.mark.parametrize(
    ("without", "said"),
    [
        (("float32",), "no rung computes in float32"),
        (("bfloat16", "float16"), "no rung is coarser"),
        (("float32", "float16"), "no rung computes in float32"),
        (DTYPES, "no rung holds valid scores of active tokens"),
    ],
)
def test_a_missing_rung_is_undecided_and_named(without, said):
    for shift in (0.0, 0.5):  # however large the mistake: it is not known yet
        found = judged({dtype: d + shift for dtype, d in rounding(5).items()}, *without)
        assert (found.answer, found.mean) == ("undecided", None)
        assert said in found.why


@pytest.mark.parametrize("coarse", ["bfloat16", "float16"])
def test_one_coarser_rung_is_enough(coarse):
    right = rounding(6)
    other = {"bfloat16": "float16", "float16": "bfloat16"}[coarse]
    assert judged(right, other).answer == "rounding"
    assert judged({dtype: d + 1e-3 for dtype, d in right.items()}, other).answer == "bug"


def test_float32_with_tf32_products_is_no_float32():
    right = rounding(7)
    rungs = [rung(UNIT_ROUNDOFF["bfloat16"], right["bfloat16"]), rung(TF32_ROUNDOFF, right["float16"])]
    assert roundoff.judge(rungs).answer == "undecided"
    taken_for_float32 = [rungs[0], rung(UNIT_ROUNDOFF["float32"], right["float16"])]
    assert roundoff.judge(taken_for_float32).answer == "bug"


def test_a_rung_without_tokens_is_none():
    right = rounding(8)
    nothing = Sample(UNIT_ROUNDOFF["float32"], np.zeros(8), np.zeros(8, np.int64), 0.0)
    coarse = [rung(UNIT_ROUNDOFF[dtype], right[dtype]) for dtype in ("bfloat16", "float16")]
    assert roundoff.judge([*coarse, nothing]).answer == "undecided"


def test_several_attempts_on_a_rung_must_all_be_explained():
    right = rounding(9)
    rungs = [rung(UNIT_ROUNDOFF[dtype], d) for dtype, d in right.items()]
    assert roundoff.judge([*rungs, rungs[-1]]).answer == "rounding"
    assert roundoff.judge([*rungs, rung(UNIT_ROUNDOFF["float32"], right["float32"] + 1e-3)]).answer == "bug"


def test_an_average_at_the_limit_is_undecided_and_more_sequences_decide():
    coarse = np.full((6, 4), FACTOR * 2.0**-8)
    limit = LIMIT * FACTOR * 2.0**-24
    uneven = np.repeat([0.1, 0.4, 0.8, 1.1, 1.5, 2.0], 4).reshape(6, 4) * limit
    found = judged({"bfloat16": coarse, "float32": uneven})
    assert found.answer == "undecided" and "more sequences" in found.why
    even = judged({"bfloat16": coarse, "float32": np.full((6, 4), 0.98 * limit)})
    assert even.answer == "rounding"
    assert judged({"bfloat16": coarse, "float32": np.full((6, 4), 1.1 * limit)}).answer == "bug"


def test_the_slope_of_rounding_is_one_and_of_a_mistake_zero():
    proportional = {dtype: np.full((4, 4), UNIT_ROUNDOFF[dtype]) for dtype in DTYPES}
    assert judged(proportional).slope.value == pytest.approx(1)
    fixed = judged({dtype: np.full((4, 4), 0.1) for dtype in DTYPES}).slope
    assert (fixed.value, fixed.low, fixed.high) == pytest.approx((0, 0, 0))
    assert judged(proportional, "float16", "float32").slope is None


def test_the_interval_is_of_sequences_and_always_the_same():
    right = rounding(10)
    first, second = judged(right).slope, judged(right).slope
    assert first == second
    assert first.low < first.value < first.high
    more = judged(rounding(10, sequences=200)).slope
    assert more.high - more.low < first.high - first.low
    one = judged(rounding(11, sequences=1)).slope
    assert (one.low, one.high) == (None, None)


def test_sequences_without_active_tokens_change_nothing():
    d = rounding(12)
    some = [rung(UNIT_ROUNDOFF[dtype], d[dtype]) for dtype in DTYPES]
    padded = [
        replace(each, sums=np.append(each.sums, [0.0] * 3), counts=np.append(each.counts, [0] * 3)) for each in some
    ]
    found, with_empty = roundoff.judge(some), roundoff.judge(padded)
    assert (found.answer, found.mean) == (with_empty.answer, with_empty.mean)


def test_many_sequences_are_put_together():
    draw = np.random.default_rng(0)
    d = {dtype: UNIT_ROUNDOFF[dtype] * draw.standard_normal((50_000, 2)) for dtype in DTYPES}
    slope = judged(d).slope
    assert slope.low < slope.value < slope.high < slope.low + 0.01


def test_what_grows_with_the_roundoff_is_rounding_however_large():
    """A needless cast loses more than it must, in proportion to u: no mistake of the mathematics."""
    lossy = {dtype: 30 * d if dtype != "float32" else d for dtype, d in rounding(13).items()}
    assert judged(lossy).answer == "rounding"
