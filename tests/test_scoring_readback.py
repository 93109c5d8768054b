"""Read-back: what an engine shows against what was materialised."""

from __future__ import annotations

import numpy as np
import pytest

from libxd import knobs
from libxd.runtimes.protocol import Observation
from libxd.scoring import readback
from libxd.scoring.readback import (
    compare,
    merge,
    operator_refusals,
    remaining,
    same,
    scored_refusals,
    submission_refusals,
)


def records(*names, materialized=True, status="applied"):
    return [
        {"knob": name, "requested": materialized, "materialized": materialized, "status": status} for name in names
    ]


EAGER, CACHE = "rollout.enforce_eager", "rollout.enable_prefix_caching"


def test_a_setting_as_materialised_is_applied():
    found, refusals = compare(records(EAGER), {EAGER: Observation(True, {"graphs": 0})}, "settings", strict=True)
    assert refusals == []
    assert found[0].as_json() == {
        "knob": EAGER, "actual": True, "status": "applied", "stage": "settings", "evidence": {"graphs": 0}
    }  # fmt: skip


def test_a_declared_fallback_stays_one():
    found, refusals = compare(records(EAGER, status="fallback"), {EAGER: Observation(True)}, "settings", strict=True)
    assert (found[0].status, refusals) == ("fallback", [])


@pytest.mark.parametrize("stage", ["settings", "behaviour"])
@pytest.mark.parametrize("name", list(knobs.CATALOG))
def test_an_ignored_knob_is_refused_in_strict_mode_only(name, stage):
    observed = {name: Observation("another")}
    found, refusals = compare(records(name, materialized="one"), observed, stage, strict=True)
    assert (found[0].status, found[0].actual) == ("ignored", "another")
    assert [(r.stage, r.knob, r.expected, r.observed) for r in refusals] == [(stage, name, "one", "another")]
    loose, none = compare(records(name, materialized="one"), observed, stage, strict=False)
    assert (loose, none) == (found, [])


def test_what_an_engine_cannot_show_is_unobservable_and_not_copied_from_the_request():
    found, refusals = compare(records(EAGER), {EAGER: Observation(None, {"why": "closed"})}, "settings", strict=True)
    assert (found[0].status, found[0].actual) == ("unobservable", None)
    assert (refusals[0].knob, refusals[0].observed) == (EAGER, None)


def test_a_knob_that_settings_leave_out_waits_for_behaviour_and_is_unobservable_there():
    assert compare(records(EAGER), {}, "settings", strict=True) == ([], [])
    found, refusals = compare(records(EAGER), {}, "behaviour", strict=True)
    assert (found[0].status, found[0].stage, len(refusals)) == ("unobservable", "behaviour", 1)


def test_running_outweighs_what_settings_said():
    both = records(EAGER, CACHE)
    settings, _ = compare(both, {EAGER: Observation(True), CACHE: Observation(True)}, "settings", strict=True)
    shown = {CACHE: Observation(False)}
    left = remaining(both, settings, shown)
    assert [record["knob"] for record in left] == [CACHE]
    behaviour, refusals = compare(left, shown, "behaviour", strict=True)
    assert [r.knob for r in refusals] == [CACHE]
    merged = merge(both, settings, behaviour)
    assert [(k.knob, k.status, k.stage) for k in merged] == [
        (EAGER, "applied", "settings"), (CACHE, "ignored", "behaviour")
    ]  # fmt: skip


def test_running_may_still_show_what_settings_could_not():
    both = records(EAGER)
    settings, _ = compare(both, {EAGER: Observation(None)}, "settings", strict=False)
    assert remaining(both, settings, {}) == both


@pytest.mark.parametrize(("observed", "expected"), [(1, True), (True, 1), (8.0, 8), ("8", 8), (None, 8)])
def test_values_of_other_types_are_not_the_same(observed, expected):
    assert not same(observed, expected)
    assert same(expected, expected)


OPERATOR = {"backend": "native", "version": "1", "build": "b" * 64}


def test_the_operator_that_was_materialised_must_have_run():
    assert operator_refusals(OPERATOR, {**OPERATOR, "calls": 1}) == []
    never = operator_refusals(OPERATOR, {**OPERATOR, "calls": 0})
    assert [(r.stage, r.observed) for r in never] == [("operator", 0)]


@pytest.mark.parametrize("key", list(OPERATOR))
def test_an_operator_of_another_kind_is_refused(key):
    refusals = operator_refusals(OPERATOR, {**OPERATOR, key: "else", "calls": 1})
    assert [(r.stage, r.expected, r.observed) for r in refusals] == [("operator", OPERATOR[key], "else")]


def test_refusals_are_what_the_schema_says():
    fields = readback.Refusal("settings", EAGER, True, False, "why").as_json()
    assert set(fields) == {"stage", "knob", "expected", "observed", "reason"}


# -- what the operator gave, and what is published


IDS = np.array([3, 7, 7, 2], np.int32)
GIVEN = np.array([-1.0, -2.0, -2.5, -0.25], np.float32)
SCORED = np.array([False, True, True, True])
ACTIVE = np.array([False, False, True, True])


def published(**changes):
    logprobs = np.where(SCORED, GIVEN, np.float32(np.nan))
    facts = {"returned": (IDS[1:].astype(np.int64), GIVEN[1:]), "selected_ids": IDS, "logprobs": logprobs,
             "scored": SCORED, "active_mask": ACTIVE, "vocabulary_shards": 1, **changes}  # fmt: skip
    return [(refusal.stage, refusal.observed, refusal.reason) for refusal in scored_refusals(**facts)]


def test_what_the_operator_gave_may_come_in_any_order():
    assert published() == []
    back = [2, 0, 1]
    assert published(returned=(IDS[1:][back].astype(np.int64), GIVEN[1:][back])) == []


def test_one_bit_of_one_published_logprob_is_enough():
    moved = np.where(SCORED, GIVEN, np.float32(np.nan))
    moved[2] = np.nextafter(moved[2], np.float32(0))
    ((stage, count, reason),) = published(logprobs=moved)
    assert (stage, count) == ("operator", 1) and "did not give" in reason


def test_logprobs_given_for_other_ids_are_not_those():
    assert published(returned=(np.array([7, 7, 3]), GIVEN[1:]))[0][1] >= 1


def test_calls_for_some_of_the_tokens_are_not_enough():
    for kept in (1, 2):
        ((_, found, reason),) = published(returned=(IDS[1 : 1 + kept].astype(np.int64), GIVEN[1 : 1 + kept]))
        assert found == kept and "another number" in reason


def test_a_logprob_of_a_token_that_was_not_scored_is_made_up():
    assert [r for *_, r in published(logprobs=GIVEN)] == ["logprobs of tokens that the operator was not called for"]


def test_an_active_token_that_was_not_scored_is_told():
    scored = SCORED & ~(np.arange(4) == 3)
    found = published(scored=scored, returned=(IDS[1:3].astype(np.int64), GIVEN[1:3]),
                      logprobs=np.where(scored, GIVEN, np.float32(np.nan)))  # fmt: skip
    assert found == [("operator", 1, "active tokens that the operator was not called for")]


def test_a_shard_of_the_vocabulary_gives_other_numbers_as_often():
    twice = (np.tile(IDS[1:], 2).astype(np.int64), np.zeros(6, np.float32))
    assert published(returned=twice, vocabulary_shards=2) == []
    assert len(published(returned=twice)) == 1
    assert len(published(returned=(twice[0][:5], twice[1][:5]), vocabulary_shards=2)) == 1


def test_where_there_is_nothing_to_score_the_operator_need_not_run():
    none = np.zeros(4, bool)
    assert published(returned=(np.empty(0, np.int64), np.empty(0, np.float32)), scored=none, active_mask=none,
                     logprobs=np.full(4, np.nan, np.float32)) == []  # fmt: skip
    assert operator_refusals(OPERATOR, {**OPERATOR, "calls": 0}, to_score=False) == []


def test_another_order_of_submission_is_told():
    assert submission_refusals("rotated", True, [[0, 1]]) == []
    (found,) = submission_refusals("rotated", False, [[0, 1]])
    assert (found.stage, found.knob, found.expected, found.observed) == ("behaviour", None, "rotated", [[0, 1]])
