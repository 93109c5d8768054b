"""Many writers, late ones, and ends at any moment, in short; dev/torture/races.py is the long form."""

from __future__ import annotations

import signal

import pytest
import races_fixtures as races

from libxd.rundir import Attempt


@pytest.fixture
def place(tmp_path):
    made = races.Place(tmp_path / "place")
    yield made
    assert made.alive() == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A place with two rows, and what the chain makes of them when nobody is in its way."""
    made = races.Place(tmp_path_factory.mktemp("runs") / "place")
    rows = made.rows(2)
    return made, rows, races.undisturbed_results(made, rows)


def test_of_scorers_that_race_for_an_attempt_one_wins_and_none_is_lost(place):
    """Two and two of them say the same."""
    assert races.scorers_race(place, 4, 2) == []


def test_a_job_that_comes_late_writes_nothing_over_what_its_requeued_copy_sealed(place):
    assert races.requeued(place, differs=True) == []


@pytest.mark.parametrize(("signum", "files", "everybody"), [(signal.SIGTERM, 5, True), (signal.SIGHUP, 14, False)])
def test_a_run_that_is_ended_anywhere_leaves_nothing_half_and_is_resumed(runs, signum, files, everybody):
    place, rows, expected = runs
    assert races.signalled(place, rows, signum, files, everybody, expected) == []


def test_a_reader_that_goes_away_loses_nothing(runs):
    place, rows, expected = runs
    assert races.closed_pipe(place, rows, 1, expected) == []


def test_other_scores_are_other_results(place):
    """Negative control: what two runs are compared by can differ."""
    rows = place.rows(1, "wobbles")
    said = []
    for wobble in ("0", "1"):
        place.environment["WOBBLE"] = wobble
        assert place.pipe(rows.read_text(), f"runs-{wobble}").finish()[0] == [0] * 5
        said.append(races.results(place.path / f"runs-{wobble}"))
    assert said[0].keys() == said[1].keys() and said[0] != said[1]


def test_what_is_half_or_foreign_is_seen(runs):
    """Negative control of `flaws`."""
    place, rows, _ = runs
    place.pipe(rows.read_text(), "runs-spoilt").finish()
    spoilt = place.path / "runs-spoilt"
    assert races.flaws(spoilt) == []
    first, second = races.attempts(spoilt)
    first.file(".tmp-left").touch()
    second.file("lock").touch()
    path = second.file("comparison.json")
    path.write_bytes(path.read_bytes()[:-9])
    found = " ".join(races.flaws(spoilt))
    assert all(word in found for word in (".tmp-left", "lock", "comparison.json"))
    assert ".tmp-left" not in " ".join(races.flaws(spoilt, temporary=True))


def test_a_snapshot_sees_a_file_that_was_written_again(place):
    """Negative control: the same bytes in another file."""
    (path,) = place.bench.attempts("plain")
    attempt = Attempt(place.path / path)
    before = races.snapshot(attempt)
    content = attempt.file("identity.json").read_bytes()
    attempt.file("identity.json").unlink()
    attempt.file("identity.json").write_bytes(content)
    assert races.snapshot(attempt) != before
