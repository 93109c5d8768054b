"""s3: what would be built is said on any machine; the ways to sixteen GPUs on two nodes are walked with two ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys

import pytest
from conftest import ROOT
from hf_fixtures import VOCABULARY, frozen, save_model
from materialize_fixtures import ENVIRONMENT, policy

from libxd import materialize, schema, sequences
from libxd.runtimes import registry

PAGE = (ROOT / "docs" / "cluster.md").read_text()
#: no CUDA device, wherever this runs
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
#: a node of eight GPUs, for the interpreter of either side
NODE = ENVIRONMENT | {
    "cuda": {"driver": "13.0", "devices": [{"name": "a GPU", "capability": "9.0", "memory_bytes": 150 * 10**9}] * 8},
    "packages": {name: "1" for name in ("torch", "transformers", "triton", "flash-attn", "vllm")},
    "variables": {"XD_RANKS": "16"},
    "xd": {"version": "0.1.0", "scorers": {"hf": "a" * 64, "vllm": "b" * 64}},
}  # fmt: skip
ROWS = [[0, 37984], [37984, 75968], [75968, 113952], [113952, 151936]]


def block(mark: str) -> str:
    """The commands of the page under a mark."""
    return re.search(rf"^<!-- {mark} -->\n```sh\n(.*?)^```$", PAGE, re.M | re.S)[1]


# -- dry


@pytest.fixture
def dry(xd, tmp_path):
    """`dry(name, *policy, **variables)`: each row's materialized.json of an experiment, where nothing is at hand."""

    def call(name, *options, **variables):
        (tmp_path / "experiments").mkdir(exist_ok=True)
        config = f"experiments/{name}.json"
        (tmp_path / config).write_bytes((ROOT / config).read_bytes())
        planned = xd("xd-plan", "-q", config)
        assert planned == xd("xd-plan", "-q", config)  # digests of a plan depend on nothing but its config
        ran = xd("xd-materialize", "--runs", "runs", *options, stdin=planned.out, env={**NO_GPU, **variables})
        assert (ran.status, ran.out) == (69, "") and "Traceback" not in ran.err
        rows = [json.loads(line) for line in planned.out.splitlines()]
        attempts = [sorted((tmp_path / "runs" / name / "cases" / row["case_id"]).iterdir())[-1] for row in rows]
        return [json.loads((attempt / "materialized.json").read_text()) for attempt in attempts]

    return call


def reasons(value) -> dict:
    """(side, knob) -> reason; of the row itself, (None, part of the identity)."""
    return {
        (each["side"], each["knob"] or (each["side"] is None and each["reason"].split(":")[0]) or None): each["reason"]
        for each in value["refusals"]
    }


def test_s3_says_anywhere_what_it_would_build(dry):
    values = dry("s3", "--runtime", "hf", XD_RANKS="16")
    assert [value["status"] for value in values] == ["refused"] * 3
    for value in values:
        rollout, training = (value["sides"][side]["engine"] for side in ("rollout", "training"))
        assert (rollout["device"], rollout["devices"], rollout["world_size"]) == ("cuda", 16, 16)
        assert (rollout["tensor_parallel_size"], rollout["context_parallel_size"]) == (4, 4)
        assert (rollout["rank_order"], rollout["vocabulary_rows"]) == (["context", "tensor"], ROWS)
        assert (rollout["dtype"], rollout["enforce_eager"]) == ("bfloat16", False)
        assert (training["devices"], training["world_size"], training["sharding"]) == (16, 16, "fsdp")
        assert (training["dtype"], training["attention"]) == ("bfloat16", "flash_attention_2")
    assert [value["sides"]["rollout"]["operator"]["backend"] for value in values] == [
        "native", "native", "xd.reference_logp"
    ]  # fmt: skip
    assert all(value["sides"][side]["operator"]["build"] for value in values for side in value["sides"])


def test_s3_says_in_words_why_this_machine_cannot(dry):
    *_, value = dry("s3", "--runtime", "hf", XD_RANKS="16")
    assert {each["status"] for each in value["refusals"]} == {"unsupported"}
    found = reasons(value)
    for part, file in {"checkpoint": "models/qwen3-8b", "sequences": "sequences/qwen3-8b.safetensors"}.items():
        lacking = f"/identity/{part}: not at hand: ../{file} (relative to the config)"
        assert found.pop((None, f"/identity/{part}")) == lacking
    assert "not at hand" in found.pop((None, "/identity/tokenizer"))
    for side in ("rollout", "training"):
        assert found.pop((side, None)) == "the scenario asks for a CUDA device and there is none"
    assert "wait for other ranks" in found.pop(("rollout", "rollout.enforce_eager"))
    assert "tensor_parallel_size 4 (supports 1)" in found.pop(("rollout", "logp.backend"))
    attention = found.pop(("training", "training.attention_backend"), "needs the package flash-attn")
    assert "needs the package flash-attn" in attention
    assert found == {}


def test_without_a_launcher_the_devices_are_missing(dry):
    value, *_ = dry("s3", "--runtime", "hf", XD_RANKS="")
    found = reasons(value)
    for knob in ("rollout.tensor_parallel_size", "rollout.context_parallel_size"):
        assert "16 ranks need a CUDA device each, and this machine has none" in found["rollout", knob]
    assert "this machine has none" in found["training", "training.sharding"]
    assert "XD_RANKS" in found["training", "training.sharding"]
    engines = [value["sides"][side]["engine"] for side in ("rollout", "training")]
    assert [(engine["devices"], engine["world_size"]) for engine in engines] == [(16, 16), (None, None)]


def test_s3_by_vllm_says_anywhere_what_it_would_build(dry):
    value, *_ = dry("s3", "--runtime-rollout", "vllm", "--runtime-training", "hf", XD_PYTHON_VLLM=sys.executable)
    engine = value["sides"]["rollout"]["engine"]
    assert (engine["device"], engine["devices"], engine["tensor_parallel_size"]) == ("cuda", 4, 4)
    assert (engine["dtype"], engine["enforce_eager"], engine["enable_prefix_caching"]) == ("bfloat16", False, True)
    found = reasons(value)
    assert "4 ranks need a CUDA device each" in found["rollout", "rollout.tensor_parallel_size"]
    assert "rollout.tensor_parallel_size 32 or more" in found["rollout", "rollout.context_parallel_size"]


# -- on two nodes that have everything


def on_the_node(xd, name, rollout="hf"):
    """Intervention -> what would still be refused there: (side, knob)."""
    runtime, training = registry.load(rollout), registry.load("hf")
    answers = {}
    for line in xd("xd-plan", "-q", ROOT / "experiments" / f"{name}.json").out.splitlines():
        row = json.loads(line) | {"executable": True, "missing": []}
        value = materialize.materialized(row, policy(runtime, training), {"rollout": NODE, "training": NODE})
        schema.validate("materialized", value, "materialized")
        change = row["intervention"][0] if row["intervention"] else {"path": None, "value": None}
        answers[change["path"], change["value"]] = [(each["side"], each["knob"]) for each in value["refusals"]]
    return answers


def test_s3_eager_is_ready_on_two_such_nodes(xd):
    assert on_the_node(xd, "s3-eager") == {
        (None, None): [], ("batch.size", 1): [], ("logp.backend", "xd.triton_logp"): [],
        ("logp.backend", "xd.reference_logp"): [("rollout", "logp.backend")],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("runtime", "knob"), [("hf", "rollout.enforce_eager"), ("vllm", "rollout.context_parallel_size")]
)
def test_of_s3_one_knob_is_refused_on_two_such_nodes(xd, runtime, knob):
    found = on_the_node(xd, "s3", runtime)
    assert found[None, None] == found["batch.size", 1] == [("rollout", knob)]


def test_s3_eager_is_s3_but_for_the_compiled_path():
    s3, eager = (json.loads((ROOT / "experiments" / f"{name}.json").read_text()) for name in ("s3", "s3-eager"))
    assert eager["baseline"]["rollout"].pop("enforce_eager") is not s3["baseline"]["rollout"].pop("enforce_eager")
    assert eager["baseline"] == s3["baseline"] and eager["identity"] == s3["identity"]


# -- the commands


def test_the_pages_dry_run(tmp_path):
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", block("dry")], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, **NO_GPU, "XD_PYTHON": sys.executable, "PATH": f"{ROOT / 'tools'}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr.count("refused") == 4


def test_the_pages_launchers_bring_sixteen_ranks():
    run = pytest.importorskip("torch.distributed.run")
    for line, side in zip(block("torchrun").splitlines(), ("rollout", "training"), strict=True):
        launcher, *words = shlex.split(line)
        asked = run.get_args_parser().parse_args(words)
        assert launcher == "torchrun" and asked.no_python and (asked.rdzv_backend, asked.nnodes) == ("c10d", "2")
        assert int(asked.nnodes) * int(asked.nproc_per_node) == 16
        assert asked.training_script == "xd-score" and asked.training_script_args[:2] == ["--side", side]
    scored = [line for line in block("srun").splitlines() if "xd-score" in line]
    assert len(scored) == 2 and all("--ntasks=16" in line for line in scored)
    script = (ROOT / "examples" / "slurm" / "ranks.sbatch").read_text()
    directives = dict(re.findall(r"^#SBATCH --(\S+)=(\d+)$", script, re.M))
    assert directives == {"nodes": "2", "ntasks": "16", "ntasks-per-node": "8", "gpus-per-node": "8"}


SRUN = """#!/usr/bin/env python3
import os, subprocess, sys
words = sys.argv[1:]
options = {}
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    options[name] = value
assert options["--cpu-bind"] == options["--gpu-bind"] == "none"
tasks = int(options.get("--ntasks", os.environ["SLURM_NTASKS"]))
if words[0] == "torchrun":  # only looked at
    print(options["--ntasks-per-node"], *words, file=open(os.environ["SRUN_LOG"], "a"))
    sys.exit(69)
with open(os.environ["SRUN_LOG"], "a") as log:
    print(tasks, *words[:3], file=log)
started = [
    subprocess.Popen(words, env={**os.environ, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task),
                                 "SLURM_STEP_NUM_TASKS": str(tasks)})
    for task in range(tasks)
]
sys.exit(max(task.wait() for task in started))
"""


@pytest.fixture
def ranks_sbatch(tmp_path):
    """`ranks_sbatch(**variables)`: the script as two tasks of a stand-in for srun, on s3-eager cut down to a CPU and a
    tiny model."""
    save_model(tmp_path / "tiny")
    sequences.write(tmp_path / "tiny.safetensors", frozen())
    config = json.loads((ROOT / "experiments" / "s3-eager.json").read_text()) | {"experiment_id": "cut"}
    config["scenario"]["device"] = "cpu"
    config["identity"] |= {
        "checkpoint": {"path": "tiny", "digest": None}, "tokenizer": {"id": "none", "policy": "token_ids"},
        "sequences": {"path": "tiny.safetensors", "digest": None},
        "model": {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY},
    }  # fmt: skip
    config["baseline"]["rollout"] |= {"tensor_parallel_size": 2, "context_parallel_size": 1}
    config["baseline"]["training"]["attention_backend"] = "sdpa"
    config["interventions"] = [
        {"path": "batch.size", "values": [1]}, {"path": "logp.backend", "values": ["xd.reference_logp"]}
    ]  # fmt: skip
    (tmp_path / "cut.json").write_text(json.dumps(config))
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\nprintf '127.0.0.1\\nanother\\n'\n"}.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ, "PATH": f"{stubs}:{os.environ['PATH']}", "XD_PYTHON": sys.executable,
        "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[0-1]", "EXP": "cut",
        "CONFIG": str(tmp_path / "cut.json"), "RUNS": str(tmp_path / "runs"), "REPEATS": "0",
        "MASTER_PORT": str(port), "SRUN_LOG": str(tmp_path / "srun.log"),
    }  # fmt: skip

    def call(**variables):
        return subprocess.run(["bash", ROOT / "examples/slurm/ranks.sbatch"], cwd=tmp_path, capture_output=True,
                              text=True, timeout=600, env={**environment, **variables})  # fmt: skip

    return call


def test_by_torchrun_the_script_starts_one_a_node(ranks_sbatch, tmp_path):
    """What it would be told, read by torchrun's own parser; it goes no further than what a task of srun is given."""
    run = pytest.importorskip("torch.distributed.run")
    ranks_sbatch(LAUNCHER="torchrun", SLURM_NNODES="2", SLURM_JOB_ID="7")
    steps = [line.split() for line in (tmp_path / "srun.log").read_text().splitlines()]
    lines = [step for step in steps if step[1] == "torchrun"]
    assert lines and {line[line.index("--side") + 1] for line in lines} == {"rollout"}  # nothing came out of it
    for a_node, launcher, *words in lines:
        asked = run.get_args_parser().parse_args(words)
        assert (a_node, launcher) == ("1", "torchrun") and asked.no_python
        assert (asked.nnodes, asked.nproc_per_node, asked.rdzv_backend, asked.rdzv_id) == ("2", "1", "c10d", "7")
        assert asked.rdzv_endpoint.startswith("127.0.0.1:") and asked.training_script == "xd-score"
    refused = ranks_sbatch(LAUNCHER="mpirun", SLURM_NNODES="2")
    assert refused.returncode == 2 and refused.stderr == "LAUNCHER=mpirun: srun or torchrun?\n"


def test_the_script_for_slurm_runs_the_chain_over_ranks(ranks_sbatch, tmp_path):
    """All of it: from plan to table."""
    done = ranks_sbatch()
    assert done.returncode == 0, done.stderr
    table = done.stdout.splitlines()
    assert [next(line.split()[1] for line in table if line.startswith(case)) for case in (
        "baseline", "batch.size=1", "logp.backend=xd.reference_logp")] == ["PASS", "PASS", "unsupported"]  # fmt: skip
    steps = (tmp_path / "srun.log").read_text().splitlines()
    assert [step for step in steps if "xd-score" in step] == ["2 xd-score --side rollout", "2 xd-score --side training"]
    assert {step.split()[0] for step in steps if "xd-score" not in step} == {"1"}
    readbacks = [json.loads(path.read_text()) for path in tmp_path.glob("runs/cut/cases/*/*/readback_*.json")]
    assert [readback["engine"]["world_size"] for readback in readbacks] == [2] * 4
    assert not [path for path in (tmp_path / "runs" / "cut").iterdir() if path.name.startswith(".slurm")]
