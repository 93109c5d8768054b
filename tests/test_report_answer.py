"""Which knob a report names, and how: of what repairs, of what moves, and where nothing tells."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from comparison_fixtures import scored
from report_fixtures import HOSTILE, LENGTHS, LOGPROBS, TOKENS, Page, Words, judged, make, moved, report

from libxd import comparison, schema, table
from libxd.report import answer, content, markdown, page, run, text


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def said(made) -> content.Report:
    return report(made, Words("word"))


def test_the_answer_names_what_repairs_and_what_moves(said):
    found = said.value["answer"]
    assert (found["state"], found["what"]) == (
        "bad", "4 of 5 judged cases differ beyond 1e-05 nats; in the baseline 24 of 24 tokens (100 %), 0.00706 nats on "
        "average. 1 case is INVALID_ARTIFACT: no number of it counts.",
    )  # fmt: skip
    groups = {group["said"]: [each["case"] for each in group["cases"]] for group in found["which"]}
    assert groups["The difference is gone with:"] == ["training.attention_backend=sdpa"]
    assert groups["Moves its side most, in nats a token, above the noise floor:"] == [
        "rollout.enforce_eager=false", "training.attention_backend=sdpa",
    ]  # fmt: skip
    assert groups["Brings the two sides nearer, in nats a token:"] == ["training.attention_backend=sdpa"]
    assert groups["Takes the two sides further apart, in nats a token:"] == ["rollout.enforce_eager=false"]
    assert groups["Moves not a bit:"] == ["rollout.enable_prefix_caching=true"]
    assert any("Noise floor, 1 repeat of baseline" in each for each in found["sure"])
    assert any("rough" in each and "4 sequences" in each for each in found["sure"])
    assert any("rollout.dtype=float16 (unsupported)" in each for each in found["sure"])


def test_the_answer_where_a_change_breaks_an_aligned_baseline(tmp_path):
    judged(tmp_path, LOGPROBS, LOGPROBS)
    judged(tmp_path, moved(0.1), LOGPROBS, change=("rollout.enforce_eager", False))
    found = report(tmp_path / "test").value["answer"]
    assert found["what"] == "1 of 2 judged cases differs beyond 1e-05 nats, the baseline does not."
    assert found["which"][0] == {
        "said": "The difference comes with:", "more": 0, "cases": [{"case": "rollout.enforce_eager=false", "said": ""}],
    }  # fmt: skip
    assert found["sure"][0].startswith("The noise floor was not measured")


def test_the_answer_where_no_verdict_tells(tmp_path):
    judged(tmp_path, LOGPROBS, moved(0.1))
    alone = report(tmp_path / "test").value["answer"]
    assert alone["what"].startswith("The one judged case differs beyond 1e-05 nats; in the baseline 24 of 24 tokens")
    assert alone["which"][-1]["said"] == "No case with a changed knob was judged, so nothing points to one."
    judged(tmp_path, moved(0.1, 1), moved(0.1), change=("rollout.enforce_eager", False))
    found = report(tmp_path / "test").value["answer"]
    assert found["what"].startswith("All 2 judged cases differ")
    assert found["which"][0]["said"].startswith("No single change makes it go away")
    assert any("a floor that was not measured" in group["said"] for group in found["which"])


def test_the_answer_where_all_is_well_and_where_nothing_was_judged(tmp_path):
    judged(tmp_path / "good", LOGPROBS, LOGPROBS)
    found = report(tmp_path / "good" / "test").value["answer"]
    assert (found["state"], found["what"]) == (
        "good", "The one judged case agrees: no active token differs by more than 1e-05 nats.",
    )  # fmt: skip
    nothing = scored(tmp_path / "none", LOGPROBS, LOGPROBS, active=np.zeros(TOKENS, bool), lengths=LENGTHS)
    comparison.compare(nothing)
    found = report(tmp_path / "none" / "test").value["answer"]
    assert (found["state"], found["what"]) == ("nothing", "Nothing can be said: no token is active.")
    judged(tmp_path / "open", LOGPROBS, LOGPROBS, sealed=False)
    assert "Not sealed, so not final: baseline." in report(tmp_path / "open" / "test").value["answer"]["sure"]


def test_the_answer_where_what_was_scored_is_not_the_same(tmp_path):
    """An invalid case beside sound ones is no all-clear, and one at the baseline leaves nothing to compare with."""
    spoilt = np.where(np.arange(TOKENS) == 3, np.inf, LOGPROBS).astype(np.float32)
    judged(tmp_path / "one", LOGPROBS, LOGPROBS)
    judged(tmp_path / "one", LOGPROBS, spoilt, change=("batch.size", 1))
    found = report(tmp_path / "one" / "test").value["answer"]
    assert found["state"] == "invalid"
    assert found["what"].startswith("1 case is INVALID_ARTIFACT: no number of it counts. The one judged case agrees")
    judged(tmp_path / "base", LOGPROBS, spoilt)
    judged(tmp_path / "base", LOGPROBS, moved(0.1), change=("batch.size", 1))
    found = report(tmp_path / "base" / "test").value["answer"]
    assert found["state"] == "invalid"
    unsaid = "No changed knob could be set beside the baseline; the notes of the table say why."
    assert found["which"][-1] == {"said": unsaid, "cases": [], "more": 0}


def test_an_effect_within_the_floor_is_said_to_be_so(tmp_path):
    judged(tmp_path, LOGPROBS, LOGPROBS)
    judged(tmp_path, moved(1e-3), LOGPROBS, repeat=1)
    judged(tmp_path, moved(1e-4, 5), LOGPROBS, change=("rollout.enforce_eager", False))
    found = report(tmp_path / "test").value["answer"]
    no_more = "Moves no more than a repeat does, or not surely more:"
    unsure = {"said": no_more, "more": 0, "cases": [{"case": "rollout.enforce_eager=false", "said": ""}]}
    assert unsure in found["which"]
    judged(tmp_path, moved(1e-3, 6), LOGPROBS, change=("rollout.enforce_eager", False))  # as much as the repeat
    attempts = run.find(str(tmp_path / "test")).attempts
    rows = content.read([table.read(each) for each in attempts], None, False, lambda: None).value
    standings = [effect["standing"] for each in rows["cases"] if each["intervention"] for effect in each["effects"]]
    assert standings == ["above"]
    assert unsure in rows["answer"]["which"]
    judged(tmp_path, moved(1e-1, 6), LOGPROBS, change=("rollout.enforce_eager", False))
    assert unsure not in report(tmp_path / "test").value["answer"]["which"], "the control"


def test_the_doctors_first_cause_is_in_the_answer_and_on_the_page(said):
    value = json.loads(json.dumps(said.value))
    finding = {"cause": "stale-weights", "likelihood": 0.7, "summary": "one side lags", "next": ["sync again"],
               "evidence": [f"a {HOSTILE[:20]}"]}  # fmt: skip
    ratio = {"count": 4, "p01": 0.9, "p50": 1.0, "p99": 1.1, "max": 1.2, "ess_fraction": 0.99, "chi_square": 0.01}
    value["cases"][0] |= {"findings": [finding], "impact": {
        "ratio": {"token": ratio, "sequence": ratio}, "clipped": [{"name": "GRPO", "low": 1, "high": 2}],
    }}  # fmt: skip
    value["answer"] = answer.of(value)
    schema.validate("report", value, "report")
    assert any("stale-weights, one side lags" in group["said"] for group in value["answer"]["which"])
    shown = Page(page.html(value))
    assert "one side lags" in shown.said and "GRPO 1 below, 2 above" in shown.said and "sync again" in shown.said
    assert not shown.unbalanced and not shown.named("img")
    written = text.lines(content.Report(said.table, value)), markdown.lines(value)
    assert all("stale-weights" in "\n".join(lines) and "sync again" in "\n".join(lines) for lines in written)
    value["cases"][0]["findings"] = []
    assert "No detector named a cause." in Page(page.html(value)).said
