"""xd-score as a black box: the grammar of the tools, and what it will not add to an attempt."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from materialize_fixtures import signed
from scoring_fixtures import Bench, frozen

from libxd import canon, environment, schema, sequences
from libxd.errors import Status


@pytest.fixture
def bench(xd, tmp_path):
    return Bench(xd, tmp_path)


def snapshot(bench, path):
    place = bench.place / path
    return {name: (place / name).read_bytes() for name in sorted(os.listdir(place))}


def test_describe_prints_what_the_interpreter_computes_with(xd):
    ran = xd("xd-score", "--describe")
    assert (ran.status, ran.err) == (0, "")
    value = json.loads(ran.out)
    schema.validate("environment", value, "stdout")
    assert ran.out == canon.dumps(value).decode() + "\n"
    assert value == environment.describe()


def test_describe_of_another_interpreter(xd):
    assert xd("xd-score", "--describe", "--python", sys.executable).out == xd("xd-score", "--describe").out
    ran = xd("xd-score", "--describe", "--python", "/no/such/python")
    assert (ran.status, ran.out, len(ran.err.splitlines())) == (Status.MISSING, "", 1)


@pytest.mark.parametrize(
    "arguments",
    [[], ["--side", "both"], ["--describe", "--side", "rollout"], ["--describe", "x"], ["--threshold", "1"]],
)
def test_usage(xd, arguments):
    ran = xd("xd-score", *arguments)
    assert (ran.status, ran.out, len(ran.err.splitlines())) == (Status.USAGE, "", 1)


def test_both_sides_in_a_pipe(bench, root):
    paths = bench.materialize(bench.case(), bench.case(change=("batch.size", 2)))
    tool = root / "tools" / "xd-score"
    ran = subprocess.run(
        ["sh", "-c", f"{tool} --side rollout | {tool} --side training"], input="\n".join(paths) + "\n", text=True,
        capture_output=True, cwd=bench.place, timeout=120, check=True,
        env={**os.environ, **bench.environment, "XD_PYTHON": sys.executable},
    )  # fmt: skip
    assert (ran.stdout.splitlines(), ran.stderr) == (paths, "")
    for path in paths:
        attempt = bench.open(path)
        assert attempt.readback("rollout")["observed"]["scoring_mode"] == "decode"
        assert attempt.readback("training")["observed"]["scoring_mode"] == "teacher_forced"


def test_operands_or_stdin_and_blank_lines(bench):
    first, second = bench.materialize(bench.case(), bench.case(change=("batch.size", 2)))
    assert bench.score(first).out == f"{first}\n"
    assert bench.score(stdin=f"{first}\n\n{second}\n").out == f"{first}\n{second}\n"


def test_a_second_run_scores_nothing_and_changes_nothing(bench):
    (path,) = bench.attempts("plain")
    assert bench.score(path).status == 0
    before = snapshot(bench, path)
    log = bench.place / "log"
    again = bench.score(path, SCRIPTED_LOG=str(log))
    assert (again.status, again.out, again.err) == (0, f"{path}\n", "")
    assert not log.exists()
    assert snapshot(bench, path) == before


def test_two_attempts_of_one_case_get_equal_scores(bench):
    row = bench.case()
    first, second = bench.materialize(row), bench.materialize(row)
    assert first != second
    assert bench.score(*first, *second).status == 0
    name = "score_rollout.safetensors"
    assert snapshot(bench, first[0])[name] == snapshot(bench, second[0])[name]


def test_the_order_of_submission_reaches_the_engine_and_not_the_file(bench):
    row = bench.case()
    rotated = signed({**bench.case(repeat=1), "submission": "rotated"})
    first, second = bench.materialize(row, rotated)
    assert bench.score(first, second).status == 0
    name = "score_rollout.safetensors"
    assert snapshot(bench, first)[name][-12:] == snapshot(bench, second)[name][-12:]
    assert bench.open(second).readback("rollout")["repeat"] == 1


# -- what a crash may leave


@pytest.mark.parametrize("lost", ["readback_rollout.json", "score_rollout.safetensors"])
def test_an_attempt_with_one_file_of_two_is_scored_again_to_the_same_bytes(bench, lost):
    other, path = bench.materialize(bench.case(), bench.case(change=("batch.size", 2)))
    assert bench.score(other, path).status == 0  # so that its counters are those of a second case
    before = snapshot(bench, path)
    (bench.place / path / lost).unlink()
    ran = bench.score(path)
    assert (ran.status, ran.out, ran.err) == (0, f"{path}\n", "")
    after = snapshot(bench, path)
    for files in (before, after):
        files["readback_rollout.json"] = {**json.loads(files["readback_rollout.json"]), "reuse": None}
    assert after == before


def test_scores_that_come_out_otherwise_are_refused_and_the_first_are_kept(bench):
    (path,) = bench.attempts("wobbles")
    assert bench.score(path, WOBBLE="1").status == 0
    before = snapshot(bench, path)
    (bench.place / path / "readback_rollout.json").unlink()
    ran = bench.score(path, WOBBLE="2")
    assert (ran.status, ran.out, len(ran.err.splitlines())) == (Status.CONFLICT, "", 1)
    assert snapshot(bench, path)["score_rollout.safetensors"] == before["score_rollout.safetensors"]
    assert bench.score(path, WOBBLE="1").status == 0  # negative control


def test_a_refused_attempt_stays_refused_without_an_engine(bench):
    (path,) = bench.attempts("ignores:rollout.dtype")
    assert bench.score(path).status == Status.REFUSED
    before, log = snapshot(bench, path), bench.place / "log"
    ran = bench.score(path, SCRIPTED_LOG=str(log))
    assert (ran.status, ran.out, log.exists()) == (Status.REFUSED, "", False)
    assert "refused at read-back" in ran.err
    assert snapshot(bench, path) == before


def test_non_finite_scores_are_published_for_the_verdict(bench):
    (path,) = bench.attempts("infinite")
    assert bench.score(path).status == 0


# -- what it will not do


def refused(bench, path, status, words, side="rollout", **variables):
    """One line, the status, nothing passed on, nothing written; returns that line."""
    before = snapshot(bench, path)
    ran = bench.score(path, side=side, **variables)
    assert (ran.status, ran.out) == (status, ""), ran.err
    assert len(ran.err.splitlines()) == 1
    assert words in ran.err
    assert snapshot(bench, path) == before
    return ran.err


def test_a_sealed_attempt_does_not_grow(bench):
    (path,) = bench.attempts("plain")
    assert bench.score(path).status == 0
    (bench.place / path / "COMPLETE").write_text("{}\n")
    assert bench.score(path).out == f"{path}\n"  # nothing would be added
    log = bench.place / "log"
    refused(bench, path, Status.CONFLICT, "sealed", side="training", SCRIPTED_LOG=str(log))
    assert not log.exists()  # it is known before anything is scored


def test_an_attempt_refused_at_materialising(bench):
    row = bench.case()
    row = signed({**row, "locations": dict.fromkeys(row["locations"]), "executable": False,
                  "missing": ["/identity/sequences: not at hand"]})  # fmt: skip
    row["identity"]["sequences"] |= dict.fromkeys(set(row["identity"]["sequences"]) - {"digest", "packing"})
    text = canon.dumps(row).decode() + "\n"
    ran = bench.xd("xd-materialize", "--runs", "runs", "--runtime", "scripted", stdin=text, env=bench.environment)
    assert ran.status == Status.REFUSED
    (path,) = (str(p.relative_to(bench.place)) for p in bench.place.glob("runs/test/cases/*/a0001"))
    refused(bench, path, Status.REFUSED, "not at hand")


def test_changed_sequences(bench):
    (path,) = bench.attempts("plain")
    bench.sequences.unlink()
    refused(bench, path, Status.MISSING, "no such file")
    sequences.write(bench.sequences, frozen(first_id=6))
    assert "#/token_ids" in refused(bench, path, Status.INVALID, "the sequences have changed since planning")


def test_another_environment(bench):
    (path,) = bench.attempts("plain")
    threads = str(int(os.environ.get("OMP_NUM_THREADS", "0")) + 1)
    said = refused(bench, path, Status.REFUSED, "not the one it was materialised for", OMP_NUM_THREADS=threads)
    assert "materialized.json#/sides/rollout/environment/threads/OMP_NUM_THREADS" in said
    assert bench.score(path).status == 0  # the attempt is still good under its own


def test_a_stale_registry(bench):
    (path,) = bench.attempts("plain")
    installed = bench.entries.read_text()
    bench.entries.write_text(installed.partition("[xd.operators]")[0])
    refused(bench, path, Status.RETRY, "stale registry")  # not 69: no table would show a case that nobody scored
    bench.entries.write_text(installed)
    assert bench.score(path).status == 0


def test_an_edited_materialisation(bench):
    (path,) = bench.attempts("plain")
    file = bench.place / path / "materialized.json"
    value = json.loads(file.read_text())
    value["sides"]["rollout"]["engine"]["device"] = "cuda"
    file.write_bytes(canon.dumps(value) + b"\n")
    refused(bench, path, Status.INVALID, "execution key")


@pytest.mark.parametrize("name", ["requested.json", "identity.json", "materialized.json"])
def test_a_missing_or_broken_file(bench, name):
    (path,) = bench.attempts("plain")
    file = bench.place / path / name
    whole = file.read_text()
    file.write_text(whole[: len(whole) // 2])
    refused(bench, path, Status.INVALID, "not JSON")
    file.unlink()
    refused(bench, path, Status.MISSING, "no such file")


def test_files_of_another_case(bench):
    first, second = bench.materialize(bench.case(), bench.case(change=("batch.size", 2)))
    shutil.copy(bench.place / first / "identity.json", bench.place / second / "identity.json")
    refused(bench, second, Status.INVALID, "another case")


def test_an_identity_that_was_not_requested(bench):
    (path,) = bench.attempts("plain")
    file = bench.place / path / "identity.json"
    value = {**json.loads(file.read_text()), "rollout_mode": "prefill"}
    file.write_bytes(canon.dumps(value) + b"\n")
    refused(bench, path, Status.INVALID, "not the identity that was requested")


def test_what_is_no_attempt(bench):
    (bench.place / "runs").mkdir()
    for path, status in (("runs", Status.INVALID), (f"runs/c-{'0' * 16}/a0001", Status.MISSING)):
        ran = bench.score(path)
        assert (ran.status, ran.out, len(ran.err.splitlines())) == (status, "", 1)


def test_a_place_that_is_full(bench, root):
    """No byte can be written to any file: nothing half stays, and the attempt is good afterwards."""
    (path,) = bench.attempts("plain")
    before = snapshot(bench, path)
    ran = subprocess.run(
        ["sh", "-c", f"ulimit -f 0; exec {root / 'tools' / 'xd-score'} --side rollout {path}"], text=True,
        capture_output=True, cwd=bench.place, timeout=120, check=False,
        env={**os.environ, **bench.environment, "XD_PYTHON": sys.executable},
    )  # fmt: skip
    assert (ran.returncode, ran.stdout, len(ran.stderr.splitlines())) == (Status.CONFLICT, "", 1)
    assert "cannot be written" in ran.stderr
    assert snapshot(bench, path) == before
    assert bench.score(path).status == 0


def test_two_scorers_of_one_attempt_agree(bench, root):
    (path,) = bench.attempts("plain")
    processes = [
        subprocess.Popen(
            [root / "tools" / "xd-score", "--side", "rollout", path], cwd=bench.place, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **bench.environment, "XD_PYTHON": sys.executable},
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in processes:
        assert (*process.communicate(timeout=120), process.returncode) == (f"{path}\n", "", 0)
    assert bench.files(path) == {"readback_rollout.json", "score_rollout.safetensors"}
