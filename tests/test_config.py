"""The experiment file: what is wrong with it is said, all at once, with its place."""

from __future__ import annotations

import json
import os

import pytest
from planning_fixtures import HEADS, checkpoint_directory, experiment_config, parse, put

from libxd import canon, config
from libxd.errors import Status, XdError, XdErrors


def issues(value, base="."):
    from pathlib import Path

    with pytest.raises(XdErrors) as caught:
        parse(value, Path(base))
    return {(issue.code, issue.path) for issue in caught.value.issues}


def test_a_sound_config_is_normalised():
    value = experiment_config(interventions=[{"path": "logp.backend", "values": ["rlkernel.reference_logp"]}])
    put(value, "/baseline/rollout/dtype", "bf16")
    put(value, "/baseline/training/compute_dtype", "fp32")
    found = parse(value)
    assert found.baseline["rollout.dtype"] == "bfloat16"
    assert found.baseline["training.compute_dtype"] == "float32"
    assert found.interventions[0].values == ("xd.reference_logp",)
    assert (found.contract.source, found.contract.version) == ("ws1", "1")
    assert found.operators is None


def test_the_contracts_name_of_the_format_means_the_same():
    ours, theirs = experiment_config(), experiment_config(schema_version="cross_config.experiment_config.v1")
    assert parse(ours).as_json() == parse(theirs).as_json()


def test_strict_fallback_is_the_default():
    value = experiment_config()
    del value["strict_fallback"]
    assert parse(value).strict_fallback is True
    assert parse(experiment_config(strict_fallback=False)).strict_fallback is False


# -- one mistake each: where it is put, and how it is reported


@pytest.mark.parametrize(
    ("pointer", "item", "code", "path"),
    [
        ("/title", "x", "unknown-field", ""),
        ("/experiment_id", "../up", "schema", "/experiment_id"),
        ("/experiment_id", "a/b", "schema", "/experiment_id"),
        ("/schema_version", "xd.experiment_config.v2", "schema", "/schema_version"),
        ("/contract_source", "ws9", "unknown-contract", "/contract_source"),
        ("/contract_version", "7", "unknown-contract", "/contract_version"),
        ("/strategy", "cartesian", "schema", "/strategy"),
        ("/pairs", [["batch.size", "rollout.dtype"]], "contradiction", "/pairs"),
        ("/scenario/level", "S9", "schema", "/scenario/level"),
        ("/strict_fallback", 1, "wrong-type", "/strict_fallback"),
        ("/baseline/batch/size", True, "wrong-type", "/baseline/batch/size"),
        ("/baseline/batch/size", 8.0, "wrong-type", "/baseline/batch/size"),
        ("/baseline/batch/size", "8", "wrong-type", "/baseline/batch/size"),
        ("/baseline/batch/size", 0, "out-of-range", "/baseline/batch/size"),
        ("/baseline/rollout/enforce_eager", 1, "wrong-type", "/baseline/rollout/enforce_eager"),
        ("/baseline/rollout/dtype", "fp8", "unknown-value", "/baseline/rollout/dtype"),
        ("/baseline/rollout/top", 1, "unknown-field", "/baseline/rollout"),
        ("/baseline/rollout/quantization", "awq", "deferred-knob", "/baseline/rollout/quantization"),
        ("/baseline/rollout/pipeline_parallel_size", 2, "deferred-knob", "/baseline/rollout/pipeline_parallel_size"),
        ("/baseline/speculative_decoding", {}, "deferred-knob", "/baseline/speculative_decoding"),
        ("/baseline/logp/backend", "nobodys.logp", "unknown-operator", "/baseline/logp/backend"),
        ("/interventions/0/path", "rollout.fp8", "deferred-knob", "/interventions/0/path"),
        ("/interventions/0/path", "rollout.seed", "unknown-knob", "/interventions/0/path"),
        ("/interventions/0/values", [], "schema", "/interventions/0/values"),
        ("/interventions/0/values", [8], "equals-baseline", "/interventions/0/values/0"),
        ("/interventions/0/values", [1, True], "wrong-type", "/interventions/0/values/1"),
        ("/interventions/0/values", [1, 2, 1], "duplicate-value", "/interventions/0/values/2"),
        ("/interventions/1/values", ["bf16"], "equals-baseline", "/interventions/1/values/0"),
        ("/interventions/1/values", ["fp32", "float32"], "duplicate-value", "/interventions/1/values/1"),
        ("/interventions/1/path", "batch.size", "duplicate-intervention", "/interventions/1/path"),
        ("/identity/rollout_mode", "sample", "schema", "/identity/rollout_mode"),
        ("/identity/cache_policy/rollout", "forbidden", "contradiction", "/identity/cache_policy/rollout"),
        ("/identity/cache_policy/training", "kv_cache", "contradiction", "/identity/cache_policy/training"),
        ("/identity/semantics/temperature", 0, "schema", "/identity/semantics/temperature"),
        ("/identity/tokenizer/path", "x", "contradiction", "/identity/tokenizer"),
        ("/identity/checkpoint/path", "x", "wrong-type", "/identity/checkpoint/path"),
        ("/identity/checkpoint/digest", "0" * 64, "digest-differs", "/identity/checkpoint/digest"),
        ("/identity/model/num_key_value_heads", 5, "indivisible", "/identity/model/num_key_value_heads"),
        ("/operators", {"selected_logprob": {"rollout": "native"}}, "missing-field", "/operators/selected_logprob"),
        ("/operators", {"attention": {}}, "unknown-field", "/operators"),
    ],
)
def test_one_mistake_is_reported_in_its_place(pointer, item, code, path):
    assert (code, path) in issues(put(experiment_config(), pointer, item))


@pytest.mark.parametrize(
    ("binding", "code", "path"),
    [
        ("nobodys.logp", "unknown-operator", "/operators/selected_logprob/training"),
        ({"backend": "nobodys.logp"}, "unknown-operator", "/operators/selected_logprob/training/backend"),
        ({"backend": "native", "options": []}, "wrong-type", "/operators/selected_logprob/training/options"),
        ({"backend": "native", "args": {}}, "unknown-field", "/operators/selected_logprob/training"),
        (7, "wrong-type", "/operators/selected_logprob/training"),
    ],
)
def test_operator_bindings(binding, code, path):
    value = experiment_config(operators={"selected_logprob": {"rollout": "native", "training": binding}})
    assert (code, path) in issues(value)


@pytest.mark.parametrize(
    "pointer",
    ["/threshold", "/rtol", "/scenario/fixed_threshold", "/baseline/logp/Tolerance", "/interventions/0/atol",
     "/identity/semantics/THRESHOLD_nats"],
)  # fmt: skip
def test_a_smuggled_threshold_is_refused_by_name_and_only_once(pointer):
    assert issues(put(experiment_config(), pointer, 1e-3)) == {("threshold-smuggled", pointer)}


def test_a_threshold_in_operator_options_or_as_a_knob_is_refused():
    binding = {"backend": "native", "options": {"deep": [{"atol": 1}]}}
    value = experiment_config(operators={"selected_logprob": {"rollout": "native", "training": binding}})
    assert issues(value) == {("threshold-smuggled", "/operators/selected_logprob/training/options/deep/0/atol")}
    value = experiment_config(interventions=[{"path": "logp.threshold", "values": [1]}])
    assert issues(value) == {("threshold-smuggled", "/interventions/0/path")}


def test_an_operator_mapping_and_a_logp_intervention_exclude_each_other():
    mapping = {"selected_logprob": {"rollout": "native", "training": "rlkernel.reference_logp"}}
    intervention = [{"path": "logp.backend", "values": ["xd.reference_logp"]}]
    assert parse(experiment_config(operators=mapping)).operators["selected_logprob"]["training"] == {
        "backend": "xd.reference_logp", "options": {}}  # fmt: skip
    assert issues(experiment_config(operators=mapping, interventions=intervention)) == {
        ("operator-conflict", "/interventions/0/path")}  # fmt: skip


def test_smoke_operators_may_be_planned_because_execution_authorises_them():
    mapping = {"selected_logprob": {"rollout": "native", "training": "smoke_only.logp_offset"}}
    assert parse(experiment_config(operators=mapping)).operators is not None


@pytest.mark.parametrize("size", [5, 8])
def test_tensor_parallel_sizes_must_split_the_heads(size):
    assert HEADS % size
    value = put(experiment_config(), "/baseline/rollout/tensor_parallel_size", size)
    assert issues(value) == {("indivisible", "/baseline/rollout/tensor_parallel_size")}
    value = experiment_config(interventions=[{"path": "rollout.tensor_parallel_size", "values": [2, size]}])
    assert issues(value) == {("indivisible", "/interventions/0/values/1")}


@pytest.mark.parametrize("size", [2, 4, 12])
def test_key_value_heads_may_be_split_or_replicated(size):
    parse(experiment_config(interventions=[{"path": "rollout.tensor_parallel_size", "values": [size]}]))


def test_key_value_heads_that_neither_split_nor_replicate():
    value = experiment_config(interventions=[{"path": "rollout.tensor_parallel_size", "values": [6]}])
    assert issues(value) == {("indivisible", "/interventions/0/values/0")}


def test_context_parallelism_splits_positions_and_divides_no_heads():
    parse(experiment_config(interventions=[{"path": "rollout.context_parallel_size", "values": [5, 7]}]))


def test_the_cap_counts_the_baseline_and_holds_before_values_are_looked_at():
    most = experiment_config(interventions=[{"path": "batch.size", "values": list(range(9, 264))}])
    assert len(parse(most).interventions[0].values) == 255
    most["interventions"][0]["values"].append("not even a number")
    assert issues(most) == {("too-many-cases", "/interventions")}


def test_the_cap_of_pairs_counts_products():
    value = experiment_config(
        strategy="pairwise",
        pairs=[["batch.size", "rollout.context_parallel_size"]],
        interventions=[
            {"path": "batch.size", "values": list(range(9, 25))},
            {"path": "rollout.context_parallel_size", "values": list(range(2, 18))},
        ],
    )
    assert issues(value) == {("too-many-cases", "/interventions")}
    value["interventions"][0]["values"].pop()
    parse(value)


def test_a_bisection_has_two_ends():
    """The baseline, and one value of each knob that differs."""
    one = [{"path": "batch.size", "values": [1]}, {"path": "rollout.dtype", "values": ["fp32"]}]
    assert [item.values for item in parse(experiment_config(strategy="bisect", interventions=one)).interventions] == [
        (1,), ("float32",)]  # fmt: skip
    two = [{"path": "batch.size", "values": [1, 2]}]
    assert issues(experiment_config(strategy="bisect", interventions=two)) == {
        ("contradiction", "/interventions/0/values")}  # fmt: skip
    assert issues(experiment_config(strategy="bisect", interventions=[])) == {("missing-field", "/interventions")}
    crossed = experiment_config(strategy="bisect", interventions=one, pairs=[["batch.size", "rollout.dtype"]])
    assert issues(crossed) == {("contradiction", "/pairs")}


@pytest.mark.parametrize(
    ("pairs", "code", "path"),
    [
        (None, "missing-field", "/pairs"),
        ([], "schema", "/pairs"),
        ([["batch.size"]], "schema", "/pairs/0"),
        ([["batch.size", "rollout.enforce_eager"]], "undeclared-pair", "/pairs/0/1"),
        ([["batch.size", "batch.size"]], "self-pair", "/pairs/0"),
        ([["batch.size", "rollout.dtype"], ["rollout.dtype", "batch.size"]], "duplicate-pair", "/pairs/1"),
    ],
)
def test_pairs(pairs, code, path):
    value = experiment_config(strategy="pairwise")
    if pairs is not None:
        value["pairs"] = pairs
    assert (code, path) in issues(value)


def test_all_mistakes_are_said_at_once():
    value = experiment_config(threshold=1, contract_source="ws9", extra=1)
    put(value, "/baseline/rollout/dtype", "int4")
    put(value, "/baseline/rollout/tensor_parallel_size", 5)
    put(value, "/interventions/0/values", [8, 1, 1])
    put(value, "/identity/checkpoint/digest", "1" * 64)
    assert issues(value) == {
        ("threshold-smuggled", "/threshold"),
        ("unknown-contract", "/contract_source"),
        ("unknown-field", ""),
        ("unknown-value", "/baseline/rollout/dtype"),
        ("indivisible", "/baseline/rollout/tensor_parallel_size"),
        ("equals-baseline", "/interventions/0/values/0"),
        ("duplicate-value", "/interventions/0/values/2"),
        ("digest-differs", "/identity/checkpoint/digest"),
    }


@pytest.mark.parametrize("value", [None, [], 7, "x", {}])
def test_something_else_altogether(value):
    with pytest.raises(XdErrors):
        parse(value)


@pytest.mark.parametrize(
    "section", ["identity", "baseline", "interventions", "scenario", "strategy", "contract_source", "experiment_id"]
)
@pytest.mark.parametrize("junk", [None, 3, "x", [1], {"a": 1}, [[]]])
def test_junk_in_a_section_never_crashes(section, junk):
    with pytest.raises(XdErrors):
        parse(put(experiment_config(), "/" + section, junk if junk != "x" or section != "experiment_id" else "/"))


def test_a_missing_section_is_named():
    for section in ("identity", "baseline", "interventions", "scenario", "contract_version"):
        value = experiment_config()
        del value[section]
        assert ("missing-field", "") in issues(value)
    value = experiment_config()
    del value["baseline"]["training"]["sharding"]
    assert issues(value) == {("missing-field", "/baseline/training")}


# -- the file


def test_missing_and_too_large_files(tmp_path):
    with pytest.raises(XdError) as caught:
        config.load(tmp_path / "none.json")
    assert caught.value.status == Status.MISSING
    large = tmp_path / "large.json"
    large.write_text(json.dumps(experiment_config()) + " " * config.MAX_BYTES)
    with pytest.raises(XdError) as caught:
        config.load(large)
    assert caught.value.code == "too-large"


def test_paths_are_relative_to_the_file(tmp_path):
    checkpoint_directory(tmp_path / "model")
    value = experiment_config()
    value["identity"]["checkpoint"] = {"path": "../model"}
    (tmp_path / "experiments").mkdir()
    file = tmp_path / "experiments" / "trial.json"
    file.write_text(json.dumps(value))
    found = config.load(file).resolution
    assert found.locations["checkpoint"] == str(tmp_path / "model")
    assert found.identity["checkpoint"]["files"].keys() == {"config.json", "model.safetensors"}


def test_the_normalised_experiment_reads_as_itself():
    value = experiment_config(strategy="pairwise", pairs=[["batch.size", "rollout.dtype"]])
    value["identity"]["sequences"]["digest"] = canon.digest("frozen")
    once = parse(value).as_json()
    assert parse(once).as_json() == once


@pytest.mark.parametrize("part", ["checkpoint", "tokenizer", "sequences"])
def test_a_path_that_the_system_refuses_is_an_issue_in_its_place(part):
    value = experiment_config()
    value["identity"]["checkpoint"] = {"path": None}
    value["identity"]["tokenizer"] = {"id": "t", "policy": "plain", "path": None}
    value["identity"][part]["path"] = "x" * 300
    with pytest.raises(XdErrors) as caught:
        parse(value)
    assert [(issue.status, issue.path) for issue in caught.value.issues] == [(66, f"/identity/{part}/path")]
    value["identity"][part]["path"] = "x\0y"
    with pytest.raises(XdErrors) as caught:
        parse(value)
    assert [(issue.status, issue.path) for issue in caught.value.issues] == [(65, f"/identity/{part}/path")]


def test_more_pairs_than_there_are_knobs_for_are_refused_before_they_are_compared():
    value = experiment_config(strategy="pairwise", pairs=[["batch.size", "rollout.dtype"]] * 20_000)
    with pytest.raises(XdErrors) as caught:
        parse(value)
    assert [issue.path for issue in caught.value.issues] == ["/pairs"]


def test_a_pipe_is_no_config_and_says_what_to_do(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(XdError, match="not a regular file") as caught:
        config.load(tmp_path / "config.json")
    assert "relative" in caught.value.hint
