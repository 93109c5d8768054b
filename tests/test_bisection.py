"""A bisection from sealed attempts: which rows come next, what their figures are taken for, and what is said of it."""

from __future__ import annotations

import json
import math

import pytest
from bisection_fixtures import OTHER, answered, bisected, examined, far_row, look, refused
from comparison_fixtures import rewrite_json

from libxd import bisection, bisection_text, canon, planner, schema, table
from libxd.errors import Status, XdError
from libxd.trial import Question

MEAN = Question("mean", 1e-3)
DTYPES = frozenset({"rollout.dtype", "training.compute_dtype"})


def either(changed: frozenset[str], repeat: int = 0) -> float:
    """Far apart where either side is in bfloat16: breaking takes one knob, repairing both."""
    return 0.03 if changed & DTYPES else 1e-6


def both(changed: frozenset[str], repeat: int = 0) -> float:
    return 0.03 if changed >= DTYPES else 1e-6


def answers(found: bisection.Bisection) -> dict[str, set[str]]:
    line = schema.validate("bisection", found.as_json(), "line")
    return {each["direction"]: {change["path"] for change in each["changes"]} for each in line["answers"]}


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """The run directory of the tests in which either dtype sets the sides apart: what one has scored answers others."""
    return tmp_path_factory.mktemp("apart") / "runs"


# -- rows


def test_the_rows_between_the_ends_are_those_of_the_planner():
    """Each is sound by itself, and the same case as any other plan of it."""
    far = far_row()
    for paths in ([], ["logp.backend"], ["batch.size", "rollout.dtype"], list(OTHER)):
        row = planner.read_row(canon.dumps(planner.subset(far, paths)), "row")
        assert [change["path"] for change in row["intervention"]] == [path for path in OTHER if path in paths]
        assert row["values"] == far["baseline"] | {path: OTHER[path] for path in paths}
        backend = OTHER["logp.backend"] if "logp.backend" in paths else "native"
        assert row["operators"]["selected_logprob"]["rollout"]["backend"] == backend
    assert planner.subset(far, list(OTHER)) == far
    again = planner.read_row(canon.dumps(planner.subset(far, ["batch.size"], repeat=2)), "row")
    assert (again["repeat"], again["case_id"]) == (2, planner.subset(far, ["batch.size"])["case_id"])


def test_an_explicit_mapping_of_operators_stays_what_it_is():
    far = far_row({"batch.size": 1, "rollout.dtype": "bfloat16"})
    far["operators"]["selected_logprob"]["training"] = {"backend": "xd.reference_logp", "options": {}}
    far = planner.subset(far, ["batch.size", "rollout.dtype"])
    assert planner.subset(far, [])["operators"] == far["operators"]


def test_first_both_ends_are_wanted_and_their_repeats(tmp_path):
    found = examined(tmp_path, far_row(), MEAN, repeats=2)
    assert [(len(row["intervention"]), row["repeat"]) for row in found.rows] == [
        (0, 0), (0, 1), (0, 2), (5, 0), (5, 1), (5, 2)]  # fmt: skip
    assert (found.state, found.bad_end) == ("searching", None)
    assert len(examined(tmp_path, far_row(), MEAN, repeats=2, most=4).rows) == 4


def test_the_same_attempts_give_the_same_next_rows(tmp_path):
    far = far_row()
    for row in examined(tmp_path, far, MEAN).rows:
        answered(tmp_path, row, either(frozenset(change["path"] for change in row["intervention"])))
    first, again = (examined(tmp_path, far, MEAN).rows for _ in range(2))
    assert first == again and first
    answered(tmp_path, first[0], 0.03)
    assert examined(tmp_path, far, MEAN).rows != first


# -- answers


def test_breaking_takes_one_where_repairing_takes_both(apart):
    found = bisected(apart, far_row(), MEAN, either)
    assert (found.state, found.bad_end, found.noise) == ("done", "other", None)
    assert answers(found) == {"break": {"rollout.dtype"}, "repair": set(DTYPES)}
    (repair,) = (each for each in found.as_json()["answers"] if each["direction"] == "repair")
    assert repair["changes"][0] == {"path": "rollout.dtype", "from": "bfloat16", "to": "float32"}
    assert (repair["smallest"], set(repair["needed"]), repair["unproven"]) == ("if_monotone", set(DTYPES), [])
    assert len(found.tests) < 2 ** len(OTHER) / 2


def test_an_interaction_is_found_breaking(tmp_path):
    found = bisected(tmp_path, far_row(), MEAN, both)
    assert answers(found)["break"] == set(DTYPES)
    assert len(answers(found)["repair"]) == 1


def test_the_bad_end_may_be_the_baseline(tmp_path):
    """The same settings from the other side."""
    found = bisected(tmp_path, far_row(), MEAN, lambda changed, repeat: either(frozenset(OTHER) - changed))
    assert (found.bad_end, answers(found)) == ("baseline", {"break": {"rollout.dtype"}, "repair": set(DTYPES)})
    (broken,) = (each for each in found.as_json()["answers"] if each["direction"] == "break")
    assert broken["changes"] == [{"path": "rollout.dtype", "from": "bfloat16", "to": "float32"}]


@pytest.mark.parametrize("direction", ["break", "repair"])
def test_one_direction_alone(apart, direction):
    found = bisected(apart, far_row(), MEAN, either, directions=(direction,))
    assert set(answers(found)) == {direction}


@pytest.mark.parametrize(
    ("question", "limit"),
    [(Question("verdict"), 1e-5), (Question("max", 0.01), 0.01), (Question("p99", 0.01), 0.01),
     (Question("count", 5), 5)],
)
def test_by_each_figure(apart, question, limit):
    found = bisected(apart, far_row(), question, either)
    assert answers(found)["repair"] == set(DTYPES)
    assert found.limit == pytest.approx(limit)
    for test in found.tests:
        (attempt,) = [each.attempt for each in test.measurements]
        assert (test.state == "bad") == (attempt.comparison()["status"] == "MISMATCH")


def test_a_verdict_is_the_largest_difference_beyond_the_threshold(tmp_path):
    """Bad is what is MISMATCH, to the bit: a figure that equals the threshold is none."""
    question = Question("verdict")
    far = far_row()
    limit = question.limit(far)
    statuses = {}
    for nats in (math.nextafter(limit, 0), limit, limit * (1 + 1e-6)):
        comparison = answered(tmp_path, far, nats).comparison()
        statuses[comparison["status"]] = question.figure(comparison) > limit
        assert statuses[comparison["status"]] == (comparison["status"] == "MISMATCH")
    assert set(statuses) == {"PASS", "MISMATCH"}


def test_without_a_contrast_there_is_nothing_to_search(apart):
    found = bisected(apart, far_row(), Question("mean", 1.0), either)
    assert (found.state, found.why, found.rows) == ("no_contrast", "both ends are good", [])
    assert not found.found
    assert len(found.tests) == 2
    assert "Nothing to search: both ends are good." in bisection_text.lines(found)


def test_rows_ahead_of_need_give_the_same_answers(tmp_path, apart):
    one = bisected(apart, far_row(), MEAN, either)
    few = bisected(tmp_path, far_row(), MEAN, either, most=6)
    assert answers(one) == answers(few)
    for row in (started := examined(tmp_path / "ahead", far_row(), MEAN, repeats=0)).rows:
        answered(tmp_path / "ahead", row, either(frozenset(change["path"] for change in row["intervention"])))
    assert len(started.rows) == 2
    needed = examined(tmp_path / "ahead", far_row(), MEAN).rows
    assert len(examined(tmp_path / "ahead", far_row(), MEAN, most=6).rows) == 6 > len(needed)


# -- noise


def test_within_the_noise_floor_a_test_is_repeated_then_undecided(tmp_path):
    """Ends that move by 0.2 of what they are; one knob that lies just above the limit."""

    def noisy(changed: frozenset[str], repeat: int) -> float:
        nats = 0.03 if changed & DTYPES else 1.37e-3 if changed else 1e-6  # mean of it: three quarters
        return nats * (1 + 0.2 * repeat)

    found = bisected(tmp_path, far_row(), MEAN, noisy, repeats=1)
    assert found.noise > 0
    undecided = [test for test in found.tests if test.state == "undecided"]
    assert undecided and all(len(test.measurements) == 2 for test in undecided)
    assert all("noise floor" in test.reason for test in undecided)
    assert answers(found)["break"] <= DTYPES
    calm = bisected(tmp_path / "calm", far_row(), MEAN, lambda changed, repeat: noisy(changed, 0), repeats=1)
    assert calm.noise == 0
    assert [test.state for test in calm.tests if test.state == "undecided"] == []


def test_repeats_on_both_sides_of_the_limit_are_undecided(tmp_path):
    """The end itself: then there is nothing to hold on to."""
    found = bisected(tmp_path, far_row(), MEAN, lambda changed, repeat: 0.03 if changed and repeat else 1e-6, repeats=1)
    assert found.state == "no_contrast"
    assert "the other end cannot be told: its repeats lie on both sides of the limit" in found.why


def test_without_repeats_the_floor_is_said_to_be_unknown(apart):
    found = bisected(apart, far_row(), MEAN, either, repeats=0)
    assert found.as_json()["noise"] is None
    assert any("not measured" in line for line in bisection_text.lines(found))
    repeated = bisected(apart, far_row(), MEAN, either, repeats=1)
    assert repeated.noise == 0
    assert not any("not measured" in line for line in bisection_text.lines(repeated))


def test_a_noisy_bad_end_says_little_about_a_small_limit(tmp_path):
    """Noise is in proportion: a tenth of 0.03 at the bad end leaves a limit of 1e-5 nearly alone."""

    def noisy(changed: frozenset[str], repeat: int) -> float:
        return either(changed) * (1 + 0.1 * repeat)

    found = bisected(tmp_path, far_row(), Question("verdict"), noisy, repeats=1)
    assert answers(found)["repair"] == set(DTYPES)
    assert found.noise < found.limit / 5


# -- what is no figure


def test_what_is_refused_is_gone_round_and_said(tmp_path):
    """Tensor parallelism beside the compiled path, as engines are."""
    clash = {"rollout.tensor_parallel_size", "logp.backend"}
    far = far_row()
    while (found := examined(tmp_path, far, MEAN)).rows:
        for row in found.rows:
            changed = frozenset(change["path"] for change in row["intervention"])
            if "rollout.tensor_parallel_size" in changed and not changed >= clash:
                refused(tmp_path, row, "logp.backend", "does not split")
            else:
                answered(tmp_path, row, either(changed))
    assert answers(found) == {"break": {"rollout.dtype"}, "repair": set(DTYPES)}
    unmeasured = [test for test in found.tests if test.state == "unmeasured"]
    assert unmeasured and all("does not split" in test.reason for test in unmeasured)
    text = "\n".join(bisection_text.lines(found))
    assert "unmeasured [1]" in text and "[1] rollout logp.backend: does not split" in text


def test_an_invalid_attempt_is_no_test_and_is_not_asked_for_again(tmp_path):
    far = far_row()
    for row in examined(tmp_path, far, MEAN).rows:
        answered(tmp_path, row, math.nan if row["intervention"] else 1e-6)
    found = examined(tmp_path, far, MEAN)
    assert (found.rows, found.state) == ([], "no_contrast")
    assert found.tests[1].reason == "INVALID_ARTIFACT"
    answered(tmp_path, far, 0.03)  # somebody scored it again
    assert examined(tmp_path, far, MEAN).rows


def test_a_tampered_attempt_is_no_test(tmp_path):
    far = far_row()
    for row in examined(tmp_path, far, MEAN).rows:
        attempt = answered(tmp_path, row, either(frozenset(change["path"] for change in row["intervention"])))
    assert examined(tmp_path, far, MEAN).bad_end == "other"
    rewrite_json(attempt, "comparison.json", status="PASS")
    assert [row["case_id"] for row in examined(tmp_path, far, MEAN).rows] == [far["case_id"]]


def test_attempts_of_other_conditions_are_not_mixed(tmp_path):
    """With a policy they are no answers; without one they are named, and say nothing."""
    far = far_row()
    for row in examined(tmp_path, far, MEAN).rows:
        answered(tmp_path, row, either(frozenset(change["path"] for change in row["intervention"])))
    (row, *_) = examined(tmp_path, far, MEAN).rows
    answered(tmp_path, row, 0.03, rollout_environment={"python": "3.13.0"})
    assert row in examined(tmp_path, far, MEAN).rows
    anywhere = bisection.examine(far, MEAN, look(tmp_path, conditions=False))
    assert anywhere.tests[2].reason == "rollout: another environment"
    assert anywhere.tests[2].state == "unmeasured"


def test_more_cases_than_a_plan_has_are_not_asked_for(apart, monkeypatch):
    monkeypatch.setattr(bisection, "MAX_CASES", 5)
    found = bisected(apart, far_row(), MEAN, either)
    assert (found.state, len(found.tests), found.found) == ("stopped", 5, False)
    assert "5 cases" in found.why
    assert any(line.startswith("Stopped: 5 cases") for line in bisection_text.lines(found))


# -- the text


def test_the_text_is_at_most_120_columns_and_says_which_knobs(apart):
    text = bisection_text.lines(bisected(apart, far_row(), MEAN, either, repeats=1))
    assert all(len(line) <= 120 for line in text)
    whole = "\n".join(text)
    assert "Breaking the good setting: 1 knob makes it bad.\n  rollout.dtype: float32 -> bfloat16" in whole
    assert "Repairing the bad setting: 2 knobs together make it good." in whole
    assert "  training.compute_dtype: bfloat16 -> float32" in whole
    assert "It does so alone. So does training.compute_dtype (tested; not all were)." in whole
    assert "Every set that does has all of them" in " ".join(whole.split())
    ends = [line for line in text if line.startswith((". . . . .  good", "x x x x x  bad"))]
    assert len(ends) == 2
    assert "Not monotone" not in whole


def test_what_is_not_monotone_is_said(tmp_path):

    def differ(changed: frozenset[str], repeat: int) -> float:
        hidden = "batch.size" in changed and "logp.backend" not in changed
        return 0.03 if "rollout.dtype" in changed and not hidden else 1e-6

    found = bisected(tmp_path, far_row(), MEAN, differ)
    line = schema.validate("bisection", found.as_json(), "line")
    assert line["contradictions"]
    for pair in line["contradictions"]:
        assert set(pair["bad"]) < set(pair["good"])
    assert any(line.startswith("Not monotone: ") for line in bisection_text.lines(found))


def test_a_repeated_case_is_named_as_one_in_the_verdict_table(tmp_path):
    far = far_row()
    attempts = [answered(tmp_path, planner.subset(far, ["batch.size"], repeat), 0.0) for repeat in (0, 1)]
    assert [table.read(each).changed for each in attempts] == ["batch.size=1", "batch.size=1 repeat 1"]


# -- the plan that is given


def test_rows_of_another_plan_are_no_bisection():
    far = far_row()
    row = planner.subset(far, [])
    assert bisection.far_end([("a", row), ("b", far)]) == far
    for others, code in (
        ([("a", row | {"strategy": "pairwise"})], "no-bisection"),
        ([], "no-rows"),
        ([("a", row)], "one-end"),
        ([("a", far), ("b", planner.subset(far_row({"batch.size": 2}), []))], None),
        ([("a", far), ("b", far_row({"batch.size": 2}))], "other-bisection"),
    ):
        if code is None:
            assert bisection.far_end(others) == far  # the same baseline
            continue
        with pytest.raises(XdError) as caught:
            bisection.far_end(others)
        assert (caught.value.code, caught.value.status) == (code, Status.INVALID)


# -- the tool


@pytest.fixture
def plan(tmp_path):
    """The plan of a bisection whose attempts stand in runs/."""
    far = far_row()
    (tmp_path / "plan.jsonl").write_bytes(b"\n".join(planner.encode([planner.subset(far, []), far])) + b"\n")
    return "plan.jsonl"


def test_the_tool_says_what_was_found(xd, apart, plan):
    bisected(apart, far_row(), MEAN, either, repeats=1)
    asked = ("xd-bisect", plan, "--runs", apart, "--by", "mean", "--above", "1e-3")
    ran = xd(*asked)
    assert (ran.status, ran.err) == (0, "")
    assert "Repairing the bad setting: 2 knobs together make it good." in ran.out
    ran = xd(*asked, "--json", "--exit-code")
    line = schema.validate("bisection", json.loads(ran.out), "line")
    assert (ran.status, line["state"], line["bad_end"]) == (0, "done", "other")
    assert xd(*asked, "--direction", "break", "--json").out != ran.out
    ran = xd("xd-bisect", plan, "--runs", "none", "--by", "verdict", "--exit-code")
    assert ran.status == 1 and "there is no attempt under it" in ran.err and ran.err.startswith("xd-bisect: none/")


def test_next_answers_no_when_nothing_is_left(xd, root, tmp_path):
    """Rows while there are some: status 0; the environment of this machine has not scored these, so the ends come."""
    config = root / "experiments" / "s0-bisect.json"
    assert xd("xd-plan", "-q", config, "--runs", "runs").status == 0
    asked = ("xd-bisect", "--next", "runs/s0-bisect/plan.jsonl", "--runs", "runs", "--by", "verdict")
    ran = xd(*asked, "--runtime", "cpu-smoke")
    assert ran.status == 0 and "4 to score; 0 cases tested" in ran.err
    rows = [planner.read_row(line, "next") for line in ran.out.splitlines()]
    assert [(len(row["intervention"]), row["repeat"]) for row in rows] == [(0, 0), (0, 1), (10, 0), (10, 1)]
    refused = xd("xd-materialize", "--runs", "runs", "--runtime", "hf", "-q", stdin=ran.out)
    assert refused.status == Status.REFUSED  # hf has no synthetic models
    done = xd(*asked, "--runtime", "hf")
    assert (done.status, done.out) == (1, "")
    assert "nothing to score" in done.err and "cannot be told" in done.err


@pytest.mark.parametrize(
    "options",
    [
        ("--by", "mean"), ("--by", "verdict", "--above", "1"), ("--by", "mean", "--above", "nan"),
        ("--by", "mean", "--above", "-1"), ("--by", "verdict", "--next"), ("--by", "verdict", "-j", "2"),
        ("--by", "verdict", "--next", "--json", "--runtime", "cpu-smoke"), ("--by", "verdict", "--threshold", "1"),
    ],
)  # fmt: skip
def test_a_question_that_makes_no_sense_is_one_line(xd, plan, options):
    ran = xd("xd-bisect", plan, "--runs", "runs", *options)
    assert (ran.status, ran.out, ran.err.count("\n")) == (Status.USAGE, "", 1)


def test_a_plan_that_is_none(xd, tmp_path, root):
    asked = ("--runs", "runs", "--by", "verdict")
    ran = xd("xd-bisect", *asked, "none.jsonl")
    assert (ran.status, ran.out, ran.err.count("\n")) == (Status.MISSING, "", 1)
    ran = xd("xd-bisect", *asked, stdin="{}\n")
    assert (ran.status, ran.out) == (Status.INVALID, "")
    other = xd("xd-plan", "-q", root / "experiments" / "s0.json").out
    ran = xd("xd-bisect", *asked, stdin=other)
    assert (ran.status, ran.out, ran.err.count("\n")) == (Status.INVALID, "", 1)
    assert "xd-plan --toward" in ran.err
    ran = xd("xd-bisect", *asked, stdin="\n")
    assert (ran.status, ran.err.count("\n")) == (Status.INVALID, 1)


def test_nothing_is_written(xd, apart, plan):
    bisected(apart, far_row(), MEAN, either)
    before = sorted(apart.rglob("*"))
    assert xd("xd-bisect", plan, "--runs", apart, "--by", "verdict", "--repeats", 0).status == 0
    assert sorted(apart.rglob("*")) == before


def test_it_needs_no_torch(xd, tmp_path, apart, plan):
    bisected(apart, far_row(), MEAN, either)
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "torch.py").write_text("raise AssertionError('torch was imported')\n")
    ran = xd("xd-bisect", plan, "--runs", apart, "--by", "verdict", env={"PYTHONPATH": str(tmp_path / "shadow")})
    assert (ran.status, ran.err) == (0, "")
