"""Experiment s1 on the real model, few short sequences: two processes, and what each case does to them.

What was done is read from the sealed readbacks' counters, and held against what the knobs' lifecycles ask for.
"""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from conftest import ROOT, Tools

from libxd import knobs
from libxd.rundir import SIDES, Attempt

pytest.importorskip("torch")
pytestmark = pytest.mark.xdist_group("s1")

MODEL = ROOT / "models" / "smollm2-135m-instruct"
STEP = {"request": "reuse", "construction": "rebuild", "process": "restart"}


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """All rows of s1 through one chain, a repeat of the baseline last: the attempts that were sealed, in order."""
    assert (MODEL / "model.safetensors").exists(), "run `make model`"
    place = tmp_path_factory.mktemp("s1")
    xd = Tools(place)

    def ran(tool, *arguments, stdin="", allowed=(0,)):
        done = xd(tool, "-q", *arguments, stdin=stdin)
        assert done.status in allowed, done.err
        return done.out

    ran("xd-rollout", ROOT / "experiments" / "prompts" / "short.jsonl", "--model", MODEL, "--limit", 2,
        "--max-new-tokens", 4, "--seed", 1, "--out", place / "sequences.safetensors")  # fmt: skip
    config = json.loads((ROOT / "experiments" / "s1.json").read_text())
    config["identity"]["checkpoint"]["path"] = config["identity"]["tokenizer"]["path"] = str(MODEL)
    config["identity"]["sequences"]["path"] = "sequences.safetensors"
    (place / "s1.json").write_text(json.dumps(config))
    rows = ran("xd-plan", place / "s1.json", "--repeats", 1).splitlines(keepends=True)
    rows.append(rows.pop(1))
    # what this machine or runtime cannot do is unsupported (69)
    attempts = ran("xd-materialize", "--runs", "runs", "--runtime", "hf", stdin="".join(rows), allowed=(0, 69))
    for each in (("xd-score", "--side", "rollout"), ("xd-score", "--side", "training"), ("xd-compare",), ("xd-seal",)):
        attempts = ran(*each, stdin=attempts)
    return [Attempt.open(place / path) for path in attempts.splitlines()]


def changed(before: Attempt, now: Attempt, side: str) -> list[str]:
    """The lifecycles of what differs between two cases, of a side."""
    ours, theirs = now.requested(), before.requested()
    found = [each.lifecycle for each in knobs.of_side(side) if ours["values"][each.path] != theirs["values"][each.path]]
    return found + ["process"] * (ours["repeat"] != theirs["repeat"])


def taken(before: Attempt, now: Attempt, side: str) -> str:
    """What was done to an engine between two cases, by the counters in their readbacks."""
    theirs, ours = (each.readback(side)["reuse"] for each in (before, now))
    if ours == {"engine_serial": 1, "case_serial": 1}:
        return "restart"
    assert ours["case_serial"] == theirs["case_serial"] + 1
    return {0: "reuse", 1: "rebuild"}[ours["engine_serial"] - theirs["engine_serial"]]


@pytest.mark.parametrize("side", SIDES)
def test_each_case_does_to_its_process_what_its_knobs_ask_for_and_no_more(scored, side):
    assert all(attempt.sealed for attempt in scored)
    expected = []
    for before, now in pairwise(scored):
        lifecycles = changed(before, now, side)
        expected.append(next((STEP[each] for each in ("process", "construction") if each in lifecycles), "reuse"))
    assert [taken(before, now, side) for before, now in pairwise(scored)] == expected
    assert {"reuse", "rebuild", "restart"} <= set(expected)


def test_the_first_case_of_a_side_starts_its_process(scored):
    for side in SIDES:
        assert scored[0].readback(side)["reuse"] == {"engine_serial": 1, "case_serial": 1}


def test_a_request_level_knob_keeps_both_engines_and_shows_its_value(scored):
    baseline, batch = scored[:2]
    assert [change["path"] for change in batch.requested()["intervention"]] == ["batch.size"]
    for side in SIDES:
        assert taken(baseline, batch, side) == "reuse"
        shown = {knob["knob"]: knob["actual"] for knob in batch.readback(side)["knobs"]}
        assert shown["batch.size"] == 1


def test_a_knob_of_one_side_leaves_the_other_sides_engine(scored):
    """Between two cases that the training side sees no difference of."""
    found = [
        (taken(before, now, "rollout"), taken(before, now, "training"))
        for before, now in pairwise(scored)
        if now.requested()["intervention"] and now.requested()["intervention"][0]["path"].startswith("rollout.")
        and not changed(before, now, "training")
    ]  # fmt: skip
    assert ("rebuild", "reuse") in found


def test_a_repeat_in_a_new_process_gives_the_same_numbers(scored):
    baseline, repeat = scored[0], scored[-1]
    assert (repeat.requested()["repeat"], repeat.case_id) == (1, baseline.case_id)
    figures = [each.comparison()["logprob_difference"] for each in (baseline, repeat)]
    assert figures[0] == figures[1]
