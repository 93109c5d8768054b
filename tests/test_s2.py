"""S2 on the CPU, cut to three of its cases: vLLM over two workers of its own against FSDP2 over two ranks, real model.

Skipped without XD_PYTHON_VLLM (`make setup-vllm`); all of it is `make run EXP=s2`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import ROOT, Tools

PYTHON = os.environ.get("XD_PYTHON_VLLM") and os.path.abspath(os.environ["XD_PYTHON_VLLM"])
pytestmark = [
    pytest.mark.skipif(
        not PYTHON, reason="no vLLM here: make setup-vllm, then XD_PYTHON_VLLM=.venv-vllm/bin/python"
    ),
    pytest.mark.xdist_group("vllm"),
]
ENGINES = {"rollout": "vllm", "training": "hf"}
CUT = ("rollout.tensor_parallel_size", "training.sharding")


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """Changed knob (None: the baseline) -> its comparison, its effect, both readbacks; and the table."""
    model = ROOT / "models" / "smollm2-135m-instruct-12-heads"
    assert (model / "model.safetensors").exists(), "run `make model-padded`"
    place = tmp_path_factory.mktemp("s2")
    tools = Tools(place)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

    def ran(tool, *arguments, stdin=""):
        done = tools(tool, "-q", *arguments, stdin=stdin, env={"PYTHONPATH": paths, "XD_PYTHON_VLLM": str(PYTHON)})
        assert done.status == 0, done.err
        return done.out

    ran("xd-rollout", ROOT / "experiments" / "prompts" / "short.jsonl", "--model", model, "--samples", 2,
        "--max-new-tokens", 6, "--seed", 1, "--out", place / "sequences.safetensors")  # fmt: skip
    config = json.loads((ROOT / "experiments" / "s2.json").read_text())
    config["identity"]["checkpoint"]["path"] = config["identity"]["tokenizer"]["path"] = str(model)
    config["identity"]["sequences"]["path"] = "sequences.safetensors"
    config["interventions"] = [change for change in config["interventions"] if change["path"] in CUT]
    (place / "s2.json").write_text(json.dumps(config))
    rows = ran("xd-plan", "s2.json", "--runs", "runs")
    text = ran("xd-materialize", "--runs", "runs", *[word for side, name in ENGINES.items()
               for word in (f"--runtime-{side}", name)], stdin=rows)  # fmt: skip
    for side in ENGINES:
        text = ran("xd-score", "--side", side, stdin=text)
    comparisons = ran("xd-compare", "--json", stdin=text).splitlines()
    ran("xd-seal", stdin=text)
    attempts = text.splitlines()
    effects = ran("xd-compare", "--against", attempts[0], stdin=text).splitlines()
    found = {"table": ran("xd-compare", "--table", "--plan", "runs/s2/plan.jsonl", stdin=text)}
    for row, attempt, *values in zip(rows.splitlines(), attempts, comparisons, effects, strict=True):
        changes = json.loads(row)["intervention"]
        readbacks = [json.loads(Path(place / attempt / f"readback_{side}.json").read_text()) for side in ENGINES]
        found[changes[0]["path"] if changes else None] = (*map(json.loads, values), *readbacks)
    return found


@pytest.mark.parametrize("case", [None, *CUT])
def test_both_engines_score_and_are_read_back(scored, case):
    comparison, _, *readbacks = scored[case]
    assert comparison["status"] in ("PASS", "MISMATCH")
    assert comparison["violations"] == [] and comparison["artifact_problems"] == []
    assert {knob["status"] for readback in readbacks for knob in readback["knobs"]} == {"applied"}


def test_each_side_is_spread_over_two_of_its_own(scored):
    _, _, rollout, training = scored[None]
    (tensor,) = (knob for knob in rollout["knobs"] if knob["knob"] == "rollout.tensor_parallel_size")
    assert (tensor["actual"], tensor["evidence"]["ranks"], tensor["evidence"]["layers"]) == (2, [0, 1], [2])
    (sharding,) = (knob for knob in training["knobs"] if knob["knob"] == "training.sharding")
    assert (sharding["actual"], training["engine"]["world_size"]) == ("fsdp", 2)
    assert [set(rank["parameters"]) for rank in sharding["evidence"]["ranks"]] == [{"S(0) of 2"}] * 2


def test_sharding_moves_no_bit_and_tensor_parallelism_its_own_side(scored):
    moved = {case: [scored[case][1][side]["max_absolute"] for side in ENGINES] for case in CUT}
    assert moved["training.sharding"] == [0, 0]
    rollout, training = moved["rollout.tensor_parallel_size"]
    assert rollout > 0 and training == 0


def test_the_table_names_the_engines(scored):
    assert "S2 on cpu shows vllm as rollout against hf as training" in scored["table"]
