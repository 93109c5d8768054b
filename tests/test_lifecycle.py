"""Engines and processes from case to case: what is kept, what is built anew, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from scoring_fixtures import Bench

from libxd.errors import Status, XdError
from libxd.scoring import lifecycle
from libxd.scoring.lifecycle import Needs
from libxd.scoring.scorer import Held, Scorer
from libxd.scoring.task import Task

NEEDS = Needs(process="p", construction="c", context="x", weights="w", operator="o")
#: fields of Needs that a new engine in the same process satisfies
IN_PROCESS = ["construction", "context", "weights", "operator"]


def test_equal_needs_share_an_engine():
    assert lifecycle.step("p", NEEDS, replace(NEEDS)) == "reuse"
    lifecycle.require_same(NEEDS, replace(NEEDS))


@pytest.mark.parametrize("field", IN_PROCESS)
def test_another_construction_context_checkpoint_or_operator_is_another_engine(field):
    wanted = replace(NEEDS, **{field: "other"})
    assert lifecycle.step("p", NEEDS, wanted) == "rebuild"
    with pytest.raises(XdError) as caught:
        lifecycle.require_same(NEEDS, wanted)
    assert (caught.value.status, caught.value.code) == (Status.REFUSED, "incompatible-reuse")
    assert caught.value.found == [field]


def test_another_process_fingerprint_is_another_child():
    assert lifecycle.step("p", NEEDS, replace(NEEDS, process="other")) == "restart"


def test_a_lost_engine_is_built_in_the_living_child_and_a_lost_child_is_started():
    assert lifecycle.step("p", None, NEEDS) == "rebuild"
    assert lifecycle.step(None, None, NEEDS) == "restart"
    with pytest.raises(XdError):
        lifecycle.require_same(None, NEEDS)


@pytest.fixture
def bench(xd, tmp_path):
    return Bench(xd, tmp_path)


class Untouchable:
    """An engine that must not be asked for anything."""

    def __getattr__(self, name):
        raise AssertionError(f"the engine was asked for {name}")


def test_the_child_itself_refuses_an_engine_that_was_built_for_something_else(bench):
    """Defence in depth: the parent would not ask for it."""
    first, second = bench.materialize(bench.case(), bench.case(change=("rollout.dtype", "bfloat16")))
    held, wanted = (Task.read(bench.place / path, "rollout") for path in (first, second))
    scorer = Scorer("rollout")
    scorer.held = Held(Untouchable(), held.needs, 1)
    with pytest.raises(XdError) as caught:
        scorer.score(wanted, reuse=True)
    assert (caught.value.status, caught.value.code) == (Status.REFUSED, "incompatible-reuse")
    assert caught.value.found == ["construction"]
    assert bench.files(second) == set()


def test_the_child_refuses_a_case_of_another_process(bench):
    first, second = bench.materialize(bench.case(), bench.case(change=("rollout.tensor_parallel_size", 2)))
    scorer = Scorer("rollout")
    scorer._require_process(Task.read(bench.place / first, "rollout").needs, reuse=False)
    with pytest.raises(XdError) as caught:
        scorer.score(Task.read(bench.place / second, "rollout"), reuse=False)
    assert caught.value.code == "incompatible-reuse"



def test_request_level_cases_share_one_engine(bench):
    paths = bench.materialize(*(bench.case(change=("batch.size", size)) for size in (1, 2, 3)))
    log = bench.place / "log"
    assert bench.score(*paths, SCRIPTED_LOG=str(log)).status == 0
    assert [reuse["engine_serial"] for reuse in reuses(bench, paths)] == [1, 1, 1]
    assert [reuse["case_serial"] for reuse in reuses(bench, paths)] == [1, 2, 3]
    assert log.read_text().splitlines() == ["rollout opens", "rollout closes"]


def reuses(bench, paths):
    return [bench.open(path).readback("rollout")["reuse"] for path in paths]


def test_a_construction_change_builds_a_new_engine_in_the_same_process(bench):
    paths = bench.materialize(
        bench.case(), bench.case(change=("rollout.dtype", "bfloat16")), bench.case(change=("batch.size", 2))
    )
    assert bench.score(*paths).status == 0
    assert [reuse["engine_serial"] for reuse in reuses(bench, paths)] == [1, 2, 3]
    assert [reuse["case_serial"] for reuse in reuses(bench, paths)] == [1, 2, 3]


def test_another_checkpoint_is_another_engine(bench):
    paths = bench.attempts("plain", "plain too")
    assert bench.score(*paths).status == 0
    assert [reuse["engine_serial"] for reuse in reuses(bench, paths)] == [1, 2]


def test_a_process_change_starts_a_new_child(bench):
    paths = bench.materialize(bench.case(), bench.case(change=("rollout.tensor_parallel_size", 2)))
    assert bench.score(*paths).status == 0
    assert [reuse["engine_serial"] for reuse in reuses(bench, paths)] == [1, 1]
    assert [reuse["case_serial"] for reuse in reuses(bench, paths)] == [1, 1]


def test_after_a_failure_the_next_case_gets_a_fresh_engine_in_a_fresh_child(bench):
    first, second = bench.materialize(bench.case("raises-once"), bench.case("raises-once", ("batch.size", 2)))
    ran = bench.score(first, second)
    assert (ran.status, ran.out.splitlines()) == (Status.BUG, [second])
    assert reuses(bench, [second]) == [{"engine_serial": 1, "case_serial": 1}]


@pytest.mark.parametrize("act", ["trains", "leaves-train-mode"])
def test_an_engine_that_changed_while_scoring_is_not_kept(bench, act):
    paths = bench.materialize(bench.case(act), bench.case(act, ("batch.size", 2)))
    assert bench.score(*paths).status == 0
    assert [reuse["engine_serial"] for reuse in reuses(bench, paths)] == [1, 2]
    expected = bench.open(paths[1]).identity()["weights"]["rollout"]["digest"]
    observed = bench.open(paths[1]).readback("rollout")["observed"]
    assert (observed["weights_before"], observed["mode_before"]) == (expected, "eval")


def test_a_killed_child_is_replaced(bench):
    first, second = bench.materialize(bench.case("dies-once"), bench.case("dies-once", ("batch.size", 2)))
    ran = bench.score(first, second)
    assert (ran.status, ran.out.splitlines()) == (Status.RETRY, [second])
    assert ran.err.count("\n") == 1
    assert "was killed by SIGKILL" in ran.err
    assert "nothing was published" in ran.err
    assert bench.files(first) == set()
    again = bench.score(first)
    assert (again.status, again.out.splitlines()) == (Status.DONE, [first])
    assert not [name for name in os.listdir(bench.place / first) if name.startswith(".")]


CARELESS = """
from libxd.scoring import lifecycle
decided = lifecycle.step
lifecycle.step = lambda process, held, wanted: "reuse" if held else decided(process, held, wanted)
from libxd.cmd import score
score.main()
"""


def careless(bench, *paths):
    """xd-score of the rollout side by a parent that keeps whatever engine it holds."""
    command = [sys.executable, "-c", CARELESS, "--side", "rollout", *paths]
    environment = {**os.environ, **bench.environment}
    return subprocess.run(command, cwd=bench.place, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("change", "need"),
    [(("rollout.dtype", "bfloat16"), "construction"), (("rollout.tensor_parallel_size", 2), "process")],
)
def test_a_parent_that_reuses_whatever_it_holds_is_refused_by_its_child(bench, change, need):
    first, second = bench.materialize(bench.case(), bench.case(change=change))
    ran = careless(bench, first, second)
    assert (ran.returncode, ran.stdout.splitlines()) == (Status.REFUSED, [first])
    assert "an engine would be reused that was built for something else" in ran.stderr and need in ran.stderr
    assert bench.files(second) == set()


def test_the_same_parent_is_right_where_the_engine_fits(bench):
    """The control: it is the mismatch that was refused."""
    paths = bench.materialize(bench.case(), bench.case(change=("batch.size", 2)))
    ran = careless(bench, *paths)
    assert (ran.returncode, ran.stdout.splitlines()) == (Status.DONE, paths)
    assert [reuse["engine_serial"] for reuse in reuses(bench, paths)] == [1, 1]


@pytest.mark.parametrize("reused", [True, False])
def test_an_engine_reused_against_all_rules_is_refused_at_read_back(xd, tmp_path, monkeypatch, root, reused):
    """Were parent and child both careless, the live engine shows what it is. Built anew, the same case is scored."""
    pytest.importorskip("torch")
    plan = xd("xd-plan", "-q", root / "experiments" / "s0.json").out.splitlines()
    asked = [{}, {"rollout.dtype": "bfloat16"}]
    rows = [
        line for wanted in asked for line in plan
        if {each["path"]: each["value"] for each in json.loads(line)["intervention"]} == wanted
    ]  # fmt: skip
    made = xd("xd-materialize", "-q", "--runs", "runs", "--runtime", "cpu-smoke", "--allow-smoke-operators",
              stdin="\n".join(rows))  # fmt: skip
    assert made.status == 0, made.err
    first, second = (Task.read(tmp_path / path, "rollout") for path in made.out.splitlines())
    scorer = Scorer("rollout")
    scorer.score(first, reuse=False)
    if not reused:
        assert scorer.score(second, reuse=False) == {"engine_serial": 2, "case_serial": 2}
        return
    monkeypatch.setattr(lifecycle, "require_same", lambda held, wanted: None)
    with pytest.raises(XdError) as caught:
        scorer.score(second, reuse=True)
    assert caught.value.status == Status.REFUSED
    readback = second.attempt.readback("rollout")
    assert (readback["status"], readback["refusals"][0]["knob"]) == ("refused", "rollout.dtype")
    assert readback["reuse"] == {"engine_serial": 1, "case_serial": 2}
    assert not second.attempt.has("score_rollout.safetensors")
    assert scorer.held is None
