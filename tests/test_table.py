"""The verdict table: a row an attempt, what it says of judged, refused and unfinished ones, and its form."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from comparison_fixtures import floats, refused, rewrite_json, rewrite_score, scored, snapshot

from libxd import comparison, table, table_text
from libxd.rundir import Attempt

BASE = floats(-1, -2, -3, -4)


def judged(root: Path, rollout: np.ndarray, training: np.ndarray, **options) -> Attempt:
    attempt = scored(root, rollout, training, **options)
    comparison.compare(attempt)
    return attempt


def text(*attempts: Attempt) -> list[str]:
    made = table.tables([table.read(attempt) for attempt in attempts])
    return [line for each in made for line in table_text.lines(each)]


def row(lines: list[str], start: str) -> list[str]:
    (found,) = [line for line in lines if line.startswith(start + "  ")]
    return found[len(start) :].split()


def test_the_whole_of_it(tmp_path: Path) -> None:
    lines = text(
        judged(tmp_path, BASE, BASE),
        judged(tmp_path, BASE + np.float32(2**-20), BASE, repeat=1),
        judged(tmp_path, BASE + floats(0, 0, 0, 0.5), BASE, change=("rollout.dtype", "bfloat16")),
        judged(tmp_path, BASE, BASE + floats(0.25, 0, 0, 0), change=("batch.size", 1)),
        judged(tmp_path, BASE, BASE, change=("training.compute_dtype", "float16")),
        refused(tmp_path, ("training.attention_backend", "flash_attention_2"), "no CUDA device here"),
    )
    assert lines[0] == "test (test): contract ws1 version 1, threshold 1e-05 nats (float32)"
    assert lines[1].startswith("S0 on cpu shows plumbing only")
    assert row(lines, "baseline") == ["PASS", "0/4", "0", "0", "0", "-", "-", "-", "-"]
    assert row(lines, "baseline repeat 1")[:2] == ["PASS", "0/4"]
    assert row(lines, "rollout.dtype=bfloat16") == [
        "MISMATCH", "1/4", "0.125", "0.500", "0.500", "rollout", "0.125", "0.500", "above",
    ]  # fmt: skip
    assert row(lines, "batch.size=1") == ["MISMATCH", "1/4", "0.0625", "0.250", "0.250", "rollout", "0", "0", "0"]
    assert lines[lines.index(next(x for x in lines if x.startswith("batch.size=1"))) + 1].split() == [
        "training", "0.0625", "0.250", "above",
    ]  # fmt: skip
    assert row(lines, "training.compute_dtype=float16")[-4:] == ["training", "0", "0", "0"]
    assert any("[1] training.attention_backend: no CUDA device here" in line for line in lines)
    assert any("unsupported [1]" in line for line in lines)
    assert any("Noise floor (1 repeat of the baseline): rollout mean 9.54e-7" in line for line in lines)


@pytest.mark.parametrize(
    ("runtimes", "said"),
    [
        ([("vllm", "hf"), ("vllm", "hf")], "vllm as rollout against hf as training"),
        ([("hf", "hf")], "hf against itself"),
        ([], "no engines"),
    ],
)
def test_a_level_names_the_engines_that_its_attempts_name(runtimes, said) -> None:
    def attempt(rollout, training):
        return SimpleNamespace(
            materialized=lambda: {"sides": {"rollout": {"runtime": rollout}, "training": {"runtime": training}}}
        )

    rows = [SimpleNamespace(attempt=attempt(*pair)) for pair in runtimes] + [SimpleNamespace(attempt=None)]
    assert table_text._engines(rows) == said
    assert table_text.CLAIMS["S2"].format(engines=said).startswith(said)


def test_within_the_floor(tmp_path: Path) -> None:
    lines = text(
        judged(tmp_path, BASE, BASE),
        judged(tmp_path, BASE + np.float32(0.5), BASE, repeat=1),
        judged(tmp_path, BASE + np.float32(0.25), BASE, change=("rollout.enforce_eager", False)),
    )
    assert row(lines, "rollout.enforce_eager=false")[-4:] == ["rollout", "0.250", "0.250", "within"]


def test_without_a_repeat_the_floor_is_not_measured(tmp_path: Path) -> None:
    lines = text(
        judged(tmp_path, BASE, BASE), judged(tmp_path, BASE + np.float32(1), BASE, change=("rollout.dtype", "float16"))
    )
    assert row(lines, "rollout.dtype=float16")[-1] == "?"
    assert "Noise floor: not measured" in " ".join(lines)


def test_without_a_baseline_there_is_no_effect(tmp_path: Path) -> None:
    lines = text(judged(tmp_path, BASE, BASE, change=("rollout.dtype", "float16")))
    assert row(lines, "rollout.dtype=float16")[-4:] == ["-"] * 4


def test_an_attempt_that_was_left_off_is_incomplete(tmp_path: Path) -> None:
    found = table.read(scored(tmp_path, BASE, BASE))
    assert found.verdict == "incomplete"
    assert any("incomplete" in line for line in text(found.attempt))


def test_a_row_of_the_plan_without_an_attempt_is_missing(tmp_path: Path) -> None:
    baseline = judged(tmp_path, BASE, BASE)
    other = judged(tmp_path, BASE, BASE, change=("rollout.dtype", "float16"))
    absent = judged(tmp_path / "elsewhere", BASE, BASE, change=("batch.size", 1)).requested()
    plan = [baseline.requested(), absent, {**baseline.requested(), "repeat": 1}]
    found = table.planned([table.read(attempt) for attempt in (other, baseline)], plan)
    assert [(each.changed, each.verdict) for each in found] == [
        ("baseline", "PASS"), ("batch.size=1", "missing"), ("baseline repeat 1", "missing"),
        ("rollout.dtype=float16", "PASS"),
    ]  # fmt: skip
    lines = [line for each in table.tables(found) for line in table_text.lines(each)]
    assert row(lines, "batch.size=1")[:2] == ["missing", "[1]"]
    assert any(line.startswith("[1] no attempt that was given answers this row") for line in lines)
    assert table.planned([], []) == []


def test_a_table_of_missing_rows_alone(tmp_path: Path) -> None:
    planned = judged(tmp_path, BASE, BASE).requested()
    repeat = {**planned, "repeat": 1}
    for rows, why in (([planned], "xd-plan --repeats 1"), ([planned, repeat], "was scored beside it")):
        (made,) = table.tables(table.planned([], rows))
        lines = table_text.lines(made)
        assert row(lines, "baseline")[:2] == ["missing", "[1]"]
        assert any(line.startswith("Noise floor: not measured") and why in line for line in lines), lines


def test_a_refusal_at_read_back_is_refused(tmp_path: Path) -> None:
    attempt = scored(tmp_path, BASE, BASE)
    reasons = [{"stage": "settings", "knob": "batch.size", "expected": 4, "observed": 1, "reason": "another value"}]
    rewrite_json(attempt, "readback_rollout.json", status="refused", refusals=reasons)
    found = table.read(attempt)
    assert (found.verdict, found.reason) == ("refused", "batch.size: another value")


def test_a_refusal_that_is_not_for_lack_of_support_is_refused(tmp_path: Path) -> None:
    attempt = refused(tmp_path, ("rollout.dtype", "float16"), "not here")
    refusals = json.loads(attempt.file("materialized.json").read_bytes())["refusals"]
    assert table.read(attempt).verdict == "unsupported"
    rewrite_json(attempt, "materialized.json", refusals=[*refusals, {**refusals[0], "status": "unobservable"}])
    assert table.read(attempt).verdict == "refused"


def test_invalid_verdicts_say_why_and_judge_nothing_anew(tmp_path: Path) -> None:
    attempt = scored(tmp_path, BASE, BASE)
    rewrite_score(attempt, "training", token_ids=np.array([5, 6, 7, 8], np.int32))
    comparison.compare(attempt)
    before = snapshot(attempt)
    lines = text(attempt)
    assert snapshot(attempt) == before
    assert row(lines, "baseline")[:2] == ["INVALID_IDENTITY", "[1]"]
    assert any(line.startswith("[1] token-ids (score_training.safetensors#/token_ids)") for line in lines)


def test_a_baseline_that_cannot_be_laid_beside_leaves_a_note(tmp_path: Path) -> None:
    baseline = scored(tmp_path, BASE, BASE)
    rewrite_score(baseline, "rollout", logprobs=np.zeros(4))
    comparison.compare(baseline)
    other = judged(tmp_path, BASE, BASE, change=("rollout.dtype", "float16"))
    lines = text(baseline, other)
    assert row(lines, "baseline")[2] == "-", "no counts without arrays"
    assert row(lines, "rollout.dtype=float16")[-4:] == ["-"] * 4
    assert any("no effect: the baseline is INVALID_ARTIFACT" in line for line in lines)


def test_an_invalid_attempt_has_no_effect_and_is_no_baseline(tmp_path: Path) -> None:
    """Its numbers are those of other tokens or weights, however near they lie."""

    def invalid(**options) -> Attempt:
        attempt = scored(tmp_path, BASE, BASE, **options)
        rewrite_score(attempt, "training", token_ids=np.array([5, 6, 7, 8], np.int32))
        comparison.compare(attempt)
        return attempt

    bad, bad_repeat, bad_case = invalid(), invalid(repeat=1), invalid(change=("rollout.dtype", "float16"))
    good = judged(tmp_path, BASE + np.float32(1), BASE)
    case = judged(tmp_path, BASE, BASE, change=("rollout.dtype", "bfloat16"))
    lines = text(bad, bad_repeat, bad_case, good, case)
    assert row(lines, "rollout.dtype=bfloat16")[-4:] == ["rollout", "1.00", "1.00", "?"]
    assert row(lines, "rollout.dtype=float16")[-4:] == ["-"] * 4
    assert "Noise floor: not measured" in " ".join(lines)
    lines = text(bad, case)
    assert row(lines, "rollout.dtype=bfloat16")[-4:] == ["-"] * 4
    assert any("no effect: the baseline is INVALID_IDENTITY" in line for line in lines)


THERE = {"python": "3.13.0"}


def test_an_effect_is_not_that_of_another_environment(tmp_path: Path) -> None:
    """Another machine's rollout beside this one's baseline: no effect on that side, the other side has its own."""
    here = judged(tmp_path, BASE, BASE)
    repeat = judged(tmp_path, BASE, BASE, repeat=1)
    there = judged(tmp_path, BASE + np.float32(1), BASE, change=("batch.size", 1), rollout_environment=THERE)
    lines = text(here, repeat, there)
    assert row(lines, "batch.size=1")[-4:] == ["training", "0", "0", "0"]
    assert any("no effect: rollout: the baseline was scored with another environment" in line for line in lines)
    assert "above" not in " ".join(lines)


def test_each_environment_has_its_baseline_and_its_floor(tmp_path: Path) -> None:
    moved = np.float32(1)
    attempts = [
        judged(tmp_path, BASE, BASE),
        judged(tmp_path, BASE + moved, BASE, rollout_environment=THERE),
        judged(tmp_path, BASE + moved + np.float32(0.5), BASE, repeat=1, rollout_environment=THERE),
        judged(tmp_path, BASE + moved, BASE, change=("rollout.dtype", "float16"), rollout_environment=THERE),
        judged(tmp_path, BASE + np.float32(0.25), BASE, change=("rollout.enforce_eager", False)),
    ]
    lines = text(*attempts)
    assert row(lines, "rollout.dtype=float16")[-4:] == ["rollout", "0", "0", "0"]
    assert row(lines, "rollout.enforce_eager=false")[-4:] == ["rollout", "0.250", "0.250", "?"]
    assert row(lines, "baseline repeat 1")[-4:] != ["rollout", "1.50", "1.50", "within"]
    assert any(line.startswith("Noise floor (1 repeat of baseline a0002): rollout mean 0.500") for line in lines)


def test_a_second_attempt_at_the_baseline_is_no_repeat(tmp_path: Path) -> None:
    """Its difference is no noise of one process: it may have been another day, machine or build."""
    lines = text(
        judged(tmp_path, BASE, BASE),
        judged(tmp_path, BASE + np.float32(1), BASE),
        judged(tmp_path, BASE + np.float32(0.5), BASE, change=("rollout.dtype", "float16")),
    )
    assert row(lines, "rollout.dtype=float16")[-1] == "?"
    assert "Noise floor: not measured" in " ".join(lines)


def test_two_attempts_at_one_case_are_told_apart(tmp_path: Path) -> None:
    lines = text(judged(tmp_path, BASE, BASE), judged(tmp_path, BASE, BASE))
    assert row(lines, "baseline a0001")
    assert row(lines, "baseline a0002")[-4:] == ["rollout", "0", "0", "0"]


def test_experiments_judged_by_other_contracts_are_other_tables(tmp_path: Path) -> None:
    lines = text(judged(tmp_path, BASE, BASE), judged(tmp_path, BASE, BASE, source="bitwise"))
    assert [line for line in lines if "threshold" in line] == [
        "test (test): contract ws1 version 1, threshold 1e-05 nats (float32)",
        "test (test): contract bitwise version 1, threshold 0 nats (float32)",
    ]


def test_no_line_is_longer_than_120_columns(tmp_path: Path) -> None:
    tokens = 123_456
    wide = np.full(tokens, -1, np.float32)
    other = (wide - np.linspace(1e-5, 9.87e-5, tokens)).astype(np.float32)
    attempts = [
        judged(tmp_path, wide, wide),
        judged(tmp_path, wide, other, change=("logp.backend", "xd.reference_logp")),
        judged(tmp_path, wide, other, change=("training.attention_backend", "flash_attention_2")),
        refused(tmp_path, ("training.attention_backend", "flash_attention_3"), "word " * 60),
    ]
    rows = [table.read(attempt) for attempt in attempts]
    for row in rows[1:3]:
        row.verdict = "ZERO_ACTIVE_TOKENS"
    lines = [line for each in table.tables(rows) for line in table_text.lines(each)]
    assert max(map(len, lines)) <= table_text.WIDTH
    assert any("ZERO_ACTIVE_TOKENS" in line and "123456/123456" in line for line in lines)
    joined = "".join(line.strip() for line in lines)
    assert "flash_attention_2" in joined


def test_colour_goes_around_padded_cells(tmp_path: Path) -> None:
    (made,) = table.tables([table.read(judged(tmp_path, BASE, BASE))])
    plain = table_text.lines(made)
    painted = table_text.lines(made, lambda cell, what: f"<{what}>{cell}</>")
    (line,) = [line for line in painted if "<PASS>" in line]
    assert line.replace("<PASS>", "").replace("<->", "").replace("</>", "").rstrip() in plain


def test_a_baseline_of_other_values_is_not_the_one_a_case_changes(tmp_path: Path) -> None:
    """Two plans of one experiment, whose baselines differ: a case has an effect against its own."""
    other = judged(tmp_path, BASE + np.float32(1), BASE, dtype="float16")
    case = judged(tmp_path, BASE, BASE, change=("batch.size", 1))
    rows = [table.read(each) for each in (other, case)]
    rows[0].requested["contract"] = rows[1].requested["contract"]  # as where both dtypes have one ruler
    lines = [line for each in table.tables(rows) for line in table_text.lines(each)]
    assert row(lines, "batch.size=1")[-4:] == ["-"] * 4
    assert "the baseline was scored with another rollout.dtype" in " ".join(lines)
    own = judged(tmp_path, BASE, BASE)
    lines = [line for each in table.tables([*rows, table.read(own)]) for line in table_text.lines(each)]
    assert row(lines, "batch.size=1")[-4:] == ["rollout", "0", "0", "0"]
