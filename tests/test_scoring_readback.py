"""Read-back: what an engine shows against what was materialised."""

from __future__ import annotations

import pytest

from libxd import knobs
from libxd.runtimes.protocol import Observation
from libxd.scoring import readback
from libxd.scoring.readback import compare, merge, operator_refusals, remaining, same


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
