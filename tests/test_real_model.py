"""The real model, few short sequences: changes that must move logprobs, and some that must not."""

from __future__ import annotations

import json

import pytest
from tolerances import BFLOAT16_SPLIT_MEAN_NATS, SAME_LOGITS_NATS

pytest.importorskip("torch")


def label(intervention) -> str:
    """What a case is called here: its knob, or its operator."""
    return intervention["value"] if intervention["path"] == "logp.backend" else intervention["path"]


@pytest.fixture(scope="module")
def measured(root, tmp_path_factory):
    """Sampled, planned, scored and judged by the tools: case label -> (comparison, effect, readbacks)."""
    from conftest import Tools

    model = root / "models" / "smollm2-135m-instruct"
    assert (model / "model.safetensors").exists(), "run `make model`"
    place = tmp_path_factory.mktemp("real")
    xd = Tools(place)

    def ran(tool, *arguments, stdin=""):
        done = xd(tool, "-q", *arguments, stdin=stdin)
        assert done.status == 0, done.err
        return done.out

    ran("xd-rollout", root / "experiments" / "prompts" / "short.jsonl", "--model", model, "--samples", 2,
        "--max-new-tokens", 12, "--seed", 1, "--out", place / "sequences.safetensors")  # fmt: skip
    config = json.loads((root / "experiments" / "smollm2.json").read_text())
    config["experiment_id"] = "real"
    config["identity"]["checkpoint"]["path"] = config["identity"]["tokenizer"]["path"] = str(model)
    config["identity"]["sequences"]["path"] = "sequences.safetensors"
    config["interventions"] = [
        {"path": "batch.size", "values": [1]},
        {"path": "rollout.tensor_parallel_size", "values": [3]},
        {"path": "rollout.context_parallel_size", "values": [2]},
        {"path": "training.sharding", "values": ["fsdp"]},
        {"path": "rollout.dtype", "values": ["float32"]},
        {"path": "rollout.enable_prefix_caching", "values": [False]},
        {"path": "logp.backend", "values": ["xd.triton_logp", "xd.fused_linear_logp"]},
    ]
    (place / "real.json").write_text(json.dumps(config))
    rows = ran("xd-plan", place / "real.json", "--repeats", 1)
    attempts = ran("xd-materialize", "--runs", place / "runs", "--runtime", "hf", stdin=rows)
    for side in ("rollout", "training"):
        attempts = ran("xd-score", "--side", side, stdin=attempts)
    comparisons = [json.loads(line) for line in ran("xd-compare", "--json", stdin=attempts).splitlines()]
    ran("xd-seal", stdin=attempts)
    baseline = attempts.split()[0]
    effects = [json.loads(line) for line in ran("xd-compare", "--against", baseline, stdin=attempts).splitlines()]
    readbacks = [
        {side: json.loads((place / attempt / f"readback_{side}.json").read_text()) for side in ("rollout", "training")}
        for attempt in attempts.split()
    ]
    labels = [
        "repeat" if row["repeat"] else label(row["intervention"][0]) if row["intervention"] else "baseline"
        for row in map(json.loads, rows.splitlines())
    ]
    return dict(zip(labels, zip(comparisons, effects, readbacks, strict=True), strict=True))


def test_every_attempt_is_a_valid_comparison(measured):
    for comparison, _, _ in measured.values():
        assert comparison["violations"] == [] and comparison["artifact_problems"] == []
        assert comparison["counts"]["active"] >= 40


def test_a_repeat_shows_the_noise_floor(measured):
    _, floor, _ = measured["repeat"]
    assert floor["rollout"]["max_absolute"] == floor["training"]["max_absolute"] == 0


def test_decode_differs_from_one_pass(measured):
    """In bfloat16 by rounding, not by a mistake: ENGINES-like figures are a mean of some hundredths of a nat."""
    comparison, _, _ = measured["baseline"]
    assert 1e-3 < comparison["logprob_difference"]["mean_absolute"] < 0.2


@pytest.mark.parametrize(
    "knob", ["batch.size", "rollout.dtype", "rollout.tensor_parallel_size", "rollout.context_parallel_size"]
)
def test_a_knob_moves_the_rollout_side_above_the_floor(measured, knob):
    _, effect, _ = measured[knob]
    _, floor, _ = measured["repeat"]
    assert effect["rollout"]["mean_absolute"] > max(floor["rollout"]["mean_absolute"], 1e-3)


def test_splitting_the_model_over_ranks_costs_what_rounding_costs(measured):
    """In bfloat16 some hundredths of a nat in the mean, as any other order of sums; tests/test_ranks.py has float32."""
    for knob in ("rollout.tensor_parallel_size", "rollout.context_parallel_size"):
        _, effect, readbacks = measured[knob]
        assert effect["rollout"]["mean_absolute"] < BFLOAT16_SPLIT_MEAN_NATS
        assert readbacks["rollout"]["engine"]["world_size"] > 1


def test_sharding_the_training_side_changes_no_bit(measured):
    comparison, effect, readbacks = measured["training.sharding"]
    assert effect["training"]["max_absolute"] == 0
    assert readbacks["training"]["engine"]["world_size"] == 2
    assert comparison["logprob_difference"] == measured["baseline"][0]["logprob_difference"]


def test_a_rollout_knob_leaves_the_training_side_alone(measured):
    for knob in ("rollout.dtype", "rollout.enable_prefix_caching"):
        _, effect, _ = measured[knob]
        assert effect["training"]["max_absolute"] == 0


OPERATORS = {"xd.triton_logp": "TritonLogprob", "xd.fused_linear_logp": "FusedLinearLogprob"}


@pytest.mark.parametrize("backend", OPERATORS)
def test_a_kernels_operator_is_the_one_that_ran(measured, backend):
    _, _, readbacks = measured[backend]
    for readback in readbacks.values():
        assert readback["operator"]["backend"] == backend and readback["operator"]["calls"] > 0
        module = backend.removeprefix("xd.")
        assert readback["operator"]["instance"] == f"libxd.operators.{module}:{OPERATORS[backend]}"


def test_the_kernels_operator_reads_the_same_logits(measured):
    """`xd.triton_logp` changes the order of sums alone, here by its twin: far less than any knob of the engine."""
    comparison, effect, _ = measured["xd.triton_logp"]
    assert all(effect[side]["max_absolute"] < SAME_LOGITS_NATS for side in ("rollout", "training"))
    assert comparison["status"] == measured["baseline"][0]["status"]


def test_the_fused_operator_brings_the_sides_nearer(measured):
    """`xd.fused_linear_logp` on both sides: bfloat16 logits are what the head's rounding adds to the difference."""
    comparison, effect, _ = measured["xd.fused_linear_logp"]
    assert all(effect[side]["mean_absolute"] > 1e-3 for side in ("rollout", "training"))
    baseline = measured["baseline"][0]
    ours, theirs = (found["logprob_difference"]["mean_absolute"] for found in (comparison, baseline))
    assert ours < theirs
