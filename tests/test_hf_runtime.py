"""Runtime hf on a tiny random Llama: right numbers, and evidence that tells the truth."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tolerances
from conftest import ROOT
from hf_fixtures import (
    PROMPT_LENS,
    Bench,
    frozen,
    greatest,
    only,
    plan,
    request,
)

from libxd import checkpoint, knobs, sequences
from libxd.errors import Status, XdError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


SEQUENCES = frozen()
#: no two prompts equal
DISTINCT = frozen(response_lens=((4,), (6,), (3,)))
NEAR = tolerances.TINY_LLAMA_FLOAT32_NATS


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench.tiny(tmp_path_factory)


@pytest.fixture(scope="module")
def teacher_forced(bench) -> np.ndarray:
    """float32 [T]: the training side's logprobs of SEQUENCES."""
    return bench.logprobs("training", SEQUENCES)


@pytest.mark.parametrize("side", ["rollout", "training"])
def test_float16_is_computed_in_and_eight_times_nearer_to_float32_than_bfloat16(bench, side):
    knob = {"rollout": "rollout__dtype", "training": "training__compute_dtype"}[side]
    exact = bench.logprobs(side, SEQUENCES, **{knob: "float32"})
    apart = {}
    for dtype in ("float16", "bfloat16"):
        engine, scores = bench.run(side, SEQUENCES, **{knob: dtype})
        shown = engine.behaviour()[knob.replace("__", ".")]
        assert shown.value == dtype, shown.evidence
        apart[dtype] = float(np.nanmean(np.abs(scores.logprobs - exact)))
    assert 4 < apart["bfloat16"] / apart["float16"] < 16



# -- numbers


@pytest.mark.parametrize("submission", ["canonical", "rotated"])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize(("mode", "share"), [("decode", False), ("decode", True), ("prefill", False)])
def test_rollout_says_what_teacher_forcing_says(bench, teacher_forced, mode, share, batch_size, submission):
    engine, scores = bench.run("rollout", SEQUENCES, rollout_mode=mode, rollout__enable_prefix_caching=share,
                               batch__size=batch_size, submission=submission)  # fmt: skip
    assert greatest(scores.logprobs, teacher_forced) < NEAR
    observed = scores.observed
    for name in ("token_ids", "positions", "attention_mask"):
        assert (getattr(observed, name) == getattr(SEQUENCES, name)).all(), name
    assert (observed.selected_ids == SEQUENCES.token_ids).all()
    assert observed.cache == ("kv_cache" if mode == "decode" else "none")
    assert scores.logits_dtype == "float32"
    shown = engine.behaviour()["batch.size"]
    assert shown.value == batch_size and sum(shown.evidence["batches"]) == SEQUENCES.num_sequences


@pytest.mark.parametrize("side", knobs.SIDES)
def test_a_quiet_nan_exactly_where_nothing_was_scored(bench, side):
    logprobs = bench.logprobs(side, SEQUENCES)
    assert logprobs.dtype == np.float32 and logprobs.shape == (SEQUENCES.num_tokens,)
    assert (np.isfinite(logprobs) == SEQUENCES.active_mask).all()
    assert set(logprobs.view(np.int32)[~SEQUENCES.active_mask]) == {0x7FC00000}


@pytest.mark.parametrize("side", knobs.SIDES)
def test_one_altered_id_moves_the_tokens_behind_it_and_no_other(bench, side):
    """The negative control of every equality here: sequence 1's first response token, changed."""
    cell = SEQUENCES.span(1).start + PROMPT_LENS[0]
    ids = SEQUENCES.token_ids.copy()
    ids[cell] = (ids[cell] + 1) % 128
    before = bench.logprobs(side, SEQUENCES)
    moved = np.abs(bench.logprobs(side, dataclasses.replace(SEQUENCES, token_ids=ids)) - before)
    own = np.zeros(SEQUENCES.num_tokens, bool)
    own[cell : SEQUENCES.span(1).stop] = True
    assert moved[own].min() > 100 * NEAR
    assert np.nanmax(moved[~own]) < NEAR


@pytest.mark.parametrize(("side", "knob"), [("rollout", "rollout__dtype"), ("training", "training__compute_dtype")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_is_another_number(bench, teacher_forced, side, knob, dtype):
    engine, scores = bench.run(side, SEQUENCES, **{knob: dtype})
    assert 0.5 > greatest(scores.logprobs, teacher_forced) > 10 * NEAR
    assert scores.logits_dtype == dtype
    assert engine.settings()[knob.replace("__", ".")].value == dtype


@pytest.mark.parametrize(
    ("side", "changes"),
    [
        ("rollout", {}),
        ("rollout", {"rollout__enable_prefix_caching": True}),
        ("rollout", {"rollout_mode": "prefill"}),
        ("training", {"training__attention_backend": "sdpa"}),
        ("training", {"training__attention_backend": "eager"}),
    ],
)
def test_padding_does_not_leak(bench, side, changes):
    """Each sequence by itself against all of them in one padded batch."""
    together = bench.logprobs(side, SEQUENCES, batch__size=16, **changes)
    engine = bench.open(side, batch__size=1, **changes)
    asked = request(side, **{"batch__size": 1, **changes})
    for sequence in range(SEQUENCES.num_sequences):
        alone = engine.score(only(SEQUENCES, sequence), asked).logprobs
        assert greatest(alone, together[SEQUENCES.span(sequence)]) < NEAR


def test_ids_beyond_the_vocabulary_are_refused(bench):
    ids = SEQUENCES.token_ids.copy()
    ids[-1] = 128
    with pytest.raises(XdError, match="beyond the vocabulary of"):
        bench.run("training", dataclasses.replace(SEQUENCES, token_ids=ids))


@pytest.mark.parametrize("side", ["rollout", "training"])
def test_sequences_beyond_the_models_context_are_refused(bench, side):
    """One of just its length is scored; the model would compute on, at positions that it was never trained for."""
    fits, too_long = (frozen((60,), ((length,),)) for length in (4, 5))
    assert np.isfinite(bench.logprobs(side, fits)[-4:]).all()
    with pytest.raises(XdError, match="longer than the context of LlamaForCausalLM") as raised:
        bench.run(side, too_long)
    assert (raised.value.status, raised.value.found, raised.value.path) == (Status.INVALID, 65, "/positions/64")


# -- what else the live engine shows


@pytest.mark.parametrize("side", knobs.SIDES)
def test_every_knob_of_a_side_is_shown(bench, side):
    engine, _ = bench.run(side, DISTINCT)
    shown = {**engine.settings(), **engine.behaviour()}
    assert {name: observation.value for name, observation in shown.items()} == {
        record.knob: record.materialized for record in plan(side).knobs
    }
    json.dumps([observation.evidence for observation in shown.values()] + [engine.describe()])
    assert engine.describe()["class"] == "LlamaForCausalLM"
    engine.close()


@pytest.mark.parametrize("side", knobs.SIDES)
def test_a_mode_left_on_and_an_optimizer_are_seen(bench, side):
    engine, _ = bench.run(side, DISTINCT)
    assert engine.state() == {"mode": "eval", "optimizer": False}
    engine.base.layers[-1].mlp.train()  # deep inside
    assert engine.state()["mode"] == "train"
    engine.model.eval()
    other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    assert engine.state() == {"mode": "eval", "optimizer": False}
    other.add_param_group({"params": [engine.base.norm.weight]})
    assert engine.state() == {"mode": "eval", "optimizer": True}


@pytest.mark.parametrize(("side", "knob"), [("rollout", "rollout.dtype"), ("training", "training.compute_dtype")])
def test_products_in_another_dtype_than_the_weights_are_seen(bench, side, knob):
    engine = bench.open(side)
    with torch.autocast("cpu", torch.bfloat16):
        engine.score(DISTINCT, request(side))
    assert engine.settings()[knob].value == "float32"
    shown = engine.behaviour()[knob]
    assert shown.value is None and shown.evidence["computed"] == ["bfloat16", "float32"]


@pytest.mark.parametrize("side", knobs.SIDES)
def test_batches_are_counted_where_they_run(bench, side):
    engine = bench.open(side)
    inner = engine._score_batch

    def one_by_one(given, batch, *rest):
        for sequence in batch:
            inner(given, [sequence], *rest)

    engine._score_batch = one_by_one
    engine.score(SEQUENCES, request(side, batch__size=4))
    assert engine.behaviour()["batch.size"].value == 1


def test_a_checkpoint_that_lacks_a_weight_is_refused(bench, tmp_path):
    from safetensors.torch import load_file, save_file

    for name in ("config.json", "model.safetensors"):
        shutil.copy(bench.directory / name, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(XdError, match="lacks weights") as error:
        Bench(tmp_path).open("training")
    assert error.value.found == ["model.norm.weight"]


def held(engine) -> dict[str, str]:
    return {
        name: checkpoint.parameter_digest(dtype, shape, [raw]) for name, dtype, shape, raw in engine.parameters()
    }


@pytest.mark.parametrize(("side", "knob"), [("rollout", "rollout__dtype"), ("training", "training__compute_dtype")])
@pytest.mark.parametrize("dtype", knobs.DTYPES)
def test_held_weights_are_the_checkpoint_cast(bench, side, knob, dtype):
    engine = bench.open(side, **{knob: dtype})
    expected = checkpoint.parameter_digests(bench.directory, dtype)
    assert held(engine) == expected
    assert "model.embed_tokens.weight" in expected and "lm_head.weight" not in expected
    engine.score(SEQUENCES, request(side))
    assert held(engine) == expected
    with torch.no_grad():
        engine.base.norm.weight[3] += 0.5
    assert {name for name, digest in held(engine).items() if digest != expected[name]} == {"model.norm.weight"}


# -- operators and semantics


@pytest.mark.parametrize("side", knobs.SIDES)
def test_the_reference_operator_keeps_what_a_bfloat16_head_rounds_away(bench, side):
    dtype = "rollout__dtype" if side == "rollout" else "training__compute_dtype"

    def by(backend: str, held: str) -> np.ndarray:
        engine, scores = bench.run(side, SEQUENCES, **{dtype: held, "logp__backend": backend})
        assert engine.behaviour()["logp.backend"].value == backend
        return scores.logprobs

    assert greatest(by("native", "float32"), by("xd.reference_logp", "float32")) < NEAR
    assert greatest(by("native", "bfloat16"), by("xd.reference_logp", "bfloat16")) > 100 * NEAR


def test_a_head_with_a_bias_takes_no_operator_of_hidden_states(bench):
    engine = bench.open("training")
    hidden = bench.open("training", logp__backend="xd.reference_logp")._operator
    engine.head.bias = torch.nn.Parameter(torch.zeros(128))
    with pytest.raises(XdError, match="bias"):
        engine.bind(hidden)


def oracle(directory: Path, temperature: float) -> np.ndarray:
    """float64 [T]: the model in float64, a sequence at a time, logits divided by the temperature."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    found = np.full(SEQUENCES.num_tokens, np.nan)
    for sequence in range(SEQUENCES.num_sequences):
        span = SEQUENCES.span(sequence)
        ids = torch.from_numpy(SEQUENCES.token_ids[span].astype(np.int64))
        with torch.inference_mode():
            logits = model(input_ids=ids.unsqueeze(0)).logits[0, :-1]
        scaled = (logits / temperature).log_softmax(-1)
        found[span.start + 1 : span.stop] = scaled.gather(1, ids[1:].unsqueeze(1)).squeeze(1).numpy()
    found[~SEQUENCES.active_mask] = np.nan
    return found


@pytest.mark.parametrize("backend", ["native", "xd.reference_logp"])
@pytest.mark.parametrize("side", knobs.SIDES)
def test_processed_logprobs_are_behind_the_temperature_and_raw_ones_before(bench, side, backend):
    by_kind = {
        kind: bench.logprobs(side, SEQUENCES, logp__backend=backend, semantics={"logprobs": kind, "temperature": 0.7})
        for kind in ("processed", "raw")
    }
    assert greatest(by_kind["processed"], oracle(bench.directory, 0.7)) < NEAR
    assert greatest(by_kind["raw"], oracle(bench.directory, 1.0)) < NEAR
    assert greatest(by_kind["processed"], by_kind["raw"]) > 100 * NEAR


# -- the chain


def test_the_chain_passes_in_float32_and_sees_bfloat16(bench, xd, tmp_path):
    sequences.write(tmp_path / "tiny.safetensors", SEQUENCES)
    config = json.loads((ROOT / "experiments" / "smollm2-fp32.json").read_text())
    config |= {"experiment_id": "tiny", "scenario_id": "tiny-decode-fp32"}
    config["identity"] |= {
        "checkpoint": {"path": str(bench.directory), "digest": None},
        "tokenizer": {"id": "none", "policy": "token_ids"},
        "sequences": {"path": "tiny.safetensors", "digest": None},
        "model": {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128},
    }
    config["interventions"] = [{"path": "rollout.dtype", "values": ["bfloat16"]}]
    (tmp_path / "tiny.json").write_text(json.dumps(config))

    passed = xd("xd-plan", "tiny.json").out
    for stage in (
        ("xd-materialize", "--runs", "runs", "--runtime", "hf"), ("xd-score", "--side", "rollout"),
        ("xd-score", "--side", "training"), ("xd-compare",), ("xd-seal",),
    ):  # fmt: skip
        ran = xd(*stage, stdin=passed)
        assert ran.status == 0, ran.err
        passed = ran.out
    baseline, changed = (tmp_path / line for line in passed.splitlines())
    for attempt, status in ((baseline, "PASS"), (changed, "MISMATCH")):
        comparison = json.loads((attempt / "comparison.json").read_text())
        assert (comparison["status"], comparison["violations"]) == (status, []), comparison
        assert comparison["counts"]["active"] == int(SEQUENCES.active_mask.sum())
    for side in knobs.SIDES:
        readback = json.loads((baseline / f"readback_{side}.json").read_text())
        assert (readback["status"], readback["refusals"]) == ("ok", [])
        assert {knob["status"] for knob in readback["knobs"]} == {"applied"}
        assert [knob["knob"] for knob in readback["knobs"]] == [knob.path for knob in knobs.of_side(side)]
