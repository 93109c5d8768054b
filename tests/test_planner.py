"""Rows: what a plan holds, what a case id depends on, and rows that were tampered with."""

from __future__ import annotations

import contextlib
import copy
import json
import os

import pytest
from planning_fixtures import checkpoint_directory, experiment_config, parse, put

from libxd import canon, contract, knobs, planner
from libxd.errors import Status, XdError, XdErrors


def rows(value=None, **arguments):
    return planner.rows(parse(value or experiment_config()), **arguments)


def changes(row):
    return [(change["path"], change["value"]) for change in row["intervention"]]


def test_one_at_a_time_is_the_baseline_and_one_changed_knob_a_case():
    plan = rows()
    assert [changes(row) for row in plan] == [
        [], [("batch.size", 1)], [("batch.size", 2)], [("rollout.dtype", "float32")]]  # fmt: skip
    baseline = plan[0]["values"]
    assert list(baseline) == list(knobs.CATALOG)
    for row in plan[1:]:
        differing = {knob for knob in baseline if row["values"][knob] != baseline[knob]}
        assert differing == {path for path, _ in changes(row)}
    assert len({row["case_id"] for row in plan}) == len(plan)


def test_pairwise_crosses_listed_pairs_only():
    value = experiment_config(
        strategy="pairwise",
        pairs=[["rollout.dtype", "batch.size"]],
        interventions=[
            {"path": "batch.size", "values": [1, 2]},
            {"path": "rollout.dtype", "values": ["float32", "float16"]},
            {"path": "rollout.enforce_eager", "values": [False]},
        ],
    )
    assert [changes(row) for row in rows(value)] == [
        [],
        [("rollout.dtype", "float32"), ("batch.size", 1)], [("rollout.dtype", "float32"), ("batch.size", 2)],
        [("rollout.dtype", "float16"), ("batch.size", 1)], [("rollout.dtype", "float16"), ("batch.size", 2)],
    ]  # fmt: skip


def test_a_bisection_is_its_two_ends_and_any_subset_between_is_a_row_of_it():
    items = [{"path": "batch.size", "values": [1]}, {"path": "rollout.dtype", "values": ["fp32"]},
             {"path": "logp.backend", "values": ["xd.triton_logp"]}]  # fmt: skip
    near, far = rows(experiment_config(strategy="bisect", interventions=items))
    assert (changes(near), changes(far)) == ([], [("batch.size", 1), ("rollout.dtype", "float32"),
                                                  ("logp.backend", "xd.triton_logp")])  # fmt: skip
    assert planner.subset(far, []) == near
    between = planner.subset(far, ["logp.backend", "batch.size"])
    assert changes(between) == [("batch.size", 1), ("logp.backend", "xd.triton_logp")]
    assert planner.read_row(canon.dumps(between), "x") == between
    again = planner.read_row(canon.dumps(planner.subset(far, ["batch.size"], 1)), "x")
    assert (again["repeat"], again["case_id"]) == (1, planner.subset(far, ["batch.size"])["case_id"])
    for row, strategy in ((between, "one_at_a_time"), (far, "pairwise"), (again, "one_at_a_time")):
        forgery = copy.deepcopy(row) | {"strategy": strategy}
        rehash(forgery)
        with pytest.raises(XdErrors):
            planner.read_row(canon.dumps(forgery), "x")


def test_the_ruler_of_a_bisection_is_its_baselines_all_along():
    items = [{"path": path, "values": ["float32"]} for path in ("rollout.dtype", "training.compute_dtype")]
    near, far = rows(experiment_config(strategy="bisect", interventions=items))
    assert near["contract"] == far["contract"] == planner.subset(far, ["rollout.dtype"])["contract"]
    assert near["contract"]["dtype"] == "bfloat16"


def test_no_intervention_is_the_baseline_alone():
    assert len(rows(experiment_config(interventions=[]))) == 1


def test_repeats_follow_the_baseline_and_are_the_same_case():
    plan = rows(repeats=2, submission="rotated")
    assert [(row["repeat"], row["submission"]) for row in plan[:4]] == [
        (0, "canonical"), (1, "rotated"), (2, "rotated"), (0, "canonical")]  # fmt: skip
    assert {row["case_id"] for row in plan[:3]} == {plan[0]["case_id"]}
    assert [changes(row) for row in plan[:3]] == [[], [], []]


def test_operators_follow_a_logp_intervention_and_an_explicit_mapping_overrides_the_knob():
    value = experiment_config(interventions=[{"path": "logp.backend", "values": ["rlkernel.reference_logp"]}])
    baseline, changed = rows(value)
    for side in knobs.SIDES:
        assert planner.requested(baseline, side, "logp.backend") == "native"
        assert planner.requested(changed, side, "logp.backend") == "xd.reference_logp"
    mapping = {"rollout": "native", "training": {"backend": "smoke_only.logp_offset", "options": {"offset_nats": 1}}}
    (row,) = rows(experiment_config(interventions=[], operators={"selected_logprob": mapping}))
    assert row["values"]["logp.backend"] == "native"
    assert planner.requested(row, "training", "logp.backend") == "smoke_only.logp_offset"
    assert row["operators"]["selected_logprob"]["training"]["options"] == {"offset_nats": 1}
    assert planner.requested(row, "training", "training.compute_dtype") == "bfloat16"


@pytest.mark.parametrize(
    ("rollout", "training", "looser"),
    [("float32", "float32", "float32"), ("float32", "bfloat16", "bfloat16"), ("bfloat16", "float16", "bfloat16"),
     ("float16", "float32", "float16")],
)  # fmt: skip
def test_one_ruler_an_experiment_the_looser_of_the_baselines_dtypes(rollout, training, looser):
    value = experiment_config(interventions=[{"path": "batch.size", "values": [1]}])
    put(value, "/baseline/rollout/dtype", rollout)
    put(value, "/baseline/training/compute_dtype", training)
    other = "bfloat16" if rollout != "bfloat16" else "float32"
    value["interventions"].append({"path": "rollout.dtype", "values": [other]})
    assert {row["contract"]["dtype"] for row in rows(value)} == {looser}


def test_no_row_holds_a_threshold():
    text = b"".join(planner.encode(rows())).decode().lower()
    assert "threshold" not in text
    for value in contract.lookup("ws1", "current").thresholds_nats.values():
        assert repr(value) not in text


def test_derived_values():
    value = put(experiment_config(), "/baseline/rollout/tensor_parallel_size", 12)
    put(value, "/baseline/rollout/context_parallel_size", 2)
    value["interventions"] = [{"path": "training.sharding", "values": ["fsdp2"]}]
    baseline, fsdp = rows(value)
    assert baseline["derived"] == {
        "rollout_world_size": 24, "training_world_size": 1, "attention_heads_per_rank": 1, "kv_heads_per_rank": 1,
        "kv_head_replicas": 3, "vocab_size": 259, "vocab_padded_size": 264, "vocab_shard_size": 22}  # fmt: skip
    assert fsdp["derived"]["training_world_size"] is None


def test_an_unknown_model_derives_nothing_of_it():
    value = experiment_config()
    del value["identity"]["model"]
    row = rows(value)[0]
    assert row["derived"]["vocab_size"] is None and row["derived"]["rollout_world_size"] == 1
    assert not row["executable"]
    assert any(reason.startswith("/identity/model: ") for reason in row["missing"])


# -- what a case id depends on

OPTIONS = {"backend": "native", "options": {"a": 1}}


@pytest.mark.parametrize(
    ("pointer", "item"),
    [
        ("/baseline/batch/size", 4),
        ("/scenario_id", "other"),
        ("/scenario/level", "S1"),
        ("/scenario/device", "cuda"),
        ("/contract_source", "bitwise"),
        ("/identity/checkpoint/synthetic/seed", 8),
        ("/identity/tokenizer/id", "other"),
        ("/identity/tokenizer/policy", "plain"),
        ("/identity/sequences/digest", "1" * 64),
        ("/identity/semantics/temperature", 0.7),
        ("/identity/rollout_mode", "prefill"),
        ("/identity/cache_policy/training", "allowed"),
        ("/operators", {"selected_logprob": {"rollout": "native", "training": "xd.reference_logp"}}),
        ("/operators", {"selected_logprob": {"rollout": "native", "training": OPTIONS}}),
    ],
)
def test_a_case_id_depends_on(pointer, item):
    assert rows(put(experiment_config(), pointer, item))[0]["case_id"] != rows()[0]["case_id"]


@pytest.mark.parametrize(
    ("pointer", "item"),
    [
        ("/experiment_id", "other"),
        ("/strict_fallback", False),
        ("/interventions", []),
        ("/baseline/rollout/dtype", "bf16"),
        ("/contract_version", "1"),
        ("/operators", {"selected_logprob": {"rollout": "native", "training": {"backend": "native", "options": {}}}}),
    ],
)
def test_a_case_id_does_not_depend_on(pointer, item):
    assert rows(put(experiment_config(), pointer, item))[0]["case_id"] == rows()[0]["case_id"]


def test_a_case_id_is_the_documented_digest():
    row = rows()[0]
    identity = row["identity"]
    covered = {
        "values": row["values"],
        "operators": row["operators"],
        "contract": row["contract"],
        "scenario": {"id": "trial-cpu", "level": "S0", "device": "cpu"},
        "identity": {
            "checkpoint": {"digest": canon.digest({"name": "xd-smoke-1", "seed": 7}),
                           "synthetic": {"name": "xd-smoke-1", "seed": 7}},
            "tokenizer": {"id": "none", "policy": "token_ids", "digest": None},
            "sequences": {"digest": None, "packing": "none"},
            **{name: identity[name] for name in ("semantics", "rollout_mode", "cache_policy", "model_state")},
        },
    }  # fmt: skip
    assert row["case_digest"] == canon.digest(covered)
    assert row["case_id"] == "c-" + row["case_digest"][:16]


def test_the_same_case_with_files_at_hand_and_from_their_digests_alone(tmp_path):
    model = checkpoint_directory(tmp_path / "model")
    value = experiment_config()
    value["identity"]["checkpoint"] = {"path": str(model)}
    value["identity"]["tokenizer"] = {"id": "t", "policy": "chat_template", "path": str(model)}
    here = parse(value)
    elsewhere = parse(here.as_json())
    assert here.resolution.locations["checkpoint"] and not elsewhere.resolution.locations["checkpoint"]
    ids = [[row["case_id"] for row in planner.rows(experiment)] for experiment in (here, elsewhere)]
    assert ids[0] == ids[1]
    (model / "model.safetensors").write_bytes(b"other weights")
    assert [row["case_id"] for row in rows(value)] != ids[0]


def test_the_same_case_whatever_of_it_is_declared_and_whatever_is_at_hand(tmp_path):
    """Files or their digest, the model's sizes declared, read from the checkpoint, or unknown: one case."""
    model = checkpoint_directory(tmp_path / "model")
    sizes = experiment_config()["identity"]["model"]
    named = {"path": str(model)}
    pinned = {"digest": parse(with_identity(checkpoint=named)).resolution.identity["checkpoint"]["digest"]}
    gone = {"path": str(tmp_path / "gone"), **pinned}
    ids = {
        tuple(row["case_id"] for row in planner.rows(parse(with_identity(checkpoint=checkpoint, model=declared))))
        for checkpoint in (named, {**named, **pinned}, pinned, gone)
        for declared in (sizes, None)
    }
    assert len(ids) == 1
    unknown = {"path": str(tmp_path / "gone")}  # of an unknown checkpoint the sizes are all there is
    ids = {
        planner.rows(parse(with_identity(checkpoint=unknown, model=declared)))[0]["case_id"]
        for declared in (sizes, {**sizes, "vocab_size": 260}, None)
    }
    assert len(ids) == 3


def with_identity(**parts):
    value = experiment_config()
    value["identity"] = {name: part for name, part in {**value["identity"], **parts}.items() if part is not None}
    return value


# -- bytes


def test_encoding_is_the_canonical_form_of_each_row():
    plan = rows(repeats=3)
    assert list(planner.encode(plan)) == [canon.dumps(row) for row in plan]


def test_encoding_tells_true_from_one():
    """Equal scalars of different types are different bytes: the memory of parts must not confuse them."""
    plan = rows(experiment_config(interventions=[{"path": "batch.size", "values": [1]}]))
    assert b'"batch.size":1' in list(planner.encode(plan))[1]
    assert b'"rollout.enforce_eager":true' in list(planner.encode(plan))[1]


# -- reading


def test_every_row_reads_back():
    for row in rows(repeats=1, submission="rotated"):
        assert planner.read_row(canon.dumps(row), "x") == row
        assert planner.read_row(json.dumps(row), "x") == row


def forged(mutate, index=1):
    row = copy.deepcopy(rows(repeats=0)[index])
    mutate(row)
    with pytest.raises(XdErrors) as caught:
        planner.read_row(canon.dumps(row), "x")
    assert caught.value.status == Status.INVALID
    return {(issue.code, issue.path) for issue in caught.value.issues}


def rehash(row):
    row["case_digest"] = planner.case_digest(row)
    row["case_id"] = "c-" + row["case_digest"][:16]
    row["request_digest"] = planner.request_digest(row)


def test_a_row_whose_content_was_edited_is_refused():
    assert ("forged-row", "/case_digest") in forged(lambda row: put(row, "/values/training.sharding", "fsdp"))
    assert ("forged-row", "/case_id") in forged(lambda row: put(row, "/case_id", "c-" + "0" * 16))
    assert ("forged-row", "/case_digest") in forged(lambda row: put(row, "/identity/rollout_mode", "prefill"))


@pytest.mark.parametrize(
    ("pointer", "item", "path"),
    [
        ("/values/batch.size", 5, "/values/batch.size"),
        ("/intervention", [], "/values/batch.size"),
        ("/intervention/0/value", 8, "/intervention/0/value"),
        ("/baseline/training.sharding", "fsdp", "/values/training.sharding"),
        ("/strategy", "pairwise", "/intervention"),
        ("/identity/sequences/num_active", 5, "/identity/sequences/token_ids"),
        ("/identity/sequences/token_ids", "0" * 64, "/identity/sequences/selected_ids"),
        ("/identity/model", None, "/missing"),
        ("/locations/checkpoint", "/nonexistent", "/locations/checkpoint"),
        ("/locations/tokenizer", "/nonexistent", "/locations/tokenizer"),
        ("/locations/sequences", "/nonexistent", "/locations/sequences"),
        ("/missing", [], "/missing"),
        ("/values/rollout.tensor_parallel_size", 2, "/derived"),
        ("/contract/dtype", "float32", "/contract/dtype"),
        ("/submission", "rotated", "/submission"),
        ("/executable", True, "/executable"),
        ("/repeat", 1, "/intervention"),
        ("/identity/checkpoint/synthetic/seed", 9, "/identity/checkpoint/digest"),
        ("/identity/checkpoint/files", {"a": "0" * 64}, "/identity/checkpoint/digest"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused_though_its_digest_fits(pointer, item, path):
    def mutate(row):
        put(row, pointer, item)
        rehash(row)

    assert ("forged-row", path) in forged(mutate)


@pytest.mark.parametrize(
    ("pointer", "item"),
    [("/strict_fallback", False), ("/intervention/0/allow_fallback", True), ("/experiment_id", "other")],
)
def test_how_a_case_is_tried_is_covered_by_a_digest_of_its_own(pointer, item):
    """Nothing else of a row would tell."""
    assert forged(lambda row: put(row, pointer, item)) == {("forged-row", "/request_digest")}


def test_a_baseline_is_no_intervention_that_repeats_it():
    def mutate(row):
        row["intervention"] = [{"path": "training.sharding", "value": "unsharded", "allow_fallback": True}]
        rehash(row)

    assert ("forged-row", "/intervention/0/value") in forged(mutate, index=0)


def test_operators_that_contradict_the_intervention_are_refused():
    value = experiment_config(interventions=[{"path": "logp.backend", "values": ["xd.reference_logp"]}])
    row = copy.deepcopy(rows(value)[1])
    row["operators"]["selected_logprob"]["training"]["backend"] = "native"
    rehash(row)
    with pytest.raises(XdErrors) as caught:
        planner.read_row(canon.dumps(row), "x")
    assert [issue.path for issue in caught.value.issues] == ["/operators"]


def test_a_float_for_an_integer_has_the_same_canonical_bytes_and_is_refused():
    row = rows()[1]
    text = json.dumps(row).replace('"batch.size": 1,', '"batch.size": 1.0,')
    with pytest.raises(XdErrors) as caught:
        planner.read_row(text, "x")
    assert caught.value.issues[0].code == "wrong-type"


@pytest.mark.parametrize("line", ["", "{", "[]", "{}", "null", '{"a":1,"a":2}', '{"a":NaN}'])
def test_junk_is_one_clear_refusal(line):
    with pytest.raises(XdError) as caught:
        planner.read_row(line, "stdin:3")
    assert caught.value.status == Status.INVALID
    assert "stdin:3" in caught.value.line()


# -- the run directory


def publish(tmp_path, value, **arguments):
    experiment = parse(value)
    encoded = list(planner.encode(planner.rows(experiment, **arguments)))
    return planner.publish_plan(tmp_path / "runs", experiment, encoded), encoded


def test_a_plan_is_published_and_pointed_at(tmp_path):
    first, encoded = publish(tmp_path, experiment_config())
    run = tmp_path / "runs" / "trial"
    assert (run / "plan.jsonl").read_bytes() == b"".join(line + b"\n" for line in encoded)
    assert os.readlink(run / "plan") == f"plans/{first.name}"
    assert os.readlink(run / "plan.jsonl") == "plan/plan.jsonl"
    assert publish(tmp_path, experiment_config())[0] == first

    second, _ = publish(tmp_path, experiment_config(), repeats=1)
    assert second != first and (first / "plan.jsonl").exists()
    assert os.readlink(run / "experiment.json") == "plan/experiment.json"
    assert os.readlink(run / "plan") == f"plans/{second.name}"
    publish(tmp_path, experiment_config())
    assert os.readlink(run / "plan") == f"plans/{first.name}"
    assert os.readlink(run / "plan.jsonl") == "plan/plan.jsonl"
    assert sorted(os.listdir(run)) == ["experiment.json", "plan", "plan.jsonl", "plans"]


def test_a_file_in_the_place_of_the_link_is_kept(tmp_path):
    (tmp_path / "runs" / "trial").mkdir(parents=True)
    (tmp_path / "runs" / "trial" / "plan.jsonl").write_text("mine")
    with pytest.raises(XdError) as caught:
        publish(tmp_path, experiment_config())
    assert caught.value.status == Status.CONFLICT
    assert (tmp_path / "runs" / "trial" / "plan.jsonl").read_text() == "mine"


def test_the_published_experiment_gives_the_same_cases(tmp_path):
    plan, encoded = publish(tmp_path, experiment_config())
    again = planner.rows(parse(json.loads((plan / "experiment.json").read_bytes())))
    assert [row["case_id"] for row in again] == [json.loads(line)["case_id"] for line in encoded]


@pytest.mark.parametrize("moves", range(4))
def test_a_plan_that_is_killed_while_it_is_pointed_at_leaves_one_plan(tmp_path, monkeypatch, moves):
    """Whatever was reached: experiment.json and plan.jsonl are of the same plan."""
    publish(tmp_path, experiment_config())
    real, left = planner.publish.point, iter(range(moves))

    def point(link, target):
        if next(left, None) is None:
            raise KeyboardInterrupt
        real(link, target)

    monkeypatch.setattr(planner.publish, "point", point)
    with contextlib.suppress(KeyboardInterrupt):
        publish(tmp_path, experiment_config(), repeats=1)
    run = tmp_path / "runs" / "trial"
    assert len({(run / name).resolve().parent for name in ("experiment.json", "plan.jsonl")}) == 1
