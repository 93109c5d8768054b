"""Which attempts answer a row: sealed, untampered, measured with what it would be measured with now. No engine."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparison_fixtures import floats, refused, rewrite_json, scored
from materialize_fixtures import environments, policy

from libxd import canon, comparison, materialize, planner, resume, seal, topology
from libxd.errors import Status, XdError
from libxd.rundir import PAYLOADS, Attempt, RunDirectory


def sealed(root: Path, rollout: np.ndarray | None = None, **facts: Any) -> Attempt:
    """One more attempt at the case, judged and sealed."""
    same = floats(-1, -2, -3)
    attempt = scored(root, same if rollout is None else rollout, same, **facts)
    comparison.compare(attempt)
    seal.seal(attempt)
    return attempt


def now(row: dict[str, Any], **rollout_environment: Any) -> dict[str, Any]:
    """What the row materialises to, here and now."""
    return materialize.materialized(row, policy(), environments(**rollout_environment))


def outcome(root: Path, row: dict[str, Any], plan: dict[str, Any] | None) -> resume.Outcome:
    return resume.outcome(row, RunDirectory(root, "test"), plan)


def answer(root: Path, row: dict[str, Any], plan: dict[str, Any] | None) -> tuple[str, str | None]:
    found = outcome(root, row, plan)
    return found.state, found.attempt and found.attempt.attempt_id


def test_a_sealed_attempt_answers_its_row(tmp_path):
    row = sealed(tmp_path).requested()
    assert answer(tmp_path, row, now(row)) == ("answered", "a0001")


def test_nothing_answers_a_row_of_which_there_is_nothing(tmp_path):
    row = sealed(tmp_path / "other").requested()
    assert answer(tmp_path, row, now(row)) == ("pending", None)


@pytest.mark.parametrize(
    ("rollout", "active", "status", "state"),
    [
        (floats(-1, -2.5, -3), None, "MISMATCH", "answered"),
        (None, np.zeros(3, bool), "ZERO_ACTIVE_TOKENS", "answered"),
        (floats(-1, np.nan, -3), None, "INVALID_ARTIFACT", "pending"),
    ],
)
def test_drift_is_an_answer_and_an_invalid_attempt_is_none(tmp_path, rollout, active, status, state):
    attempt = sealed(tmp_path, rollout, active=active)
    assert attempt.comparison()["status"] == status
    row = attempt.requested()
    assert outcome(tmp_path, row, now(row)).state == state


def test_a_pending_row_names_the_newest_attempt_of_now_that_is_no_answer(tmp_path):
    """What went wrong is to be seen: an INVALID verdict, an attempt left off; not one of other conditions."""
    invalid = sealed(tmp_path, floats(-1, np.nan, -3))
    row = invalid.requested()
    assert answer(tmp_path, row, now(row)) == ("pending", "a0001")
    assert answer(tmp_path, row, now(row, python="3.13.0")) == ("pending", None)
    assert answer(tmp_path, row | {"repeat": 1}, None) == ("pending", None)
    RunDirectory(tmp_path, "test").new_attempt(row["case_id"])  # nobody can say whose
    assert answer(tmp_path, row, now(row)) == ("pending", "a0001")
    left_off = RunDirectory(tmp_path, "test").new_attempt(row["case_id"])
    left_off.write_json("requested.json", row)
    assert answer(tmp_path, row, now(row)) == ("pending", "a0003")
    sealed(tmp_path)
    sealed(tmp_path, floats(-1, np.nan, -3))
    assert answer(tmp_path, row, now(row)) == ("answered", "a0004")


def test_without_its_seal_an_attempt_is_no_answer(tmp_path):
    attempt = scored(tmp_path, floats(-1), floats(-1))
    comparison.compare(attempt)
    row = attempt.requested()
    assert answer(tmp_path, row, now(row)) == ("pending", "a0001")
    seal.seal(attempt)
    assert answer(tmp_path, row, now(row)) == ("answered", "a0001")


def test_an_attempt_measured_under_other_conditions_is_no_answer(tmp_path):
    row = sealed(tmp_path).requested()
    assert answer(tmp_path, row, now(row, python="3.13.0")) == ("pending", None)
    assert answer(tmp_path, row, None) == ("answered", "a0001")  # what was measured, under whatever conditions


def test_what_is_sealed_under_other_conditions_says_which(tmp_path):
    row = sealed(tmp_path).requested()
    run = RunDirectory(tmp_path, row["experiment_id"])
    said = resume.outcome(row, run, now(row, python="3.13.0")).otherwise
    assert said is not None and "/environment/python was" in said and said.endswith('is "3.13.0"')
    assert resume.outcome(row, run, now(row)).otherwise is None
    attempt = next(run.attempts(row["case_id"]))
    attempt.file("COMPLETE").unlink()
    assert resume.outcome(row, run, now(row, python="3.13.0")).otherwise is None, "what is not sealed is no answer"


@pytest.mark.parametrize(
    "change", [{"repeat": 1}, {"strict_fallback": False}, {"submission": "rotated"}, {"case_digest": "0" * 64}]
)
def test_another_request_of_the_same_case_is_not_answered(tmp_path, change):
    row = sealed(tmp_path).requested()
    assert answer(tmp_path, row | change, None) == ("pending", None)


@pytest.mark.parametrize("change", [{"locations": {}}, {"experiment_id": "test2"}, {"strategy": "pairwise"}])
def test_what_does_not_say_what_is_measured_does_not_matter(tmp_path, change):
    row = sealed(tmp_path).requested()
    assert answer(tmp_path, row | change, None) == ("answered", "a0001")


def test_the_newest_valid_attempt_counts_and_tampered_ones_are_named(tmp_path):
    older, newer = sealed(tmp_path), sealed(tmp_path)
    row = older.requested()
    assert answer(tmp_path, row, now(row)) == ("answered", "a0002")
    spoil(newer, "comparison.json")
    found = outcome(tmp_path, row, now(row))
    assert (found.state, found.attempt.attempt_id) == ("answered", "a0001")
    assert [attempt.attempt_id for attempt, _ in found.passed_over] == ["a0002"]
    spoil(older, "comparison.json")
    assert answer(tmp_path, row, now(row)) == ("pending", None)


@pytest.mark.parametrize("name", PAYLOADS)
def test_any_file_that_was_touched_makes_it_no_answer(tmp_path, name):
    attempt = sealed(tmp_path)
    row = attempt.requested()
    plan = now(row)
    spoil(attempt, name)
    assert answer(tmp_path, row, plan) == ("pending", None)


@pytest.mark.parametrize("name", ["requested.json", "materialized.json"])
@pytest.mark.parametrize("lost", [True, False])
def test_a_sealed_attempt_that_lost_or_changed_what_says_whose_it_is_is_named(tmp_path, name, lost):
    """It would be taken for an attempt at another row, or of other conditions, or for one that was left off."""
    attempt = sealed(tmp_path)
    row, plan = attempt.requested(), attempt.materialized()
    if lost:
        attempt.file(name).unlink()
    else:
        rewrite_json(attempt, name, **({"repeat": 1} if name == "requested.json" else {"execution_key": "0" * 64}))
    found = outcome(tmp_path, row, plan)
    assert (found.state, found.attempt, found.otherwise) == ("pending", None, None)
    assert found.passed_over == ((attempt_of(found), f"sealed, but {name}: {'missing' if lost else CHANGED}"),)


CHANGED = "changed (same size, another digest)"


def attempt_of(found: resume.Outcome) -> Attempt:
    (passed_over, _), *_ = found.passed_over
    assert passed_over.attempt_id == "a0001"
    return passed_over


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("a0001")])
def test_a_symlink_or_a_file_in_an_attempts_place_is_named(tmp_path, make):
    attempt = sealed(tmp_path)
    row = attempt.requested()
    make(attempt.path.parent / "a0002")
    found = outcome(tmp_path, row, None)
    assert (found.state, found.attempt.attempt_id) == ("answered", "a0001")
    ((stray, why),) = found.passed_over
    assert (stray.attempt_id, why) == ("a0002", "an attempt is a directory, and no symlink")


def spoil(attempt: Attempt, name: str) -> None:
    with open(attempt.file(name), "ab") as file:
        file.write(b" ")


def test_an_answer_is_one_wherever_its_row_was_planned(tmp_path):
    """Planned where nothing is at hand but the digests: other missing parts, no sizes, nothing to execute."""
    row = sealed(tmp_path).requested()
    identity = row["identity"]
    unpinned = dict.fromkeys(set(identity["sequences"]) - {"digest", "packing"})
    elsewhere = row | {
        "identity": identity | {"model": None, "sequences": identity["sequences"] | unpinned},
        "derived": topology.derived(row["values"], None),
        "locations": dict.fromkeys(row["locations"]),
        "missing": ["/identity/sequences: not at hand", "/identity/model: not known"],
        "executable": False,
    }
    planner.require_sound(elsewhere, "a row of the same case")
    assert answer(tmp_path, elsewhere, None) == ("answered", "a0001")


def test_a_partial_or_malformed_attempt_is_passed_over(tmp_path):
    row = sealed(tmp_path).requested()
    run = RunDirectory(tmp_path, "test")
    run.new_attempt(row["case_id"])
    run.new_attempt(row["case_id"]).file("requested.json").write_text("{")
    malformed = run.new_attempt(row["case_id"])
    malformed.write_json("requested.json", row)
    malformed.file("materialized.json").write_text("{")
    found = outcome(tmp_path, row, now(row))
    assert (found.state, found.attempt.attempt_id) == ("answered", "a0001")
    assert [attempt.attempt_id for attempt, _ in found.passed_over] == ["a0004", "a0003"]


def test_a_row_that_was_refused_under_the_same_conditions_is_withheld(tmp_path):
    attempt = refused(tmp_path, ("rollout.enforce_eager", False), "has no graphs")
    row, plan = attempt.requested(), attempt.materialized()
    assert answer(tmp_path, row, plan) == ("refused", "a0001")
    assert answer(tmp_path, row, now(row)) == ("pending", None)  # other conditions may not refuse it


def refuse_at_readback(attempt: Attempt) -> None:
    reason = {"stage": "settings", "knob": "rollout.dtype", "expected": "float32", "observed": "float16",
              "reason": "no"}  # fmt: skip
    rewrite_json(attempt, "readback_rollout.json", status="refused", refusals=[reason])


def test_a_refusal_at_read_back_withholds_too(tmp_path):
    attempt = scored(tmp_path, floats(-1), floats(-1))
    row = attempt.requested()
    assert answer(tmp_path, row, now(row)) == ("pending", "a0001")
    refuse_at_readback(attempt)
    assert answer(tmp_path, row, now(row)) == ("refused", "a0001")


def test_an_answer_outweighs_a_refusal(tmp_path):
    sealed(tmp_path)
    attempt = scored(tmp_path, floats(-1, -2, -3), floats(-1, -2, -3))
    refuse_at_readback(attempt)
    row = attempt.requested()
    found = outcome(tmp_path, row, now(row))
    assert (found.state, found.attempt.attempt_id, found.passed_over) == ("answered", "a0001", ())


def test_an_attempt_that_there_is_no_descriptor_for_is_not_passed_over(tmp_path, monkeypatch):
    """Else its row would be scored again for nothing."""
    row = sealed(tmp_path).requested()

    def refuse(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(canon, "digest_file", refuse)
    with pytest.raises(XdError) as caught:
        outcome(tmp_path, row, None)
    assert caught.value.status == Status.RETRY
