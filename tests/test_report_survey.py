"""One pass over the tokens of a case, and how sure what it gives is."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from comparison_fixtures import scored
from report_fixtures import ACTIVE, LENGTHS, LOGPROBS, TOKENS, judged, moved

from libxd import bootstrap, effect, pairs, scores
from libxd.difference import Difference
from libxd.report import strip, survey
from libxd.rundir import Attempt


def surveyed(attempt: Attempt, threshold: float = 1e-5) -> tuple[survey.Survey, Difference]:
    pair = pairs.of_attempt(attempt)
    difference = Difference(pair.rollout, pair.training, threshold)
    return survey.Survey(difference), difference


@pytest.mark.parametrize("block", [5, 1 << 17])
def test_a_survey_counts_what_is_there_in_any_blocks(tmp_path, monkeypatch, block):
    monkeypatch.setattr(scores, "BLOCK", block)
    training = moved(1e-2)
    training[4] = LOGPROBS[4]
    found, difference = surveyed(scored(tmp_path, LOGPROBS, training, active=ACTIVE, lengths=LENGTHS))
    apart = np.abs(difference.all(slice(None))[ACTIVE].astype(np.float64))
    counted = found.distribution()
    assert (counted["zero"], counted["nonfinite"]) == (1, 0)
    assert sum(counted["counts"]) == np.count_nonzero(ACTIVE) - 1
    low = 10.0 ** counted["first_log10"]
    high = 10.0 ** (counted["first_log10"] + len(counted["counts"]) / counted["bins_per_decade"])
    assert low <= apart[apart > 0].min() and apart.max() <= high
    assert counted["counts"][0] and counted["counts"][-1]
    where = found.positions()
    position = np.concatenate([np.arange(length) for length in LENGTHS])[ACTIVE]
    assert (where["first"], where["width"]) == (2, 1)
    assert where["counts"] == np.bincount(position)[2:].tolist()
    np.testing.assert_allclose(where["mean"], [apart[position == at].mean() for at in range(2, 12)], rtol=1e-12)
    assert where["max"] == [apart[position == at].max() for at in range(2, 12)]
    of_sequence = np.repeat(np.arange(len(LENGTHS)), LENGTHS)[ACTIVE]
    order = sorted(range(len(LENGTHS)), key=lambda s: -apart[of_sequence == s].max())
    assert [sequence for sequence, _ in found.worst(9)] == order
    assert found.worst(1)[0][1] == np.flatnonzero(ACTIVE)[np.argmax(apart)]


def test_what_is_not_finite_is_counted_and_is_the_worst(tmp_path):
    training = np.where(np.arange(TOKENS) == 9, np.nan, moved(1e-2)).astype(np.float32)
    found, _ = surveyed(scored(tmp_path, LOGPROBS, training, active=ACTIVE, lengths=LENGTHS))
    assert found.distribution()["nonfinite"] == 1
    assert sum(found.positions()["counts"]) == np.count_nonzero(ACTIVE) - 1
    assert found.worst(1) == [(1, 9)]


def test_equal_sides_and_no_tokens_have_no_worst(tmp_path):
    found, _ = surveyed(scored(tmp_path, LOGPROBS, LOGPROBS, active=ACTIVE, lengths=LENGTHS))
    assert found.worst(3) == [] and found.distribution()["counts"] == []
    found, _ = surveyed(scored(tmp_path / "none", LOGPROBS, LOGPROBS, active=np.zeros(TOKENS, bool), lengths=LENGTHS))
    assert found.positions()["counts"] == [] and found.worst(3) == []


def test_many_positions_are_put_together(tmp_path):
    length = 5000
    rollout = np.full(length, -1, np.float32)
    training = (rollout - np.arange(length) / 1e4).astype(np.float32)
    found, _ = surveyed(scored(tmp_path, rollout, training))
    where = found.positions()
    assert len(where["counts"]) <= 64 and sum(where["counts"]) == length
    assert where["mean"] == sorted(where["mean"]) and where["mean"][-1] > 10 * where["mean"][0]


def test_memory_of_a_survey_does_not_grow_with_the_tokens(tmp_path):
    peaks = []
    for tokens in (1 << 19, 1 << 21):
        rollout = np.full(tokens, -1, np.float32)
        pair = pairs.of_attempt(scored(tmp_path / str(tokens), rollout, rollout + np.float32(1e-3)))
        difference = Difference(pair.rollout, pair.training, 1e-5)
        tracemalloc.start()
        survey.Survey(difference)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]


def test_a_strip_stays_in_its_sequence_and_holds_its_worst_token(tmp_path):
    found, difference = surveyed(scored(tmp_path, LOGPROBS, moved(1e-2), active=ACTIVE, lengths=LENGTHS))
    for width in (1, 3, 5, 100):
        for each, (sequence, index) in zip(
            strip.strips(difference, found.worst(4), width, None, False), found.worst(4), strict=True
        ):
            assert len(each["tokens"]) == min(width, LENGTHS[sequence]) <= each["length"] == LENGTHS[sequence]
            assert each["first"] <= each["worst"] < each["first"] + len(each["tokens"])
            token = each["tokens"][each["worst"] - each["first"]]
            assert token["difference"] == float(difference.all(slice(index, index + 1))[0])
            assert token["id"] == index % 97


# -- how sure


def test_an_effects_sums_are_those_of_its_mean(tmp_path, monkeypatch):
    monkeypatch.setattr(scores, "BLOCK", 5)
    base = judged(tmp_path, LOGPROBS, moved(1e-2))
    other = judged(tmp_path, moved(0.1, 4), moved(1e-2), change=("rollout.enforce_eager", False))
    sums, counts = effect.sequence_sums(other, base, "rollout")
    assert counts.tolist() == [length - 2 for length in LENGTHS]
    apart = np.abs(moved(0.1, 4) - LOGPROBS).astype(np.float64)
    expected = [part[2:].sum() for part in np.split(apart, np.cumsum(LENGTHS)[:-1])]
    np.testing.assert_allclose(sums, expected, rtol=1e-12)
    mean = bootstrap.mean(sums, counts)
    assert mean.value == pytest.approx(effect.side_effect(other, base, "rollout").mean_absolute, rel=1e-12)
    assert mean.low < mean.value < mean.high
    assert not effect.sequence_sums(other, base, "training")[0].any()


def test_a_bootstrap_is_the_same_each_time_paired_and_needs_two_sequences():
    draw = np.random.default_rng(0)
    counts = draw.integers(1, 50, 200)
    sums = counts * draw.uniform(0, 1, 200)
    shifted = sums + 0.01 * counts
    assert bootstrap.mean(sums, counts) == bootstrap.mean(sums, counts)
    alone, paired = bootstrap.mean(shifted, counts), bootstrap.mean(shifted, counts, sums)
    assert paired.value == pytest.approx(0.01) and paired.high - paired.low < 1e-12
    assert alone.high - alone.low > 0.01, "the control: each by itself is less sure"
    assert bootstrap.mean(sums[:1], counts[:1]).low is None
    assert bootstrap.mean(np.zeros(2), np.zeros(2, np.int64)) is None


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    draw, held = np.random.default_rng(1), 0
    for _ in range(200):
        counts = draw.integers(5, 40, 40)
        found = bootstrap.mean(counts * draw.normal(1.0, 0.5, 40), counts)
        held += found.low <= 1.0 <= found.high
    assert 175 <= held <= 199
