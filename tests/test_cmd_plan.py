"""xd-plan as a black box: stdout, stderr and exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from planning_fixtures import checkpoint_directory, experiment_config, parse, put

from libxd import planner, schema
from libxd.errors import Status

SHIPPED = {
    "s1": 9, "ladder": 5, "s2": 11, "s2-cuda": 12, "s3": 3, "s3-eager": 4, "smollm2": 14, "smollm2-fp32": 12,
    "smollm2-cuda": 17, "s0-bisect": 2, "smollm2-bisect": 2,
}  # fmt: skip


@pytest.fixture
def plan(xd, tmp_path):
    """`plan(config value or bytes, *options)` runs xd-plan on it as trial.json."""

    def run(value, *options, **arguments):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        (tmp_path / "trial.json").write_bytes(data)
        return xd("xd-plan", "trial.json", *options, **arguments)

    return run


def refused(ran, status=Status.INVALID):
    """The run said no in clear lines and nothing else; returns these lines."""
    assert (ran.status, ran.out) == (status, "")
    lines = ran.err.splitlines()
    assert lines and all(line.startswith("xd-plan: ") for line in lines)
    assert "Traceback" not in ran.err
    return lines


def test_rows_on_stdout_notes_on_stderr(plan):
    ran = plan(experiment_config())
    assert ran.status == Status.DONE
    rows = [schema.validate("plan_row", json.loads(line), "x") for line in ran.out.splitlines()]
    assert [len(row["intervention"]) for row in rows] == [0, 1, 1, 1]
    assert ran.err.splitlines() == ["xd-plan: trial.json: not executable here: /identity/sequences: no path is given"]
    assert plan(experiment_config(), "-q").err == ""
    assert [planner.read_row(line, "x")["case_id"] for line in ran.out.splitlines()] == [row["case_id"] for row in rows]


def test_the_same_config_gives_the_same_bytes(plan):
    first = plan(experiment_config()).out
    assert first == plan(experiment_config(), env={"PYTHONHASHSEED": "7"}).out
    assert first != plan(put(experiment_config(), "/baseline/batch/size", 4)).out


def test_repeats(plan):
    ran = plan(experiment_config(), "--repeats", 2, "--repeat-order", "rotated")
    rows = [json.loads(line) for line in ran.out.splitlines()]
    again = [(1, "rotated"), (2, "rotated")]
    assert [(row["repeat"], row["submission"]) for row in rows] == [(0, "canonical"), *again, *[(0, "canonical")] * 3]
    refused(plan(experiment_config(), "--repeats", -1), Status.USAGE)


def test_runs(plan, tmp_path):
    ran = plan(experiment_config(), "--runs", "runs")
    run = tmp_path / "runs" / "trial"
    assert (run / "plan.jsonl").read_text() == ran.out
    assert json.loads((run / "experiment.json").read_text())["experiment_id"] == "trial"
    assert plan(experiment_config(), "--runs", "runs").out == ran.out
    plan(experiment_config(interventions=[]), "--runs", "runs")
    assert len(list((run / "plans").iterdir())) == 2
    assert len((run / "plan.jsonl").read_text().splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_run_directory_that_is_read_only(plan, tmp_path):
    (tmp_path / "runs").mkdir(mode=0o500)
    refused(plan(experiment_config(), "-q", "--runs", "runs"), Status.CONFLICT)


def test_a_run_directory_that_cannot_be(plan, tmp_path):
    (tmp_path / "runs").write_text("a file")
    (line,) = refused(plan(experiment_config(), "-q", "--runs", "runs"), Status.CONFLICT)
    assert "runs/trial" in line


def test_a_bad_config_leaves_no_run_directory(plan, tmp_path):
    refused(plan(experiment_config(experiment_id="../escape"), "--runs", "runs"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trial.json"]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "not JSON"),
        (b'{"a": 1', "not JSON"),
        (b'{"experiment_id": "a", "experiment_id": "b"}', "stands twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1e999}', "64-bit"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 5000 + b"]" * 5000, "nested"),
        (b'"' + b"x" * (1 << 20) + b'"', "too large"),
        (b"[]", "not of type"),
    ],
)
def test_what_is_no_config_is_one_clear_line(plan, data, what):
    (line,) = refused(plan(data))
    assert what in line and "trial.json" in line


def test_a_missing_config(xd):
    (line,) = refused(xd("xd-plan", "none.json"), Status.MISSING)
    assert "none.json" in line


def test_every_mistake_is_a_line_with_its_place(plan):
    value = experiment_config(atol=1, pairs=[["batch.size", "rollout.dtype"]])
    put(value, "/baseline/batch/size", True)
    put(value, "/interventions/1/values", ["bf16", "fp32", "float32"])
    lines = refused(plan(value))
    for place in ("/atol", "/pairs", "/baseline/batch/size", "/interventions/1/values/0", "/interventions/1/values/2"):
        assert any(line.startswith(f"xd-plan: trial.json#{place}: ") for line in lines), place
    assert len(lines) == 5


def test_mistakes_as_json(plan):
    lines = plan(experiment_config(contract_source="ws9"), "--log-json").err.splitlines()
    records = [json.loads(line) for line in lines]
    assert [(record["code"], record["path"]) for record in records] == [("unknown-contract", "/contract_source")]


def test_257_cases_are_refused_and_256_are_not(plan):
    value = experiment_config(interventions=[{"path": "batch.size", "values": list(range(9, 264))}])
    assert len(plan(value, "-q").out.splitlines()) == 256
    value["interventions"][0]["values"].append(5000)
    (line,) = refused(plan(value))
    assert "found 257" in line
    assert len(plan(experiment_config(), "-q", "--repeats", 300).out.splitlines()) == 304  # repeats are no cases


def test_toward_another_baseline(plan, tmp_path):
    """A plan of two ends, whatever else the two configs declare."""
    other = experiment_config(experiment_id="other", interventions=[])
    put(other, "/baseline/rollout/dtype", "float32")
    put(other, "/baseline/batch/size", 1)
    (tmp_path / "other.json").write_text(json.dumps(other))
    ran = plan(experiment_config(), "-q", "--toward", "other.json", "--runs", "runs")
    near, far = (planner.read_row(line, "x") for line in ran.out.splitlines())
    assert (near["strategy"], near["experiment_id"], near["intervention"]) == ("bisect", "trial", [])
    assert [(change["path"], change["value"]) for change in far["intervention"]] == [
        ("batch.size", 1), ("rollout.dtype", "float32")]  # fmt: skip
    alone = json.loads(plan(experiment_config(), "-q").out.splitlines()[0])
    assert near["case_id"] == alone["case_id"]  # what answered it in another plan does here, too
    published = json.loads((tmp_path / "runs" / "trial" / "experiment.json").read_text())
    assert published["strategy"] == "bisect"
    assert planner.rows(parse(published))[1]["case_id"] == far["case_id"]


@pytest.mark.parametrize(
    ("pointer", "item", "what"),
    [
        ("/identity/semantics/temperature", 0.5, "another identity"),
        ("/contract_source", "bitwise", "another contract"),
        ("/scenario/device", "cuda", "another scenario"),
        ("/operators", {"selected_logprob": {"rollout": "native", "training": "native"}}, "another operators"),
        ("/experiment_id", "other", "the same baseline"),
    ],
)
def test_no_knobs_lead_to_another_identity(plan, tmp_path, pointer, item, what):
    (tmp_path / "other.json").write_text(json.dumps(put(experiment_config(), pointer, item)))
    (line,) = refused(plan(experiment_config(), "-q", "--toward", "other.json"))
    assert what in line and "other.json" in line


def test_no_flag_sets_a_threshold(plan):
    for flag in ("--threshold", "--atol", "--rtol", "--tolerance"):
        refused(plan(experiment_config(), flag, "1"), Status.USAGE)


def test_a_closed_pipe_is_no_traceback(xd, tmp_path, root):
    value = experiment_config(interventions=[{"path": "batch.size", "values": list(range(9, 264))}])
    (tmp_path / "trial.json").write_text(json.dumps(value))
    command = f"{root}/tools/xd-plan -q trial.json | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "XD_PYTHON": sys.executable})  # fmt: skip
    assert done.stderr == "" and done.returncode in (141, 0)
    assert len(done.stdout.splitlines()) == 1


def test_plans_need_neither_torch_nor_numpy(xd, tmp_path):
    """With both made unimportable, and a checkpoint and its tokenizer at hand to be digested."""
    for name in ("torch", "numpy", "transformers", "safetensors"):
        (tmp_path / "blocked" / name).mkdir(parents=True)
        (tmp_path / "blocked" / name / "__init__.py").write_text(f"raise ImportError('{name} is blocked')")
    checkpoint_directory(tmp_path / "model")
    value = experiment_config()
    value["identity"]["checkpoint"] = {"path": "model"}
    value["identity"]["tokenizer"] = {"id": "t", "policy": "plain", "path": "model"}
    (tmp_path / "trial.json").write_text(json.dumps(value))
    blocked = {"PYTHONPATH": str(tmp_path / "blocked")}
    control = subprocess.run([sys.executable, "-c", "import numpy"], env={**os.environ, **blocked}, capture_output=True)
    assert control.returncode == 1
    ran = xd("xd-plan", "trial.json", env=blocked)
    assert ran.status == Status.DONE
    row = json.loads(ran.out.splitlines()[0])
    assert row["identity"]["checkpoint"]["digest"] and row["locations"]["checkpoint"] == "model"


# -- the experiments that ship


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_experiment_plans_anywhere(xd, root, tmp_path, name):
    """From a directory without models or sequences, too: the rows then say that they cannot be run."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / f"{name}.json").write_bytes((root / "experiments" / f"{name}.json").read_bytes())
    ran = xd("xd-plan", f"experiments/{name}.json")
    assert ran.status == Status.DONE
    rows = [planner.read_row(line, name) for line in ran.out.splitlines()]
    assert len(rows) == SHIPPED[name]
    assert {row["experiment_id"] for row in rows} == {name}
    assert not any(row["executable"] for row in rows)


def test_s3_is_the_contracts_example(root):
    config = json.loads((root / "experiments" / "s3.json").read_text())
    assert config["scenario_id"] == "qwen3-8b-tp4-cp4-bf16"
    assert config["scenario"] == {"level": "S3", "device": "cuda"}
    assert config["baseline"] == {
        "batch": {"size": 8},
        "rollout": {"tensor_parallel_size": 4, "context_parallel_size": 4, "dtype": "bfloat16",
                    "enable_prefix_caching": True, "enforce_eager": False},
        "training": {"attention_backend": "flash_attention_2", "compute_dtype": "bfloat16", "sharding": "fsdp"},
        "logp": {"backend": "native"},
    }  # fmt: skip
    assert config["interventions"] == [
        {"path": "batch.size", "values": [1]},
        {"path": "logp.backend", "values": ["rlkernel.reference_logp"]},
    ]


@pytest.mark.parametrize("name", ["s2", "s2-cuda", "smollm2", "smollm2-fp32", "smollm2-cuda", "s0-bisect",
                                  "smollm2-bisect"])
def test_an_experiment_turns_all_ten_knobs(root, name):
    config = json.loads((root / "experiments" / f"{name}.json").read_text())
    catalog = schema.load("common")["$defs"]["knob_path"]["enum"]
    assert sorted(item["path"] for item in config["interventions"]) == sorted(catalog)
