"""Identity: resolved at planning, expected of each scorer, judged before any number."""

from __future__ import annotations

import copy
import json

import pytest
from planning_fixtures import (
    HEADS,
    KV_HEADS,
    VOCABULARY,
    checkpoint_directory,
    evidence,
    experiment_config,
    held_weights,
    parse,
    pinned_identity,
    put,
)

from libxd import canon, checkpoint, identity, judge, planner, resolution, schema, sequences
from libxd.errors import XdError, XdErrors
from libxd.rundir import SIDES

# -- names to digests


def resolved(base, **parts):
    value = experiment_config()
    for part, item in parts.items():
        value["identity"][part] = item
    return parse(value, base).resolution


def test_a_checkpoint_is_its_weight_files_and_its_config(tmp_path):
    model = checkpoint_directory(tmp_path / "model")
    found = resolved(tmp_path, checkpoint={"path": "model"})
    files = {name: canon.digest_file(model / name) for name in ("config.json", "model.safetensors")}
    assert found.identity["checkpoint"] == {"digest": canon.digest(files), "files": files, "synthetic": None}
    (model / "model.safetensors.index.json").write_text("{}")
    indexed = resolved(tmp_path, checkpoint={"path": "model"}).identity["checkpoint"]
    assert "model.safetensors.index.json" in indexed["files"]


def test_a_tokenizer_is_its_files(tmp_path):
    model = checkpoint_directory(tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ x }}")
    found = resolved(tmp_path, tokenizer={"id": "t", "policy": "plain", "path": "model"}).identity["tokenizer"]
    assert found["files"].keys() == {"tokenizer.json", "chat_template.jinja"}


@pytest.mark.parametrize("name", ["spiece.model", "sentencepiece.bpe.model", "tekken.json", "qwen.tiktoken"])
def test_a_tokenizer_of_another_library_is_one(tmp_path, name):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_text("ranks")
    (tmp_path / "model" / "README.md").write_text("not part of it")
    found = resolved(tmp_path, tokenizer={"id": "t", "policy": "plain", "path": "model"}).identity["tokenizer"]
    assert found["files"].keys() == {name}
    assert found["digest"] == canon.digest(found["files"])


def test_what_is_not_at_hand_is_null_and_listed(tmp_path):
    found = resolved(
        tmp_path, checkpoint={"path": "nowhere"}, tokenizer={"id": "t", "policy": "plain"}, sequences={"path": "gone"}
    )
    assert [found.identity[part]["digest"] for part in ("checkpoint", "tokenizer", "sequences")] == [None] * 3
    assert found.locations == {"checkpoint": None, "tokenizer": None, "sequences": None}
    assert found.missing == [
        "/identity/checkpoint: not at hand: nowhere (relative to the config)", "/identity/tokenizer: no path is given",
        "/identity/sequences: not at hand: gone (relative to the config)"]  # fmt: skip
    assert found.identity["sequences"]["num_tokens"] is None


def test_a_declared_digest_stands_for_files_that_are_not_at_hand(tmp_path):
    found = resolved(tmp_path, checkpoint={"path": "nowhere", "digest": "1" * 64}, sequences={"digest": "2" * 64})
    assert found.identity["checkpoint"]["digest"] == "1" * 64
    assert found.identity["sequences"]["digest"] == "2" * 64
    assert len(found.missing) == 2


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors"])
def test_half_a_checkpoint_is_none(tmp_path, lost):
    (checkpoint_directory(tmp_path / "model") / lost).unlink()
    found = resolved(tmp_path, checkpoint={"path": "model"})
    assert found.identity["checkpoint"]["digest"] is None and found.locations["checkpoint"] is None
    assert "no config.json or no safetensors file" in found.missing[0]


def test_a_declared_digest_must_be_what_is_found(tmp_path):
    model = checkpoint_directory(tmp_path / "model")
    tokenizer = {"id": "t", "policy": "plain", "path": "model"}
    right = canon.digest(resolution.checkpoint_files(model))
    resolved(tmp_path, checkpoint={"path": "model", "digest": right})
    with pytest.raises(XdErrors) as caught:
        resolved(tmp_path, checkpoint={"path": "model", "digest": "1" * 64}, tokenizer=tokenizer | {"digest": "2" * 64})
    assert [(issue.code, issue.path) for issue in caught.value.issues] == [
        ("digest-differs", f"/identity/{part}/digest") for part in ("checkpoint", "tokenizer")
    ]
    assert caught.value.issues[0].found == right


def test_model_facts_come_from_the_checkpoint_and_must_agree(tmp_path):
    checkpoint_directory(tmp_path / "model")
    value = experiment_config()
    value["identity"]["checkpoint"] = {"path": "model"}
    del value["identity"]["model"]
    facts = parse(value, tmp_path).resolution.identity["model"]
    assert facts == {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY}
    value["identity"]["model"] = facts | {"vocab_size": 260}
    with pytest.raises(XdErrors) as caught:
        parse(value, tmp_path)
    assert [(issue.code, issue.path) for issue in caught.value.issues] == [
        ("model-differs", "/identity/model/vocab_size")]  # fmt: skip


def test_without_grouped_query_attention_every_head_has_its_own_keys(tmp_path):
    model = checkpoint_directory(tmp_path / "model")
    (model / "config.json").write_text(json.dumps({"num_attention_heads": 6, "vocab_size": 10}))
    value = experiment_config()
    value["identity"]["checkpoint"] = {"path": "model"}
    del value["identity"]["model"]
    assert parse(value, tmp_path).resolution.identity["model"]["num_key_value_heads"] == 6


def test_a_broken_config_or_sequences_file_is_an_issue_in_its_place(tmp_path):
    model = checkpoint_directory(tmp_path / "model")
    (model / "config.json").write_text("{")
    (tmp_path / "sequences").write_bytes(b"no tensors")
    with pytest.raises(XdErrors) as caught:
        resolved(tmp_path, checkpoint={"path": "model"}, sequences={"path": "sequences"})
    assert {issue.path for issue in caught.value.issues} == {"/identity/checkpoint/path", "/identity/sequences/path"}


def test_an_adapter_and_code_beside_a_checkpoint_are_part_of_it(tmp_path):
    model = checkpoint_directory(tmp_path / "model")
    plain = resolution.checkpoint_files(model)
    for name in ("adapter_config.json", "modeling_own.py", "adapter_model.safetensors"):
        (model / name).write_text("{}")
    (model / "README.md").write_text("says nothing")
    found = resolution.checkpoint_files(model)
    assert found.keys() - plain.keys() == {"adapter_config.json", "modeling_own.py", "adapter_model.safetensors"}
    assert resolution.checkpoint_files(model, weights=False).keys() == {
        "config.json", "adapter_config.json", "modeling_own.py"}  # fmt: skip


@pytest.mark.parametrize(("made_by", "refused"), [("1" * 64, True), (None, False), ("the same", False)])
def test_sequences_made_with_another_tokenizer_are_an_issue(tmp_path, monkeypatch, made_by, refused):
    model = checkpoint_directory(tmp_path / "model")
    tokenizer = {"id": "t", "policy": "plain", "path": "model"}
    if made_by == "the same":
        made_by = canon.digest(resolution.tokenizer_files(model))
    monkeypatch.setattr(sequences, "identity", lambda path: dict(pinned_identity()["sequences"]))
    # another model is no issue: rescoring another policy's tokens is what off-policy means
    header = {"model": {"digest": "2" * 64}, "tokenizer": {"policy": "plain", "digest": made_by}}
    monkeypatch.setattr(sequences, "header", lambda path: header)
    (tmp_path / "s").write_bytes(b"")
    if not refused:
        assert resolved(tmp_path, tokenizer=tokenizer, sequences={"path": "s"}).issues == []
        return
    with pytest.raises(XdErrors) as caught:
        resolved(tmp_path, tokenizer=tokenizer, sequences={"path": "s"})
    assert [(i.code, i.path, i.found) for i in caught.value.issues] == [
        ("tokenizer-differs", "/identity/sequences/path", "1" * 64)]  # fmt: skip


def test_sequences_are_digested_by_their_tensors(tmp_path, monkeypatch):
    pinned = pinned_identity()["sequences"]
    monkeypatch.setattr(sequences, "header", lambda path: {"schema_version": "xd.sequences.v1"})
    monkeypatch.setattr(sequences, "identity", lambda path: dict(pinned))
    (tmp_path / "s").write_bytes(b"")
    found = resolved(tmp_path, sequences={"path": "s", "digest": pinned["digest"]})
    assert found.identity["sequences"] == pinned and not found.missing
    with pytest.raises(XdErrors):
        resolved(tmp_path, sequences={"path": "s", "digest": "1" * 64})


# -- expected


SIDE_PLANS = {
    "rollout": {"runtime": "none", "knobs": [{"knob": "rollout.dtype", "materialized": "bfloat16"}]},
    "training": {"runtime": "none", "knobs": [{"knob": "training.compute_dtype", "materialized": "float32"}]},
}


def row_of(tmp_path):
    value = experiment_config()
    value["identity"]["checkpoint"] = {"path": "model"}
    return planner.rows(parse(value, tmp_path))[0]


def test_each_side_must_hold_the_checkpoint_cast_to_its_own_dtype(tmp_path, monkeypatch):
    checkpoint_directory(tmp_path / "model")
    monkeypatch.setattr(checkpoint, "parameter_digests", lambda path, dtype: held_weights(dtype)["parameters"])
    row = row_of(tmp_path)
    found = schema.validate("identity", identity.expected(row, SIDE_PLANS), "x")
    assert found["weights"] == {"rollout": held_weights("bfloat16"), "training": held_weights("float32")}
    assert {name: found[name] for name in row["identity"]} == row["identity"]


def test_weights_that_changed_since_planning_are_refused(tmp_path, monkeypatch):
    model = checkpoint_directory(tmp_path / "model")
    monkeypatch.setattr(checkpoint, "parameter_digests", lambda path, dtype: held_weights(dtype)["parameters"])
    row = row_of(tmp_path)
    (model / "model.safetensors").write_bytes(b"updated")
    with pytest.raises(XdError) as caught:
        identity.expected(row, SIDE_PLANS)
    assert caught.value.code == "digest-differs"


def test_without_a_checkpoint_at_hand_the_weights_are_null(tmp_path):
    found = identity.expected(row_of(tmp_path), SIDE_PLANS)
    assert found["weights"] == {"rollout": None, "training": None}
    schema.validate("identity", found, "x")


def test_the_runtime_says_what_a_synthetic_model_holds(monkeypatch):
    from libxd.runtimes import registry

    class Maker:
        @staticmethod
        def synthetic_parameters(synthetic, dtype):
            return {synthetic["name"]: canon.digest([synthetic["seed"], dtype])}

    monkeypatch.setattr(registry, "load", lambda name: Maker if name == "maker" else object())
    plans = {side: plan | {"runtime": "maker"} for side, plan in SIDE_PLANS.items()}
    row = planner.rows(parse(experiment_config()))[0]
    weights = identity.expected(row, plans)["weights"]
    assert weights["training"]["parameters"] == {"xd-smoke-1": canon.digest([7, "float32"])}
    assert weights["rollout"] != weights["training"]
    assert identity.expected(row, SIDE_PLANS)["weights"]["rollout"] is None


# -- violations


def judged(strict=True, spoil=None, expected=None):
    """Violations of two faithful scorers after `spoil(readbacks, scores)`."""
    pinned = expected or pinned_identity()
    pairs = {side: evidence(pinned_identity(), side) for side in SIDES}
    readbacks, scores = ({side: pair[i] for side, pair in pairs.items()} for i in (0, 1))
    if spoil:
        spoil(readbacks, scores)
    return judge.violations(pinned, readbacks, scores, strict)


def observed(side, name, value):
    """Spoil what a side observed, in readback and score file alike."""

    def spoil(readbacks, scores):
        put(readbacks[side]["observed"], name, value)
        put(scores[side]["metadata"]["observed"], name, value)

    return spoil


def test_faithful_scorers_violate_nothing():
    assert judged(strict=True) == [] == judged(strict=False)


SPOILT = [
    ("token_ids", "1" * 64, "token-ids"),
    ("selected_ids", "1" * 64, "selected-ids"),
    ("cu_seqlens", "1" * 64, "cu-seqlens"),
    ("active_mask", "1" * 64, "active-mask"),
    ("attention_mask", "1" * 64, "attention-mask"),
    ("positions", "1" * 64, "positions"),
    ("weights_before", "1" * 64, "weights"),
    ("weights_after", "1" * 64, "weights-changed"),
    ("weights_dtype", "float16", "weights-dtype"),
    ("mode_before", "train", "mode-before"),
    ("mode_after", "train", "mode-changed"),
    ("optimizer", True, "optimizer"),
    ("scoring_mode", "prefill", "scoring-mode"),
    ("model_state", "post_update", "model-state"),
    ("semantics/temperature", 0.7, "semantics"),
    ("semantics/penalties/presence", 0.5, "semantics"),
]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("name", "value", "code"), SPOILT)
def test_one_wrong_observation_is_named(side, strict, name, value, code):
    found = judged(strict, observed(side, name, value))
    first = found[0]
    assert (first["code"], first["side"]) == (code, side)
    assert first["path"] == f"readback_{side}.json#/observed/{name}"
    assert first["observed"] == value and first["expected"] not in (None, value)
    assert {entry["side"] for entry in found} == {side}


@pytest.mark.parametrize(
    ("side", "policy", "cache", "refused"),
    [
        ("training", "forbidden", "kv_cache", True),
        ("training", "forbidden", "none", False),
        ("training", "allowed", "kv_cache", False),
        ("training", "allowed", "none", False),
        ("rollout", "kv_cache", "none", True),
        ("rollout", "kv_cache", "kv_cache", False),
        ("rollout", "forbidden", "kv_cache", True),
    ],
)
def test_cache_policy(side, policy, cache, refused):
    pinned = put(pinned_identity(), f"/cache_policy/{side}", policy)
    codes = [entry["code"] for entry in judged(True, observed(side, "cache", cache), pinned)]
    assert codes == (["cache"] if refused else [])


@pytest.mark.parametrize(
    "name",
    ["token_ids", "selected_ids", "cu_seqlens", "active_mask", "attention_mask", "positions", "weights_before",
     "weights_after", "weights_dtype", "mode_before", "mode_after", "optimizer", "cache", "scoring_mode", "semantics",
     "model_state"],
)  # fmt: skip
def test_what_was_not_observed_is_refused_when_strict_and_otherwise_counts_as_declared(name):
    def spoil(readbacks, scores):
        observed("training", name, None)(readbacks, scores)
        if name == "semantics":  # a score file says what its readback does
            scores["training"]["metadata"][name] = None

    assert [(entry["code"], entry["path"]) for entry in judged(True, spoil)] == [
        ("unobservable", f"readback_training.json#/observed/{name}")]  # fmt: skip
    assert judged(False, spoil) == []


def test_unobserved_and_undeclared_is_refused_in_any_mode():
    pinned = pinned_identity()
    pinned["sequences"]["positions"] = None
    pinned["weights"]["rollout"] = pinned["checkpoint"]["digest"] = None

    def spoil(readbacks, scores):
        for name in ("positions", "weights_before", "weights_after"):
            observed("rollout", name, None)(readbacks, scores)

    found = {(entry["code"], entry["path"]) for entry in judged(False, spoil, pinned) if entry["side"] == "rollout"}
    assert found == {
        ("unobservable", f"readback_rollout.json#/observed/{name}")
        for name in ("positions", "weights_before", "weights_after")
    }


def test_weights_that_nobody_saw_are_declared_by_the_checkpoints_digest_alone():
    pinned = pinned_identity()
    pinned["weights"] = dict.fromkeys(SIDES)

    def spoil(readbacks, scores):
        for side in SIDES:
            for name in ("weights_before", "weights_after", "weights_dtype"):
                observed(side, name, None)(readbacks, scores)
            readbacks[side]["parameters"] = {}

    assert judged(False, spoil, pinned) == []
    assert {entry["code"] for entry in judged(True, spoil, pinned)} == {"unobservable"}
    pinned["checkpoint"]["digest"] = None
    assert len(judged(False, spoil, pinned)) == 4


def test_semantics_that_nobody_declared_are_refused_in_any_mode():
    """null in identity.json: an imported attempt's. A mode that is not declared is no demand, as the cache policy."""
    unknown = dict.fromkeys(("temperature", "top_p", "top_k", "penalties"))

    def codes(seen, declared):
        def spoil(readbacks, scores):
            for side in SIDES:
                observed(side, "semantics", seen)(readbacks, scores)
                scores[side]["metadata"]["semantics"] = seen
                if side == "rollout":
                    observed(side, "scoring_mode", None)(readbacks, scores)
                    scores[side]["metadata"]["mode"] = None

        pinned = {**pinned_identity(), "rollout_mode": None}
        if not declared:
            pinned["semantics"] = None
        return {entry["code"] for entry in judged(False, spoil, pinned)}

    for seen in (None, unknown):
        assert codes(seen, declared=False) == {"unobservable"}
        assert codes(seen, declared=True) == set()
    assert codes({**unknown, "temperature": 1.0}, declared=False) == {"unpinned"}
    assert codes({**unknown, "temperature": 0.7}, declared=True) == {"semantics"}


def test_observed_but_pinned_by_nothing_is_refused():
    pinned = pinned_identity()
    pinned["weights"]["rollout"] = None
    codes = [(entry["code"], entry["path"]) for entry in judged(False, None, pinned)]
    assert codes == [("unpinned", "readback_rollout.json#/observed/weights_before")]


def test_the_first_wrong_parameter_is_named():
    def spoil(readbacks, scores):
        for i in (1, 2):
            readbacks["rollout"]["parameters"][f"model.layers.{i}.weight"] = "1" * 64
        observed("rollout", "weights_before", canon.digest(readbacks["rollout"]["parameters"]))(readbacks, scores)
        observed("rollout", "weights_after", canon.digest(readbacks["rollout"]["parameters"]))(readbacks, scores)

    (found,) = judged(True, spoil)
    assert (found["code"], found["path"]) == ("weights", "readback_rollout.json#/parameters/model.layers.1.weight")
    assert found["observed"] == "1" * 64 and found["expected"] == canon.digest(["bfloat16", 1])


@pytest.mark.parametrize("extra", [True, False])
def test_a_parameter_too_many_or_too_few_is_named(extra):
    def spoil(readbacks, scores):
        parameters = readbacks["training"]["parameters"]
        if extra:
            parameters["adapter.weight"] = "1" * 64
        else:
            del parameters["model.layers.0.weight"]
        for name in ("weights_before", "weights_after"):
            observed("training", name, canon.digest(parameters))(readbacks, scores)

    (found,) = judged(True, spoil)
    name = "adapter.weight" if extra else "model.layers.0.weight"
    assert found["path"] == f"readback_training.json#/parameters/{name}"
    assert (found["expected"] is None) == extra


def test_the_first_parameter_changed_while_scoring_is_named():
    def spoil(readbacks, scores):
        changed = {f"model.layers.{i}.weight": str(i) * 64 for i in (2, 1)}
        readbacks["training"]["changed_parameters"] = changed
        observed("training", "weights_after", "3" * 64)(readbacks, scores)

    (found,) = judged(True, spoil)
    assert found["code"] == "weights-changed"
    assert found["path"] == "readback_training.json#/changed_parameters/model.layers.1.weight"
    assert (found["expected"], found["observed"]) == (canon.digest(["bfloat16", 1]), "1" * 64)


@pytest.mark.parametrize("name", ["token_ids", "active_mask", "cu_seqlens"])
def test_the_score_files_own_tensors_are_held_to_the_identity(name):
    def spoil(readbacks, scores):
        scores["rollout"][name] = "1" * 64

    (found,) = judged(True, spoil)
    assert (found["code"], found["path"]) == (name.replace("_", "-"), f"score_rollout.safetensors#/{name}")


def test_a_score_file_whose_tensors_have_no_comparable_form_is_judged_by_the_rest():
    def spoil(readbacks, scores):
        for name in ("token_ids", "active_mask", "cu_seqlens"):
            del scores["rollout"][name]

    assert judged(True, spoil) == []


def test_a_score_file_of_another_scoring_is_caught():
    def spoil(readbacks, scores):
        scores["rollout"]["metadata"]["observed"]["positions"] = "1" * 64

    (found,) = judged(True, spoil)
    assert (found["code"], found["path"]) == ("score-file", "score_rollout.safetensors#/xd/observed/positions")


@pytest.mark.parametrize(
    ("pointer", "value", "code"),
    [
        ("mode", "prefill", "scoring-mode"),
        ("semantics/top_p", 0.9, "semantics"),
        ("semantics/temperature", 0.7, "semantics"),
    ],
)
def test_a_score_file_that_means_another_logprob_is_caught(pointer, value, code):
    def spoil(readbacks, scores):
        put(scores["rollout"]["metadata"], pointer, value)

    (found,) = judged(True, spoil)
    assert (found["code"], found["path"]) == (code, f"score_rollout.safetensors#/xd/{pointer}")


@pytest.mark.parametrize("name", list(identity.UNPROCESSED))
def test_processing_that_was_not_seen_to_be_absent_is_refused_when_strict(name):
    def spoil(readbacks, scores):
        put(scores["rollout"]["metadata"], f"semantics/{name}", None)
        observed("rollout", f"semantics/{name}", None)(readbacks, scores)

    (found,) = judged(True, spoil)
    assert (found["code"], found["path"]) == ("unobservable", f"readback_rollout.json#/observed/semantics/{name}")
    assert judged(False, spoil) == []


def test_processed_logprobs_are_behind_what_the_identity_says_and_raw_ones_behind_nothing():
    pinned = pinned_identity()
    pinned["semantics"] |= {"logprobs": "processed", "temperature": 0.7}
    assert {(v["code"], v["expected"], v["observed"]) for v in judged(True, None, pinned)} == {("semantics", 0.7, 1.0)}
    pinned["semantics"]["logprobs"] = "raw"  # then 0.7 is what the tokens were sampled at, and no more
    assert judged(True, None, pinned) == []


def test_without_an_active_token_no_logprob_need_mean_anything():
    def spoil(readbacks, scores):
        scores["rollout"]["metadata"]["semantics"] = None
        observed("rollout", "semantics", None)(readbacks, scores)

    assert [v["code"] for v in judged(True, spoil)] == ["unobservable"]
    assert judged(True, spoil, put(pinned_identity(), "/sequences/num_active", 0)) == []


def test_a_buffer_that_the_sides_hold_differently_is_named():
    def spoil(readbacks, scores):
        readbacks["training"]["buffers"]["rotary"]["digest"] = "5" * 64

    for strict in (True, False):
        (found,) = judged(strict, spoil)
        assert (found["code"], found["path"]) == ("buffers", "readback_training.json#/buffers/rotary/digest")
        assert (found["expected"], found["observed"]) == ("4" * 64, "5" * 64)


def test_a_buffer_in_a_dtype_of_its_own_is_named_where_the_sides_have_one_dtype():
    def spoil(readbacks, scores):
        readbacks["training"]["buffers"]["rotary"] = {"dtype": "bfloat16", "digest": "5" * 64}

    (found,) = judged(True, spoil)
    assert (found["path"], found["observed"]) == ("readback_training.json#/buffers/rotary/dtype", "bfloat16")

    def in_two(readbacks, scores):
        spoil(readbacks, scores)
        observed("training", "weights_dtype", "float32")(readbacks, scores)

    assert "buffers" not in {v["code"] for v in judged(True, in_two)}


def test_buffers_of_other_names_are_not_set_side_by_side():
    def spoil(readbacks, scores):
        readbacks["training"]["buffers"] = {"other": {"dtype": "float32", "digest": "5" * 64}}

    assert judged(True, spoil) == []


def without(side, name, said):
    """A side whose model has no parameter for a tensor of the checkpoint; `said`: and which says so."""

    def spoil(readbacks, scores):
        parameters = readbacks[side]["parameters"]
        del parameters[name]
        readbacks[side]["not_parameters"] = [name] if said else []
        for key in ("weights_before", "weights_after"):
            observed(side, key, canon.digest(parameters))(readbacks, scores)

    return spoil


def test_a_tensor_that_is_no_parameter_of_the_model_is_left_out_where_neither_side_has_it():
    name = "model.layers.1.weight"

    def both(said):
        def spoil(readbacks, scores):
            for side in SIDES:
                without(side, name, said)(readbacks, scores)

        return spoil

    assert judged(True, both(said=True)) == []
    assert {v["code"] for v in judged(True, both(said=False))} == {"weights"}


def test_a_parameter_that_the_other_side_holds_cannot_be_said_to_be_none():
    name = "model.layers.1.weight"
    (found,) = judged(True, without("training", name, said=True))
    assert (found["code"], found["side"]) == ("weights", "training")
    assert found["path"] == f"readback_training.json#/parameters/{name}"


def test_a_prefill_experiment_wants_prefill_of_rollout_alone():
    pinned = put(pinned_identity(), "/rollout_mode", "prefill")
    assert {(entry["code"], entry["side"]) for entry in judged(True, None, pinned)} == {("scoring-mode", "rollout")}


def test_several_violations_are_all_listed():
    def spoil(readbacks, scores):
        observed("rollout", "token_ids", "1" * 64)(readbacks, scores)
        observed("training", "optimizer", True)(readbacks, scores)

    assert [(entry["side"], entry["code"]) for entry in judged(True, spoil)] == [
        ("rollout", "token-ids"), ("training", "optimizer")]  # fmt: skip


def test_pinning_keeps_what_digests_stand_for_out_of_the_case_id():
    whole = pinned_identity()
    other = copy.deepcopy(whole)
    other["checkpoint"]["files"] = {"x": "1" * 64}
    other["sequences"]["token_ids"] = None
    assert identity.pinned(whole) == identity.pinned(other)
    other["sequences"]["digest"] = None
    assert identity.pinned(whole) != identity.pinned(other)
