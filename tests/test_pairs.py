"""Two score files as a pair, of an attempt or by themselves."""

from __future__ import annotations

import numpy as np
import pytest
from comparison_fixtures import floats, refused, rewrite_score, score_path, scored

from libxd import pairs
from libxd.errors import Status, XdError
from libxd.rundir import SIDES

ROLLOUT, TRAINING = floats(-1, -2, np.nan, -4), floats(-1.5, -2, -3, -4.25)
ACTIVE = np.array([False, True, True, True])


@pytest.fixture
def attempt(tmp_path):
    return scored(tmp_path, ROLLOUT, TRAINING, active=ACTIVE, lengths=(3, 1))


def test_a_pair_is_the_same_of_an_attempt_and_of_its_files_in_either_order(attempt):
    paths = [score_path(attempt, side) for side in SIDES]
    for pair in (pairs.of_attempt(attempt), pairs.of_files(paths), pairs.of_files(paths[::-1])):
        assert pair.tokens == 4 and pair.cu_seqlens.tolist() == [0, 3, 4]
        assert pair.active.tolist() == ACTIVE.tolist()
        np.testing.assert_array_equal(pair.difference, floats(-0.5, 0, np.nan, -0.25))
        assert pair.difference.dtype == np.float32
    assert pairs.of_attempt(attempt).attempt is attempt and pairs.of_files(paths).attempt is None


def test_what_is_no_pair(attempt, tmp_path):
    path, other = (score_path(attempt, side) for side in SIDES)
    shorter = scored(tmp_path / "shorter", floats(-1, -2), floats(-1, -2))
    gone = tmp_path / "gone.safetensors"
    for paths, status, what in (
        ([path], Status.USAGE, "two score files"),
        ([path, path], Status.INVALID, "both of one side"),
        ([path, score_path(shorter, "training")], Status.INVALID, "other numbers of tokens"),
        ([path, gone], Status.MISSING, "no such file"),
    ):
        with pytest.raises(XdError, match=what) as caught:
            pairs.of_files(paths)
        assert caught.value.status == status
    with pytest.raises(XdError, match="was refused") as caught:
        pairs.of_attempt(refused(tmp_path / "refused", ("batch.size", 1), "no room"))
    assert caught.value.status == Status.REFUSED
    rewrite_score(attempt, "training", logprobs=TRAINING.astype(np.float64))
    for opened in (lambda: pairs.of_attempt(attempt), lambda: pairs.of_files([path, other])):
        with pytest.raises(XdError, match="float64"):
            opened()
