"""Memory that does not grow with the tokens: dev/torture/scale.py in short. The long form's figures: docs/scale.md."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from scale_fixtures import STAGES, control, make, plan, score_all, spend, tokens_of

from libxd import seal, sequences
from libxd.rundir import SIDES
from libxd.scores import ScoreFile

FEW, MANY = 1_000_000, 4_000_000  # tokens; of both the samples and the blocks are full
CAP = 160 << 20  # bytes of private memory
MOST_GROWTH = 36 << 20  # bytes resident, where files grow by 87 MB; what of their maps stays resident is some 25


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Tokens -> the place of a run of one case, and its attempt's path; what the stages leave is there for the next."""
    found = {}
    for tokens in (FEW, MANY):
        place = tmp_path_factory.mktemp(str(tokens))
        found[tokens] = place, make(place, 1, tokens, MANY // 3)  # the many in shards, which must be no matter
    return found


@pytest.fixture(scope="module")
def spent(runs):
    """Stage -> what each run's took, under the cap."""
    return {stage: {tokens: spend(command(*run), CAP) for tokens, run in runs.items()}
            for stage, command in STAGES.items()}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_memory_does_not_grow_with_the_tokens(spent, stage):
    few, many = (spent[stage][tokens] for tokens in (FEW, MANY))
    assert (few.status, few.said, many.status) == (0, "", 0), many.said
    assert many.peak_bytes - few.peak_bytes < MOST_GROWTH


def test_the_cap_bites_and_the_growth_is_seen(runs):
    """The control: a program that lays the same arrays out."""
    few, many = (control(runs[tokens][1]) for tokens in (FEW, MANY))
    capped = spend(many, CAP)
    assert capped.status == 1
    assert "MemoryError" in capped.said
    free = spend(many)
    assert free.status == 0
    assert free.peak_bytes - spend(few).peak_bytes > 2 * MOST_GROWTH


def test_what_a_process_needs_is_its_own():
    """Whatever the process that asks holds, as a worker of the tests that has run many of them."""
    held = np.ones(50_000_000)  # 400 MB
    assert spend([sys.executable, "-S", "-c", ""]).peak_bytes < held.nbytes / 4
    assert spend([sys.executable, "-S", "-c", "held = b'x' * 400_000_000"]).peak_bytes > held.nbytes


def test_the_runs_are_what_the_tools_make_of_them(runs, spent):
    """Sealed and answered as they are, in shards where there are many."""
    for tokens, (place, paths) in runs.items():
        assert spent["resume"][tokens].status == 0  # with --exit-code: no work is left
        (attempt,) = (seal.Attempt(path) for path in paths)
        assert len(attempt.scores("rollout")) == (1 if tokens == FEW else 4)
        comparison = attempt.comparison()
        assert comparison["status"] == "MISMATCH"
        assert comparison["counts"]["tokens"] == tokens
        assert comparison["violations"] == []
        assert any(page.stat().st_size for page in place.glob("*.html"))


def test_a_run_is_the_same_for_a_seed(tmp_path):
    def digests(name, seed, shard_tokens):
        attempts = plan(tmp_path / name, 2, 3000, seed)
        score_all(attempts, seed, shard_tokens)
        return [[ScoreFile.alone(attempt.scores(side)[0]).logprobs[:].tobytes() for side in SIDES]
                for attempt in attempts]  # fmt: skip

    first = digests("a", 1, 3000)
    assert digests("b", 1, 700) == first
    assert digests("c", 2, 3000) != first
    assert len({found for pair in first for found in pair}) == 4  # each side of each case is another


def test_its_tokens_are_frozen_sequences():
    for tokens in (301, 500, 10_000):
        made = tokens_of(tokens, 0)
        sequences.validate(made, "made")
        assert made.num_tokens == tokens
        assert 0 < np.count_nonzero(made.active_mask) < tokens
        json.dumps(made.metadata)
