"""xd-materialize as a black box, on a runtime that is installed beside xd and known by its entry point alone."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from materialize_fixtures import SEQUENCES, FakeRuntime, row, signed

from libxd import canon, materialize, publish, schema, sequences
from libxd.cmd import materialize as command
from libxd.errors import XdError
from libxd.rundir import SIDES, Attempt
from libxd.runtimes.protocol import SidePlan

HERE = Path(__file__).resolve().parent


class PickyRuntime(FakeRuntime):
    """Another runtime: rollout alone, and it cannot cache prefixes."""

    def __init__(self) -> None:
        refused = {"status": "unsupported", "materialized": None, "evidence": "it has no prefix cache"}
        super().__init__(
            "picky", sides=frozenset({"rollout"}), answers={"rollout.enable_prefix_caching": refused}
        )  # fmt: skip


class RefusingRuntime(FakeRuntime):
    """One that serves no row here."""

    def __init__(self) -> None:
        super().__init__("refusing")

    def materialize(self, side, row, environment, allow_fallback):
        return SidePlan([], {}, {}, {}, {}, ["not here"])


class SmokeRuntime(FakeRuntime):
    """One that registers smoke operators."""

    def __init__(self) -> None:
        super().__init__("smoky", smoke=True)


@pytest.fixture
def installed(tmp_path):
    """PYTHONPATH under which the runtimes above are installed."""
    metadata = tmp_path / "site" / "xd_test_runtimes-1.0.dist-info"
    metadata.mkdir(parents=True)
    sequences.write(tmp_path / "sequences.safetensors", SEQUENCES)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: xd-test-runtimes\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[xd.runtimes]\ntest = materialize_fixtures:FakeRuntime\npicky = test_cmd_materialize:PickyRuntime\n"
        "smoky = test_cmd_materialize:SmokeRuntime\nrefusing = test_cmd_materialize:RefusingRuntime\n"
        "broken = no_such_module:RUNTIME\n"
    )
    return {"PYTHONPATH": f"{metadata.parent}{os.pathsep}{HERE}"}


@pytest.fixture
def run(xd, installed):
    """`run(rows, *options)`: xd-materialize over rows on stdin."""

    def call(rows, *options, **environment):
        text = "".join(each if isinstance(each, str) else canon.dumps(each).decode() + "\n" for each in rows)
        return xd("xd-materialize", "--runs", "runs", *options, stdin=text, env={**installed, **environment})

    return call


def attempts(tmp_path):
    return sorted(path for path in tmp_path.glob("runs/test/cases/*/*"))


def test_a_row_becomes_an_attempt(run, tmp_path):
    request = row()
    ran = run([request], "--runtime", "test")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == f"runs/test/cases/{request['case_id']}/a0001\n"
    attempt = Attempt.open(tmp_path / ran.out.strip())
    assert sorted(os.listdir(attempt.path)) == ["identity.json", "materialized.json", "requested.json"]
    assert attempt.requested() == request
    value = attempt.materialized()
    assert (value["status"], value["sides"]["rollout"]["runtime"]) == ("ready", "test")
    assert materialize.execution_key(value) == value["execution_key"]
    weights = attempt.identity()["weights"]
    assert weights["rollout"]["dtype"] == weights["training"]["dtype"] == "float32"
    assert sorted(weights["rollout"]["parameters"]) == ["embedding", "head"]


def test_the_expected_weights_follow_each_sides_dtype(run, tmp_path):
    ran = run([row(("rollout.dtype", "bfloat16"))], "--runtime", "test")
    weights = Attempt.open(tmp_path / ran.out.strip()).identity()["weights"]
    assert [weights[side]["dtype"] for side in ("rollout", "training")] == ["bfloat16", "float32"]
    assert weights["rollout"]["digest"] != weights["training"]["digest"]


def test_files_of_rows_are_operands(xd, installed, tmp_path):
    (tmp_path / "plan.jsonl").write_bytes(canon.dumps(row()) + b"\n\n" + canon.dumps(row(("batch.size", 1))) + b"\n")
    ran = xd("xd-materialize", "--runs", "runs", "--runtime", "test", "plan.jsonl", env=installed)
    assert (ran.status, len(ran.out.splitlines())) == (0, 2)


def test_each_time_is_a_new_attempt(run, tmp_path):
    first, second = (run([row()], "--runtime", "test").out.strip() for _ in range(2))
    assert (Path(first).name, Path(second).name) == ("a0001", "a0002")
    for name in ("requested.json", "identity.json", "materialized.json"):
        assert (tmp_path / first / name).read_bytes() == (tmp_path / second / name).read_bytes()


def test_nothing_of_this_machine_is_in_the_files(run, tmp_path):
    ran = run([row()], "--runtime", "test")
    text = (tmp_path / ran.out.strip() / "materialized.json").read_text()
    for secret in (str(tmp_path), sys.executable, os.getcwd()):
        assert secret not in text


def test_a_refused_row_is_kept_reported_and_not_passed_on(run, tmp_path):
    refused = row(("rollout.enable_prefix_caching", True))
    ran = run([refused, row()], "--runtime-rollout", "picky", "--runtime-training", "test")
    assert ran.status == 69
    (line,) = [text for text in ran.err.splitlines() if refused["case_id"] in text]
    assert "refused: rollout.enable_prefix_caching: it has no prefix cache" in line
    # the other row is refused alike: the runtime answers so whatever the value
    assert ran.out == ""
    for path in attempts(tmp_path):
        value = Attempt.open(path).materialized()
        assert value["status"] == "refused"
        assert value["refusals"][0]["reason"] == "it has no prefix cache"


def test_the_others_go_on(run, tmp_path):
    refused, good = row(("logp.backend", "acme.logp")), row()
    ran = run([refused, "{broken\n", good], "--runtime", "test")
    assert ran.out == f"runs/test/cases/{good['case_id']}/a0001\n"
    assert ran.status == 65  # a broken row outweighs a refused one
    lines = ran.err.splitlines()
    assert len(lines) == 2
    assert "acme.logp" in lines[0]
    assert lines[1].startswith("xd-materialize: stdin:2: not JSON")
    assert len(attempts(tmp_path)) == 2


def test_a_row_that_was_not_at_hand_is_refused(run):
    ran = run([row(missing=("/identity/sequences: no such file",))], "--runtime", "test")
    assert (ran.status, ran.out) == (69, "")
    assert "/identity/sequences: no such file" in ran.err


@pytest.mark.parametrize("count", ["num_sequences", "num_tokens", "num_active"])
def test_counts_are_those_of_the_file(run, tmp_path, count):
    """No digest covers them, and a scorer would be blamed for what they say."""
    request = row()
    request["identity"]["sequences"][count] += 1
    ran = run([signed(request)], "--runtime", "test")
    assert (ran.status, ran.out) == (65, "")
    assert f"sequences.safetensors#/{count}: the sequences have changed since planning" in ran.err
    assert attempts(tmp_path) == []


def test_a_file_that_is_not_there_says_from_where_it_was_looked_for(run, tmp_path):
    (tmp_path / "sequences.safetensors").unlink()
    ran = run([row()], "--runtime", "test")
    assert (ran.status, ran.out) == (66, "")
    assert "relative to where xd-plan ran" in ran.err and str(tmp_path) in ran.err


@pytest.mark.parametrize("runs", ["", "ru\nns", "runs\r"])
def test_a_run_directory_that_no_line_can_name_is_refused_before_anything_is_made(xd, installed, tmp_path, runs):
    (tmp_path / "one.jsonl").write_bytes(canon.dumps(row()) + b"\n")
    before = sorted(os.listdir(tmp_path))
    for tool in ("xd-materialize", "xd-resume"):
        ran = xd(tool, "--runs", runs, "--runtime", "test", "one.jsonl", env=installed)
        assert (ran.status, ran.out, len(ran.err.splitlines())) == (2, "", 1)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_write_that_fails_leaves_no_empty_attempt(tmp_path, monkeypatch):
    def full(path, data):
        raise publish.cannot_write(path, OSError(28, "No space left on device"))

    monkeypatch.chdir(tmp_path)
    sequences.write("sequences.safetensors", SEQUENCES)
    monkeypatch.setattr(publish, "publish", full)
    sides = {side: {"runtime": "cpu-smoke", "knobs": []} for side in SIDES}
    monkeypatch.setattr("libxd.identity._synthetic_parameters", lambda *_: None)
    monkeypatch.setattr("libxd.identity._synthetic_model", lambda *_: {})
    with pytest.raises(XdError, match="No space left"):
        command._write(Path("runs"), row(), {"sides": sides})
    assert not list(tmp_path.glob("runs/test/cases/*/*"))


def test_a_side_that_is_refused_as_a_whole_gives_its_reason_alone(run, tmp_path):
    ran = run([row()], "--runtime", "refusing")
    assert ran.status == 69
    (path,) = attempts(tmp_path)
    reasons = Attempt.open(path).materialized()["refusals"]
    assert [reason["reason"] for reason in reasons] == ["not here", "not here"]


def edited(**changes):
    return {**row(), **changes}


@pytest.mark.parametrize(
    ("bad", "pointer"),
    [
        (edited(values={**row()["values"], "batch.size": 2}), "#/case_digest"),
        (edited(strict_fallback="yes"), "#/strict_fallback"),
        (edited(threshold=0.1), ""),
        (edited(experiment_id="../elsewhere"), "#/experiment_id"),
    ],
)
def test_an_edited_row_is_refused_and_leaves_nothing(run, tmp_path, bad, pointer):
    ran = run([bad], "--runtime", "test")
    assert (ran.status, ran.out) == (65, "")
    assert f"stdin:1{pointer}" in ran.err
    assert not (tmp_path / "runs").exists()


def test_smoke_operators_need_both_permissions(run):
    request = row(("logp.backend", "smoke_only.logp_reference"))
    ran = run([request], "--runtime", "smoky")
    assert (ran.status, ran.out) == (69, "")
    assert "--allow-smoke-operators" in ran.err
    ran = run([request], "--runtime", "test", "--allow-smoke-operators")
    assert (ran.status, ran.out) == (69, "")
    assert "registers no smoke operators" in ran.err
    ran = run([request], "--runtime", "smoky", "--allow-smoke-operators")
    assert (ran.status, ran.err) == (0, "")


def test_strict_is_recorded(run, tmp_path):
    ran = [run([row(strict=False)], "--runtime", "test", *flag) for flag in ((), ("--strict",))]
    assert [Attempt.open(tmp_path / each.out.strip()).materialized()["strict"] for each in ran] == [False, True]


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ((), 2, "no runtime for the rollout side"),
        (("--runtime-rollout", "test"), 2, "no runtime for the training side"),
        (("--runtime", "nonesuch"), 2, "expected broken or cpu-smoke or hf"),
        (("--runtime", "picky"), 2, "has no training side"),
        (("--runtime", "broken"), 70, "cannot be loaded"),
        (("--runtime", "test", "--python", "/no/such/python"), 66, "/no/such/python: no such interpreter"),
    ],
)
def test_a_policy_that_cannot_be_is_one_line(run, tmp_path, options, status, said):
    ran = run([row()], *options)
    assert (ran.status, ran.out, len(ran.err.splitlines())) == (status, "", 1)
    assert said in ran.err
    assert not (tmp_path / "runs").exists()


def python_with(path: Path, line: str) -> Path:
    path.write_text(f'#!/bin/sh\n{line}\nexec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path


def test_each_sides_interpreter_is_asked(run, tmp_path):
    other = python_with(tmp_path / "other", "export MKL_CBWR=COMPATIBLE")
    ran = run([row()], "--runtime", "test", "--python-rollout", other)
    sides = Attempt.open(tmp_path / ran.out.strip()).materialized()["sides"]
    assert sides["rollout"]["environment"]["variables"]["MKL_CBWR"] == "COMPATIBLE"
    assert "MKL_CBWR" not in sides["training"]["environment"]["variables"]


def test_a_runtimes_variable_names_its_interpreter(run, tmp_path):
    other = python_with(tmp_path / "other", "export MKL_CBWR=COMPATIBLE")
    ran = run([row()], "--runtime", "test", XD_PYTHON_TEST=str(other))
    sides = Attempt.open(tmp_path / ran.out.strip()).materialized()["sides"]
    assert {sides[side]["environment"]["variables"].get("MKL_CBWR") for side in sides} == {"COMPATIBLE"}


def test_an_interpreter_that_lacks_the_runtime(run, tmp_path):
    other = python_with(tmp_path / "other", "unset PYTHONPATH")
    ran = run([row()], "--runtime", "test", "--python-training", other)
    assert (ran.status, ran.out) == (69, "")
    assert "has no runtime test" in ran.err


def test_a_place_that_cannot_be_written(run, tmp_path):
    (tmp_path / "runs").write_text("a file where a directory should be")
    ran = run([row()], "--runtime", "test")
    assert (ran.status, ran.out, len(ran.err.splitlines())) == (73, "", 1)


def test_errors_as_json(run):
    ran = run([row(("logp.backend", "acme.logp"))], "--runtime", "test", "--log-json")
    entry = json.loads(ran.err)
    assert (entry["tool"], entry["code"], entry["status"]) == ("xd-materialize", "refused", 69)


def test_examples_of_the_schema_are_what_the_tool_writes():
    """The valid examples are whole materialisations: their execution keys are their own."""
    found = sorted((HERE / "schema_examples" / "materialized").glob("valid-*.json"))
    assert found
    for path in found:
        value = schema.validate("materialized", json.loads(path.read_text()), path.name)
        assert materialize.execution_key(value) == value["execution_key"]
