"""xd-compare as its users meet it: operands and stdin, stdout alone for results, exit statuses."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from comparison_fixtures import floats, refused, rewrite_json, rewrite_score, score_path, scored, snapshot

from libxd import schema

BASE = floats(-1, -2, -3, -4)


def test_paths_in_paths_out_and_drift_is_no_error(xd, tmp_path: Path) -> None:
    same = scored(tmp_path, BASE, BASE)
    other = scored(tmp_path, BASE, BASE + np.float32(1))
    ran = xd("xd-compare", stdin=f"{same}\n\n{other}\n")
    assert (ran.status, ran.out, ran.err) == (0, f"{same}\n{other}\n", "")
    assert same.comparison()["status"] == "PASS"
    assert other.comparison()["status"] == "MISMATCH"
    assert xd("xd-compare", same, other).out == ran.out


def test_exit_code_asks_for_pass(xd, tmp_path: Path) -> None:
    same, other = scored(tmp_path, BASE, BASE), scored(tmp_path, BASE, BASE + np.float32(1))
    assert xd("xd-compare", "--exit-code", same).status == 0
    ran = xd("xd-compare", "--exit-code", other, same)
    assert (ran.status, ran.out) == (1, f"{other}\n{same}\n")
    assert xd("xd-compare", "--exit-code", tmp_path / other.case_id / "a0009").status == 66


def test_json_prints_the_comparison(xd, tmp_path: Path) -> None:
    attempt = scored(tmp_path, BASE, BASE)
    ran = xd("xd-compare", "--json", attempt)
    assert ran.out.encode() == attempt.file("comparison.json").read_bytes()


def test_a_bad_attempt_is_reported_and_not_passed_on(xd, tmp_path: Path) -> None:
    good, bad = scored(tmp_path, BASE, BASE), scored(tmp_path, BASE, BASE)
    score_path(bad, "rollout").write_bytes(b"short")
    before = snapshot(bad)
    ran = xd("xd-compare", bad, tmp_path / "nowhere", good)
    assert (ran.status, ran.out) == (65, f"{good}\n")
    assert len(ran.err.splitlines()) == 2
    assert ran.err.startswith(f"xd-compare: {score_path(bad, 'rollout')}: ")
    assert snapshot(bad) == before


def test_a_refused_attempt_is_69(xd, tmp_path: Path) -> None:
    attempt = refused(tmp_path, ("rollout.dtype", "float16"), "no half precision here")
    ran = xd("xd-compare", attempt)
    assert (ran.status, ran.out) == (69, "")
    assert "no half precision here" in ran.err


def test_a_missing_score_is_66_and_log_json_says_so(xd, tmp_path: Path) -> None:
    attempt = scored(tmp_path, BASE, BASE)
    score_path(attempt, "training").unlink()
    ran = xd("xd-compare", "--log-json", attempt)
    assert ran.status == 66
    (record,) = map(json.loads, ran.err.splitlines())
    assert (record["code"], record["where"]) == ("missing", str(score_path(attempt, "training")))


def test_an_output_that_differs_is_73_and_kept(xd, tmp_path: Path) -> None:
    attempt = scored(tmp_path, BASE, BASE)
    assert xd("xd-compare", attempt).status == 0
    rewrite_score(attempt, "rollout", logprobs=BASE + np.float32(1))
    before = snapshot(attempt)
    assert xd("xd-compare", attempt).status == 73
    assert snapshot(attempt) == before


def test_a_place_without_room_leaves_nothing_half_written(root: Path, tmp_path: Path) -> None:
    attempt = scored(tmp_path, BASE, BASE)
    before = snapshot(attempt)
    command = f"ulimit -f 1; exec {root / 'tools' / 'xd-compare'} {attempt}"  # files of at most 1024 bytes
    ran = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env={**os.environ, "XD_PYTHON": sys.executable}
    )
    assert (ran.returncode, ran.stdout, len(ran.stderr.splitlines())) == (73, "", 1)
    assert "cannot be written" in ran.stderr
    assert snapshot(attempt) == before


@pytest.mark.parametrize("place", ["a1", "c-0123/a0001"])
def test_what_is_no_attempt_is_65_and_what_is_not_there_66(xd, tmp_path: Path, place: str) -> None:
    assert xd("xd-compare", tmp_path / place).status == 66
    (tmp_path / place).mkdir(parents=True)
    for there in (place, f"{place}/.."):
        ran = xd("xd-compare", tmp_path / there)
        assert ran.status == 65 and "not an attempt directory" in ran.err


def test_an_empty_path_is_no_attempt(xd, tmp_path: Path) -> None:
    for words in (("",), ("--against", "", scored(tmp_path, BASE, BASE))):
        ran = xd("xd-compare", *words)
        assert (ran.status, ran.out) == (2, "")
        assert "an empty path is no attempt" in ran.err


def test_the_table_marks_what_was_taken_as_declared(xd, tmp_path: Path) -> None:
    """Without strict what was not shown counts as declared, and the row says so."""
    attempt = scored(tmp_path, BASE, BASE, strict=False)
    observed = attempt.readback("training")["observed"] | {"positions": None, "weights_after": None}
    rewrite_score(attempt, "training", metadata={"observed": observed})
    readback = attempt.readback("training")
    knobs = [knob | {"status": "unobservable", "actual": None} if knob["knob"] == "batch.size" else knob
             for knob in readback["knobs"]]  # fmt: skip
    rewrite_json(attempt, "readback_training.json", observed=observed, knobs=knobs)
    assert xd("xd-compare", attempt).status == 0
    out = xd("xd-compare", "--table", attempt).out
    assert re.search(r"^baseline +PASS \[1\]", out, re.M)
    assert "[1] training: as declared, for it was not shown: positions, weights_after, batch.size" in out


def test_against_prints_the_effect_and_stores_nothing(xd, tmp_path: Path) -> None:
    base = scored(tmp_path, BASE, BASE)
    other = scored(tmp_path, BASE + floats(0, 0, 0, 0.5), BASE, change=("rollout.dtype", "bfloat16"))
    before = snapshot(other)
    ran = xd("xd-compare", "--against", base, other, base)
    assert ran.status == 0
    first, second = (schema.validate("effect", json.loads(line), "line") for line in ran.out.splitlines())
    assert (first["attempt"], first["against"]) == (str(other), str(base))
    assert [change["path"] for change in first["intervention"]] == ["rollout.dtype"]
    assert (second["intervention"], first["case_id"]) == ([], other.case_id)
    assert (first["rollout"]["max_absolute"], first["training"]["max_absolute"]) == (0.5, 0)
    assert second["rollout"]["bitwise_equal_share"] == 1
    assert snapshot(other) == before


def test_against_other_tokens_is_65(xd, tmp_path: Path) -> None:
    ran = xd("xd-compare", "--against", scored(tmp_path, BASE, BASE), scored(tmp_path, BASE[:2], BASE[:2]))
    assert (ran.status, ran.out) == (65, "")
    assert "scored other tokens" in ran.err


def test_against_a_refused_attempt_is_69_in_either_place(xd, tmp_path: Path) -> None:
    base = scored(tmp_path, BASE, BASE)
    other = refused(tmp_path, ("training.attention_backend", "flash_attention_2"), "needs a GPU")
    for words in ((base, other), (other, base)):
        ran = xd("xd-compare", "--against", *words)
        assert (ran.status, ran.out, len(ran.err.splitlines())) == (69, "", 1)
        assert "was refused, there is nothing to set beside another" in ran.err
        assert "needs a GPU" in ran.err


def test_table_prints_rows_and_exit_code_asks_all(xd, tmp_path: Path) -> None:
    base, other = scored(tmp_path, BASE, BASE), scored(tmp_path, BASE, BASE, change=("batch.size", 1))
    assert xd("xd-compare", base, other).status == 0
    ran = xd("xd-compare", "--table", "--exit-code", stdin=f"{base}\n{other}\n")
    assert ran.status == 0
    assert "batch.size=1" in ran.out
    assert "\x1b" not in ran.out
    left_off = scored(tmp_path, BASE, BASE, change=("batch.size", 2))
    ran = xd("xd-compare", "--table", "--exit-code", base, left_off)
    assert ran.status == 1
    assert "incomplete" in ran.out
    assert xd("xd-compare", "--table", base, left_off).status == 0
    assert not left_off.has("comparison.json"), "the table judges nothing"


@pytest.mark.parametrize("options", [["--table"], [], ["--json"]])
def test_nothing_is_not_all_pass(xd, options: list[str]) -> None:
    ran = xd("xd-compare", *options, "--exit-code")
    assert (ran.status, ran.out) == (1, "")
    assert xd("xd-compare", *options).status == 0


@pytest.mark.parametrize("options", [["--table"], [], ["--json"]])
def test_what_was_refused_is_no_pass(xd, tmp_path: Path, options: list[str]) -> None:
    same, other = scored(tmp_path, BASE, BASE), scored(tmp_path, BASE, BASE + np.float32(1), change=("batch.size", 1))
    assert xd("xd-compare", same, other).status == 0
    no = refused(tmp_path, ("rollout.dtype", "float16"), "no half precision here")
    for attempts in ([no], [no, same], [other, no], [no, other]):
        assert xd("xd-compare", *options, "--exit-code", *attempts).status == 1
    assert xd("xd-compare", *options, "--exit-code", same).status == 0


def test_a_plan_says_which_rows_a_table_has(xd, tmp_path: Path) -> None:
    base, other = scored(tmp_path, BASE, BASE), scored(tmp_path, BASE, BASE, change=("batch.size", 1))
    gone = scored(tmp_path / "elsewhere", BASE, BASE, change=("batch.size", 2))
    assert xd("xd-compare", base, other).status == 0
    plan = tmp_path / "plan.jsonl"
    plan.write_bytes(b"".join(each.file("requested.json").read_bytes() for each in (other, base)))
    ran = xd("xd-compare", "--table", "--plan", plan, "--exit-code", base, other)
    assert ran.status == 0
    assert ran.out.index("batch.size=1") < ran.out.index("baseline  "), "in the plan's order"
    plan.write_bytes(plan.read_bytes() + gone.file("requested.json").read_bytes())
    ran = xd("xd-compare", "--table", "--plan", plan, "--exit-code", base, other)
    assert ran.status == 1
    assert any(line.split()[:2] == ["batch.size=2", "missing"] for line in ran.out.splitlines())
    ran = xd("xd-compare", "--table", "--plan", plan, "--exit-code")
    assert (ran.status, ran.out.count("missing [1]")) == (1, 3)
    plan.write_bytes(plan.read_bytes() + b'"\xff"\n')
    assert xd("xd-compare", "--table", "--plan", plan, base, other).status == 65
    assert xd("xd-compare", "--table", "--plan", tmp_path / "none", base, other).status == 66
    assert xd("xd-compare", "--plan", plan, base).status == 2


@pytest.mark.parametrize("no_color", [False, True])
def test_colour_on_a_terminal_alone_and_never_with_no_color(root: Path, tmp_path: Path, xd, no_color: bool) -> None:
    attempt = scored(tmp_path, BASE, BASE)
    xd("xd-compare", attempt)
    master, slave = pty.openpty()
    environment = {**os.environ, "XD_PYTHON": sys.executable}
    environment.pop("NO_COLOR", None)
    if no_color:
        environment["NO_COLOR"] = "1"
    command = [root / "tools" / "xd-compare", "--table", str(attempt)]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=slave, env=environment, check=True)
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 1 << 16):
            shown += part
    except OSError:  # EIO: the other end is closed, all was read
        pass
    os.close(master)
    assert b"PASS" in shown
    assert (b"\x1b[32mPASS" in shown) is not no_color


@pytest.mark.parametrize(
    "options", [["--json", "--table"], ["--against", "x", "--table"], ["--against", "x", "--exit-code"]]
)
def test_questions_that_exclude_one_another_are_usage(xd, options: list[str]) -> None:
    ran = xd("xd-compare", *options, "attempt")
    assert ran.status == 2
    assert len(ran.err.splitlines()) == 1


LARGEST = np.finfo(np.float32).max


@pytest.mark.parametrize("pair", [(LARGEST, -LARGEST), (LARGEST, 1e38), (-1e38, -LARGEST), (1e-45, -1e-45), (-800, -1)])
def test_numbers_at_the_ends_of_float32_are_judged_without_a_warning(xd, tmp_path: Path, pair) -> None:
    """Both signs of the difference in one sequence, so that sums meet opposite infinities."""
    one, other = floats(-1, *pair, -2), floats(-1, *reversed(pair), -2)
    attempt, baseline = scored(tmp_path, one, other), scored(tmp_path, floats(-1, -1, -1, -2), floats(-1, -1, -1, -2))
    strict = {"PYTHONWARNINGS": "error"}
    for words in ((), ("--against", baseline), ("--table",)):
        ran = xd("xd-compare", *words, baseline, attempt, env=strict)
        assert (ran.status, ran.err) == (0, ""), words
    assert attempt.comparison()["status"] == ("PASS" if pair[0] == 1e-45 else "MISMATCH")
