"""Runtime llamacpp with a live llama.cpp, on a tiny random Llama; the last tests go through xd's tools."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
import tiny
from libxd import checkpoint
from libxd.errors import XdError
from libxd.operators import catalog
from libxd.operators.session import OperatorSession
from libxd.runtimes import registry
from libxd.runtimes.protocol import EngineContext, Request
from libxd.scoring import observer
from libxd.scoring.evidence import Snapshot
from tolerances import AGAIN_NATS, FLOAT32_NATS
from xd_runtime_llamacpp import conversion, mapped, slot
from xd_runtime_llamacpp.engine import RolloutEngine
from xd_runtime_llamacpp.server import Answer

ENVIRONMENT = {"packages": {"torch": "0"}}
FROZEN = tiny.frozen(("what is it?", "hello"), ("what is it?", "no idea"), ("what else?", "he went"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model") / "tiny")


@contextlib.contextmanager
def opened(place, model, held=FROZEN, kind=RolloutEngine, **rollout):
    """(engine with `native` bound, the request, the operator)."""
    row = tiny.row(place, model, held, **rollout)
    plan = registry.load("llamacpp").materialize("rollout", row, ENVIRONMENT, frozenset())
    assert plan.refusals == []
    with OperatorSession(catalog.load(False)) as session:
        session.resolve("rollout", row["operators"]["selected_logprob"]["rollout"])
        engine = kind(EngineContext(row["identity"], row["locations"]).locations, plan.engine)
        engine.bind(session.instance("rollout"))
        try:
            yield engine, Request(1, "decode", "canonical", row["identity"]["semantics"]), session.instance("rollout")
        finally:
            engine.close()


@pytest.fixture(scope="module")
def scored(model, tmp_path_factory):
    """What one engine shows around one scoring."""
    with opened(tmp_path_factory.mktemp("scored"), model) as (engine, request, _):
        before = Snapshot.take(engine)
        scores = engine.score(FROZEN, request)
        behaviour, after = engine.behaviour(), Snapshot.take(engine)
        again = engine.score(FROZEN, request)
        found = {"before": before, "after": after, "scores": scores, "behaviour": behaviour, "again": again,
                 "settings": engine.settings(), "not_parameters": engine.not_parameters(),
                 "describe": engine.describe()}  # fmt: skip
    return found  # closed: a process holds one server at a time


def reference(model, held=FROZEN):
    """Logprobs float32 [T] of one pass of transformers."""
    transformers = pytest.importorskip("transformers")
    net = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, use_safetensors=True).eval()
    found = np.full(held.num_tokens, np.nan, np.float32)
    with torch.inference_mode():
        for s in range(held.num_sequences):
            span, prompt = held.span(s), int(held.prompt_lens[s])
            ids = torch.tensor(held.token_ids[span].astype(np.int64))
            logprobs = torch.log_softmax(net(ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
            found[span.start + prompt : span.stop] = logprobs[prompt - 1 :].numpy()
    return found


# -- weights


def test_the_mapped_weights_are_the_checkpoints(scored, model):
    expected = checkpoint.parameter_digests(model, "float32")
    assert scored["before"].parameters == scored["after"].parameters == expected
    assert scored["before"].dtype == "float32" and scored["not_parameters"] == []


def test_other_weights_show(model, tmp_path):
    """One element of a projection whose rows change places."""
    name = "model.layers.1.self_attn.k_proj.weight"
    other = shutil.copytree(model, tmp_path / "other")
    weights = load_file(model / "model.safetensors")
    weights[name] = weights[name].copy()
    weights[name][3, 5] += 1e-3
    save_file(weights, other / "model.safetensors", {"format": "pt"})

    class Elsewhere(RolloutEngine):
        def _write(self, directory):
            super()._write(other)

    with opened(tmp_path / "place", model, kind=Elsewhere) as (engine, _, _):
        held = Snapshot.take(engine).parameters
    expected = checkpoint.parameter_digests(model, "float32")
    assert [n for n in expected if held[n] != expected[n]] == [name]
    assert held == checkpoint.parameter_digests(other, "float32")


def test_a_weight_that_is_not_mapped_is_not_shown(model, tmp_path):
    with opened(tmp_path, model) as (engine, _, _):
        engine._path = shutil.copy(engine._path, tmp_path / "copy.gguf")  # the same bytes, which nobody mapped
        assert mapped.mappings(engine._path) == []
        assert engine.settings()["rollout.tensor_parallel_size"].value is None
        with pytest.raises(XdError, match="cannot be seen") as refused:
            list(engine.parameters())
    assert refused.value.status == 69


def test_rows_change_places_and_back():
    weight = np.arange(32 * 3, dtype=np.float32).reshape(32, 3)
    pairs = conversion.to_pairs(weight, 2)
    assert pairs[:4, 0].tolist() == [0, 24, 3, 27]  # row 0 and, half a head behind it, row 8
    assert np.array_equal(conversion.to_halves(pairs, 2), weight)


# -- numbers


def test_logprobs_are_those_of_transformers(scored, model):
    ours, theirs = scored["scores"].logprobs, reference(model)
    assert np.array_equal(np.isnan(ours), np.isnan(theirs)) and (~np.isnan(ours)).sum() == 19
    assert np.nanmax(np.abs(ours - theirs)) < FLOAT32_NATS


def test_another_model_gives_others(scored, tmp_path):
    theirs = reference(tiny.save_model(tmp_path / "other", seed=8))
    assert np.nanmax(np.abs(scored["scores"].logprobs - theirs)) > 1000 * FLOAT32_NATS


def test_the_operators_numbers_are_the_servers(scored, model, tmp_path):
    with opened(tmp_path, model) as (engine, _, _):
        ids = FROZEN.token_ids[FROZEN.span(0)].tolist()
        said = engine._server.ask(ids[:11], ids[11], logprobs=True, reuse=False)
    assert said.ids == [ids[11]]
    assert abs(said.logprobs[ids[11]] - scored["scores"].logprobs[11]) < AGAIN_NATS
    assert abs(np.exp(said.logprobs.astype(np.float64)).sum() - 1) < AGAIN_NATS  # all of the vocabulary


def test_an_engine_remembers_nothing(scored):
    assert scored["again"].logprobs.tobytes() == scored["scores"].logprobs.tobytes()
    assert scored["again"].observed.forwards == scored["scores"].observed.forwards


# -- evidence


def test_what_was_fed_is_read_from_the_slot(scored):
    seen = scored["scores"].observed
    for name in ("token_ids", "positions", "attention_mask"):
        assert np.array_equal(getattr(seen, name), getattr(FROZEN, name)), name
    assert np.array_equal(seen.scored, FROZEN.active_mask) and np.array_equal(seen.selected_ids, FROZEN.token_ids)
    assert seen.cache == "kv_cache" and seen.head_outputs is None and scored["scores"].logits_dtype is None
    assert observer.fits_mode("decode", seen.forwards, FROZEN.cu_seqlens, FROZEN.prompt_lens)


def test_knobs_are_seen_and_what_cannot_be_is_null(scored):
    shown = {name: seen.value for name, seen in {**scored["settings"], **scored["behaviour"]}.items()}
    assert shown == {
        "batch.size": 1, "rollout.tensor_parallel_size": 1, "rollout.context_parallel_size": 1,
        "rollout.dtype": "float32", "rollout.enable_prefix_caching": True, "rollout.enforce_eager": None,
        "logp.backend": "native",
    }  # fmt: skip
    assert scored["behaviour"]["rollout.dtype"].evidence == {"parameters": ["float32"], "cache": ["float32"]}
    assert scored["behaviour"]["rollout.enable_prefix_caching"].evidence == {"not_fed": 15, "could_hit": 15}
    assert scored["describe"]["file_type"] == "all F32" and scored["describe"]["slots"] == 1


def test_without_prefix_caching_every_token_is_fed(scored, model, tmp_path):
    with opened(tmp_path, model, enable_prefix_caching=False) as (engine, request, _):
        scores, seen = engine.score(FROZEN, request), engine.behaviour()["rollout.enable_prefix_caching"]
    assert seen.value is False and seen.evidence == {"not_fed": 0, "could_hit": 15}
    fed = sum(piece.count for forward in scores.observed.forwards for piece in forward)
    shared = sum(piece.count for forward in scored["scores"].observed.forwards for piece in forward)
    assert (fed, fed - shared) == (FROZEN.num_tokens, 15)
    assert np.nanmax(np.abs(scores.logprobs - scored["scores"].logprobs)) < FLOAT32_NATS


def test_a_token_that_the_slot_lacks_was_not_fed(model, tmp_path):
    with opened(tmp_path, model) as (engine, request, _):
        whole = engine._server.slot
        engine._server.slot = lambda: dataclasses.replace(whole(), token_ids=whole().token_ids[:-1])
        seen = engine.score(FROZEN, request).observed
    assert seen.token_ids[FROZEN.cu_seqlens[1:] - 1].tolist() == [-1, -1, -1]
    assert not seen.attention_mask[FROZEN.cu_seqlens[1:] - 1].any()


# -- the trap: a character of several tokens


@pytest.mark.parametrize(("answer", "place"), [("a\N{LLAMA}b", 5), ("\N{LATIN SMALL LETTER E WITH ACUTE}", 4)])
def test_a_character_of_several_tokens_is_refused(model, tmp_path, answer, place):
    with opened(tmp_path, model, held := tiny.frozen(("fine", "ok"), ("what", answer))) as (engine, request, _):
        with pytest.raises(XdError, match="part of a character") as refused:
            engine.score(held, request)
        whole = tiny.frozen(("fine", "ok"), ("what", "a b"))
        assert np.isfinite(engine.score(whole, request).logprobs[whole.active_mask]).all()
    line = refused.value.line()
    assert refused.value.status == 69 and line.startswith(f"sequence 1#/{place}: ") and "\n" not in line


@pytest.mark.parametrize("given", [[98], [97, 98], []])
def test_other_ids_than_asked_are_never_taken(model, tmp_path, given):
    with opened(tmp_path, model) as (engine, request, operator):
        asked = engine._server.ask

        def shifted(*arguments, **options):
            answer = asked(*arguments, **options)
            return Answer(given, answer.logprobs, answer.cached, answer.fed)

        engine._server.ask = shifted
        with pytest.raises(XdError) as refused:
            engine.score(FROZEN, request)
        assert refused.value.status == 69 and operator.calls == 0


# -- the slot's file


def slot_bytes(ids=(5, 6, 7), positions=None, kind=0, sequence=0, more=(0, 0), layers=2, transposed=1):
    positions = range(len(ids)) if positions is None else positions
    words = [-1, 1, len(ids), *ids, 0]
    raw = struct.pack(f"<III{len(words)}iII", 0x67677371, 4, len(words), *words, 1, len(ids))
    raw += b"".join(struct.pack("<iIi", position, 1, sequence) for position in positions)
    raw += struct.pack("<IIII", transposed, layers, *more)
    raw += (struct.pack("<iQ", kind, 8) + bytes(8 * len(ids))) * layers
    value = struct.pack("<iII", kind, 4, 2) if transposed else struct.pack("<iQ", kind, 8)
    return raw + (value + bytes(8 * len(ids))) * layers


@pytest.mark.parametrize("transposed", [0, 1])
def test_a_slot_is_read_to_its_last_byte(transposed):
    found = slot.read(slot_bytes(kind=1, transposed=transposed))
    assert found.token_ids.tolist() == [5, 6, 7] and found.positions.tolist() == [0, 1, 2]
    assert found.dtypes == {"float16"} and found.layers == 2


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        slot_bytes()[:-1],
        slot_bytes() + b"\0",
        b"\0" + slot_bytes()[1:],
        slot_bytes(sequence=1),
        slot_bytes(more=(1, 0)),
        slot_bytes()[:8] + struct.pack("<I", 1 << 30) + slot_bytes()[12:],
    ],
    ids=["empty", "short", "long", "magic", "sequence", "words", "count"],
)
def test_another_layout_is_refused(raw):
    with pytest.raises(XdError, match="layout") as refused:
        slot.read(raw)
    assert refused.value.status == 69


# -- bad input


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"model_type": "qwen3"}, 69, "another one"),
        ({"attention_bias": True}, 69, "another one"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0}}, 69, "another one"),
        ({"rms_norm_eps": None}, 65, "sizes"),
        ({"max_position_embeddings": 12}, 65, "longer than the model's context"),
    ],
)
def test_a_model_of_another_kind_is_refused(tmp_path, changes, status, words):
    model = tiny.save_model(tmp_path / "model", **changes)
    with pytest.raises(XdError, match=words) as refused, opened(tmp_path / "place", model):
        pass
    assert refused.value.status == status


def test_sequences_that_the_server_cannot_be_given(model, tmp_path):
    masked, moved, foreign = (copy.deepcopy(FROZEN) for _ in range(3))
    masked.attention_mask[0], foreign.token_ids[-1] = False, tiny.VOCABULARY
    moved.positions[:] += 1
    with opened(tmp_path, model) as (engine, request, _):
        for held, status, words in ((masked, 69, "masks nothing"), (moved, 69, "positions from 0"),
                                    (foreign, 65, "beyond the vocabulary")):  # fmt: skip
            with pytest.raises(XdError, match=words) as refused:
                engine.score(held, request)
            assert refused.value.status == status


@pytest.mark.parametrize(
    ("knob", "value"),
    [("dtype", "bfloat16"), ("tensor_parallel_size", 2), ("context_parallel_size", 2), ("enforce_eager", False)],
)
def test_what_it_cannot_do_is_unsupported_with_a_reason(model, tmp_path, knob, value):
    row = tiny.row(tmp_path, model, FROZEN, **{knob: value})
    plan = registry.load("llamacpp").materialize("rollout", row, ENVIRONMENT, frozenset())
    unsupported = {record.knob: record.evidence for record in plan.knobs if record.status == "unsupported"}
    assert list(unsupported) == [f"rollout.{knob}"] and unsupported[f"rollout.{knob}"]


# -- the chain


def chain(place, model, held, *options, runtime="llamacpp", **rollout):
    """(attempt, status and stderr of xd-score --side rollout, comparison or None)."""
    row = tiny.row(place, model, held, **rollout)
    made = tiny.tool("xd-materialize", "--runs", place / "runs", "--runtime-rollout", runtime, "--runtime-training",
                     "hf", *options, stdin=json.dumps(row) + "\n")  # fmt: skip
    assert made.returncode == 0, made.stderr
    rollout = tiny.tool("xd-score", "--side", "rollout", stdin=made.stdout)
    attempt = Path(made.stdout.strip())
    if rollout.returncode:
        return attempt, rollout, None
    training = tiny.tool("xd-score", "--side", "training", stdin=rollout.stdout)
    sealed = tiny.tool("xd-seal", stdin=tiny.tool("xd-compare", stdin=training.stdout).stdout)
    assert sealed.returncode == 0 and (attempt / "COMPLETE").exists(), training.stderr + sealed.stderr
    return attempt, rollout, json.loads((attempt / "comparison.json").read_text())


@pytest.mark.parametrize("caching", [True, False])
def test_the_chain_judges_llamacpp_against_transformers(model, tmp_path, caching):
    pytest.importorskip("transformers")
    attempt, _, comparison = chain(tmp_path, model, FROZEN, enable_prefix_caching=caching)
    assert comparison["status"] == "PASS" and comparison["violations"] == []
    assert comparison["counts"]["active"] == 19
    readback = json.loads((attempt / "readback_rollout.json").read_text())
    marked = [knob["knob"] for knob in readback["knobs"] if knob["status"] == "unobservable"]
    assert marked == ["rollout.enforce_eager"]
    assert [k["actual"] for k in readback["knobs"] if k["knob"] == "rollout.enable_prefix_caching"] == [caching]
    assert readback["observed"]["semantics"] == {"temperature": 1, "top_p": None, "top_k": None, "penalties": None}


@pytest.mark.parametrize(
    ("runtime", "code", "place"),
    [
        ("llamacpp-holds-other-weights", "weights", "/parameters/model.layers.1.mlp.down_proj.weight"),
        ("llamacpp-feeds-other-id", "token-ids", "/observed/token_ids"),
    ],
)
def test_another_engine_than_it_says_is_an_invalid_identity(model, tmp_path, runtime, code, place):
    pytest.importorskip("transformers")
    attempt, _, comparison = chain(tmp_path, model, FROZEN, runtime=runtime)
    assert comparison["status"] == "INVALID_IDENTITY" and (attempt / "token_diffs.safetensors").exists()
    first = comparison["violations"][0]
    assert (first["code"], first["side"]) == (code, "rollout")
    assert first["path"] == f"readback_rollout.json#{place}"


def test_strict_refuses_what_cannot_be_seen(model, tmp_path):
    attempt, rollout, _ = chain(tmp_path, model, FROZEN, "--strict")
    assert rollout.returncode == 69 and "rollout.enforce_eager: the engine cannot show" in rollout.stderr
    assert not (attempt / "score_rollout.safetensors").exists()


def test_the_trap_ends_an_attempt_with_69_and_one_line(model, tmp_path):
    attempt, rollout, _ = chain(tmp_path, model, tiny.frozen(("fine", "ok"), ("what", "a\N{LLAMA}b")))
    assert rollout.returncode == 69 and rollout.stdout == ""
    assert "part of a character" in rollout.stderr and len(rollout.stderr.splitlines()) == 1
    assert not (attempt / "score_rollout.safetensors").exists()
