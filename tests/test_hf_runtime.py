"""Runtime hf on a tiny random Llama: what it would build, right numbers, and evidence that tells the truth."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tolerances
from conftest import ROOT
from hf_fixtures import (
    ENVIRONMENT,
    LAYERS,
    PROMPT_LENS,
    Bench,
    frozen,
    greatest,
    joined,
    only,
    plan,
    request,
    save_model,
)

from libxd import checkpoint, environment, knobs, sequences
from libxd.errors import Status, XdError
from libxd.runtimes.hf import runtime as hf_runtime
from libxd.runtimes.protocol import Observation

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from libxd.runtimes.hf.attention import AttentionCalls  # noqa: E402
from libxd.runtimes.hf.prefix import PrefixStore  # noqa: E402

SEQUENCES = frozen()
#: no two prompts equal
DISTINCT = frozen(response_lens=((4,), (6,), (3,)))
NEAR = tolerances.TINY_LLAMA_FLOAT32_NATS
needs_compiler = pytest.mark.skipif(ENVIRONMENT["compiler"] is None, reason="no C++ compiler")
GPU = {"driver": "13.0", "devices": [{"name": "a GPU", "capability": "9.0"}]}
GPUS = {**GPU, "devices": GPU["devices"] * 2}


@pytest.fixture(scope="session")
def bench(tmp_path_factory) -> Bench:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_model(directory)
    return Bench(directory)


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



# -- materialising


@pytest.mark.parametrize("side", knobs.SIDES)
def test_every_knob_of_a_side_has_a_record_and_the_baseline_is_applied(side):
    made = plan(side)
    assert [record.knob for record in made.knobs] == [knob.path for knob in knobs.of_side(side)]
    for record in made.knobs:
        assert (record.status, record.materialized) == ("applied", record.requested), record
        assert record.lifecycle == knobs.CATALOG[record.knob].lifecycle and record.evidence
    assert made.refusals == []


@pytest.mark.parametrize(
    ("side", "changes"),
    [
        ("rollout", {"batch__size": 1}),
        ("training", {"batch__size": 1}),
        ("rollout", {"rollout__tensor_parallel_size": 2}),
        ("rollout", {"rollout__context_parallel_size": 2}),
        ("rollout", {"rollout__tensor_parallel_size": 2, "device": "cuda", "cuda": GPUS}),
        ("training", {"training__sharding": "fsdp"}),
        ("training", {"training__sharding": "fsdp", "device": "cuda", "cuda": GPUS}),
        ("rollout", {"rollout__dtype": "bfloat16"}),
        ("rollout", {"rollout__enable_prefix_caching": True}),
        ("rollout", {"rollout__enforce_eager": False}),
        ("training", {"training__attention_backend": "sdpa"}),
        ("training", {"training__attention_backend": "flex_attention"}),
        ("training", {"training__compute_dtype": "float16"}),
        ("training", {"logp__backend": "xd.reference_logp"}),
        ("rollout", {"rollout__enforce_eager": False, "lacks": ("compiler",), "device": "cuda", "cuda": GPU,
                     "packages": {"triton": "3.6"}}),
    ],
)  # fmt: skip
def test_what_can_be_done_is_applied(side, changes):
    made = plan(side, **changes)
    (name,) = (name.replace("__", ".") for name in changes if "__" in name)
    (record,) = (record for record in made.knobs if record.knob == name)
    asked = changes[name.replace(".", "__")]
    assert (record.status, record.requested, record.materialized) == ("applied", asked, asked)
    assert made.refusals == []
    # a knob of a request leaves the engine as it is; one of construction is in its fingerprint
    fingerprints = (made.construction, made.context, made.process)
    unchanged = plan(side, **{key: value for key, value in changes.items() if "__" not in key})
    same = fingerprints == (unchanged.construction, unchanged.context, unchanged.process)
    assert same == (name in ("batch.size", "logp.backend"))


@pytest.mark.parametrize(
    ("side", "changes", "reason"),
    [
        ("rollout", {"rollout__tensor_parallel_size": 4}, "2 key-value heads"),
        ("rollout", {"rollout__tensor_parallel_size": 2, "device": "cuda", "cuda": GPU}, "this machine has 1"),
        ("rollout", {"rollout__context_parallel_size": 2, "device": "cuda", "cuda": GPU}, "this machine has 1"),
        ("rollout", {"rollout__enforce_eager": False, "lacks": ("compiler",)}, "C++ compiler"),
        ("rollout", {"rollout__enforce_eager": False, "rollout_mode": "prefill"}, "decoding steps"),
        ("rollout", {"rollout__enable_prefix_caching": True, "rollout_mode": "prefill"}, "prefill"),
        ("training", {"training__sharding": "fsdp", "device": "cuda", "cuda": GPU}, "two ranks"),
        ("training", {"training__attention_backend": "flash_attention_2"}, "CUDA alone"),
        ("training", {"training__attention_backend": "flash_attention_3", "device": "cuda", "cuda": GPU},
         "flash-attn-3"),
        ("training", {"training__attention_backend": "flex_attention", "lacks": ("compiler",)}, "C++ compiler"),
        ("rollout", {"rollout__enforce_eager": False, "lacks": ("triton",), "device": "cuda", "cuda": GPU}, "triton"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_unsupported_with_the_reason(side, changes, reason):
    made = plan(side, **changes)
    (record,) = (record for record in made.knobs if record.status != "applied")
    assert record.knob.replace(".", "__") in changes
    assert (record.status, record.materialized) == ("unsupported", None)
    assert reason in record.evidence


def test_a_compiled_path_and_ranks_do_not_go_together():
    made = plan("rollout", rollout__enforce_eager=False, rollout__context_parallel_size=2)
    (record,) = (record for record in made.knobs if record.status != "applied")
    assert record.knob == "rollout.enforce_eager" and "other ranks" in record.evidence


def test_a_world_is_planned():
    made = plan("rollout", rollout__tensor_parallel_size=2, rollout__context_parallel_size=3)
    assert made.process == {"device": "cpu", **made.context}
    assert made.context == {
        "world_size": 6, "tensor_parallel_size": 2, "context_parallel_size": 3, "rank_order": ["context", "tensor"],
        "vocabulary_rows": [[0, 64], [64, 128]],
    }  # fmt: skip
    assert plan("training", training__sharding="fsdp").context == {"world_size": 2, "sharding": "fsdp"}


def test_a_launcher_brings_devices_that_this_machine_lacks():
    asked = {"training__sharding": "fsdp", "rollout__tensor_parallel_size": 2, "device": "cuda", "cuda": GPU}
    for side, change in (("training", "training.sharding"), ("rollout", "rollout.tensor_parallel_size")):
        (record,) = (r for r in plan(side, variables={"XD_RANKS": "2"}, **asked).knobs if r.knob == change)
        assert record.status == "applied"
    assert plan("training", variables={"XD_RANKS": "16"}, **asked).engine["world_size"] == 16
    with pytest.raises(XdError, match="no number of ranks"):
        plan("training", variables={"XD_RANKS": "\uff12"}, **asked)


def test_packages_go_by_the_names_that_an_environment_has():
    assert set(hf_runtime._PACKAGE_OF.values()) <= set(environment.PACKAGES)


def test_only_a_declared_fallback_falls_back():
    asked = {"training__attention_backend": "flash_attention_2"}
    knob = "training.attention_backend"
    (record,) = (record for record in plan("training", (knob,), **asked).knobs if record.knob == knob)
    assert (record.status, record.requested, record.materialized) == ("fallback", "flash_attention_2", "sdpa")
    assert "CUDA alone" in record.evidence and "sdpa" in record.evidence
    declared = plan("rollout", ("rollout.tensor_parallel_size",), rollout__tensor_parallel_size=4)  # there is none
    assert [r.status for r in declared.knobs if r.knob == "rollout.tensor_parallel_size"] == ["unsupported"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cuda"}, "CUDA device"),
        ({"synthetic": {"name": "xd-smoke-1", "seed": 7}}, "no synthetic model"),
        ({"lacks": ("transformers",)}, "transformers is not installed"),
        ({"lacks": ("torch",)}, "torch is not installed"),
        ({"semantics": {"logprobs": "processed", "top_k": 5}}, "top-k"),
        ({"semantics": {"logprobs": "processed", "top_p": 0.9}}, "top-p"),
    ],
)
@pytest.mark.parametrize("side", knobs.SIDES)
def test_reasons_of_no_knob_refuse_the_side(side, changes, reason):
    (refusal,) = plan(side, **changes).refusals
    assert reason in refusal


def test_materialising_imports_no_torch():
    code = (
        "import sys; from hf_fixtures import plan\n"
        "assert plan('rollout').knobs and plan('training', training__attention_backend='flash_attention_2').knobs\n"
        "sys.exit(' '.join({'torch', 'transformers', 'libxd.runtimes.hf.engine'} & set(sys.modules)) or 0)"
    )
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **path})
    assert ran.returncode == 0, ran.stderr


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


# -- prefix caching


def caching(engine) -> Observation:
    return engine.behaviour()["rollout.enable_prefix_caching"]


def test_samples_of_a_prompt_share_its_prefix(bench):
    plain, off = bench.run("rollout", SEQUENCES, batch__size=4)
    sharing, on = bench.run("rollout", SEQUENCES, batch__size=4, rollout__enable_prefix_caching=True)
    assert greatest(on.logprobs, off.logprobs) < NEAR
    rows, prompts = SEQUENCES.num_sequences, len(PROMPT_LENS)
    shown = caching(sharing)
    assert shown.value is True
    # batches 0-3, 4-7 and 8: the second takes prompt 1 from the first, the third prompt 2 from the second
    assert shown.evidence == {"prompts": rows, "distinct": prompts, "computed": prompts, "stored": prompts,
                              "held_at_most": 2, "prefills": [[2, 7], [1, 7]]}  # fmt: skip
    shown = caching(plain)
    assert shown.value is False
    assert shown.evidence == {"prompts": rows, "distinct": prompts, "computed": rows, "stored": 0,
                              "held_at_most": 0, "prefills": [[4, 7], [4, 7], [1, 5]]}  # fmt: skip
    # prefixes of one scoring are not those of the next
    sharing.score(SEQUENCES, request("rollout"))
    assert caching(sharing).evidence["computed"] == prompts


#: the first sample of every prompt, then the second, then the third
INTERLEAVED = (0, 3, 6, 1, 4, 7, 2, 5, 8)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("order", [range(9), INTERLEAVED])
def test_prefix_caching_decides_reuse_and_nothing_else(bench, order, batch_size):
    """On and off prefill the same batches at the same width, with a mask; on leaves out the rows that were computed."""
    batches = [list(order)[first : first + batch_size] for first in range(0, 9, batch_size)]
    expected, known = {False: [], True: []}, set()
    for batch in batches:
        prompts = [sequence // 3 for sequence in batch]
        width = max(PROMPT_LENS[prompt] for prompt in prompts)
        expected[False].append([len(batch), width])
        if new := set(prompts) - known:
            expected[True].append([len(new), width])
        known |= new
    given = joined([only(SEQUENCES, sequence) for sequence in order])
    for share in (False, True):
        engine, _ = bench.run("rollout", given, rollout__enable_prefix_caching=share, batch__size=batch_size)
        assert caching(engine).evidence["prefills"] == expected[share]
        calls = engine.behaviour()["rollout.enforce_eager"].evidence["eager_attention"]
        assert calls["masked"] == calls["calls"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_where_nothing_is_reused_prefix_caching_changes_no_bit(bench, batch_size, dtype):
    by_share = {
        share: bench.logprobs("rollout", DISTINCT, rollout__enable_prefix_caching=share, batch__size=batch_size,
                              rollout__dtype=dtype)
        for share in (False, True)
    }  # fmt: skip
    assert by_share[True].tobytes() == by_share[False].tobytes()
    other = bench.logprobs("rollout", DISTINCT, batch__size=batch_size, rollout__dtype="float16")
    assert other.tobytes() != by_share[False].tobytes()


@pytest.mark.parametrize("share", [True, False])
def test_without_equal_prompts_prefix_caching_still_shows(bench, share):
    engine, _ = bench.run("rollout", DISTINCT, rollout__enable_prefix_caching=share)
    shown = caching(engine)
    assert shown.value is share and shown.evidence["computed"] == shown.evidence["prompts"]


class Forgetful(PrefixStore):
    """Keeps what it is given and never finds it."""

    def __contains__(self, key: str) -> bool:
        return False


def test_prefixes_that_are_kept_and_computed_again_are_not_shared(bench):
    engine = bench.open("rollout", rollout__enable_prefix_caching=True)
    engine._prefixes = Forgetful()
    engine.score(SEQUENCES, request("rollout", batch__size=2))
    shown = caching(engine)
    assert shown.value is None and shown.evidence["computed"] == shown.evidence["stored"] > len(PROMPT_LENS)


def test_equal_ids_at_other_positions_are_another_prefix(bench):
    positions = SEQUENCES.positions.copy()
    positions[SEQUENCES.span(1)] += 5
    moved = dataclasses.replace(SEQUENCES, positions=positions)
    engine, scores = bench.run("rollout", moved, rollout__enable_prefix_caching=True)
    assert (scores.observed.positions == positions).all()
    assert caching(engine).evidence["stored"] == len(PROMPT_LENS) + 1


def test_a_prefix_lives_until_its_last_sample_and_keeps_no_batch_alive(bench, monkeypatch):
    engine = bench.open("rollout", rollout__enable_prefix_caching=True)
    held, sizes = [], []
    take = PrefixStore.take

    def watched(store, key):
        prefix = take(store, key)
        held.append(len(store))
        sizes.extend((t.untyped_storage().nbytes(), t.numel() * t.element_size())
                     for t in (prefix.hidden, *(part for layer in prefix.layers for part in layer)))  # fmt: skip
        return prefix

    monkeypatch.setattr(PrefixStore, "take", watched)
    engine.score(SEQUENCES, request("rollout", batch__size=3))
    assert held == [1, 1, 0] * 3  # a prompt a batch, gone with its third sample
    assert all(storage == own for storage, own in sizes)
    assert len(engine._prefixes) == 0
    engine.score(SEQUENCES, request("rollout", batch__size=9))
    assert max(held) == 3 and len(engine._prefixes) == 0


def test_a_scoring_that_breaks_off_leaves_no_prefix(bench):
    engine = bench.open("rollout", rollout__enable_prefix_caching=True)
    step, engine._stepper = engine._stepper, None  # no step can be taken
    with pytest.raises(Exception, match="NoneType"):
        engine.score(SEQUENCES, request("rollout", batch__size=2))
    assert engine._prefixes.stored and len(engine._prefixes) == 0
    engine._stepper = step


# -- the compiled path


@needs_compiler
def test_compiled_steps_really_run_compiled(bench):
    eager, expected = bench.run("rollout", SEQUENCES)
    compiled, scores = bench.run("rollout", SEQUENCES, rollout__enforce_eager=False)
    assert greatest(scores.logprobs, expected.logprobs) < NEAR
    assert (scores.observed.token_ids == SEQUENCES.token_ids).all() and scores.observed.attention_mask.all()
    shown = compiled.behaviour()["rollout.enforce_eager"]
    assert shown.value is False
    assert shown.evidence["graphs"] >= 1 and shown.evidence["graph_runs"] == shown.evidence["decode_steps"] > 0
    shown = eager.behaviour()["rollout.enforce_eager"]
    assert shown.value is True
    assert (shown.evidence["graphs"], shown.evidence["graph_runs"]) == (0, 0)
    assert shown.evidence["decode_steps"] == compiled._steps
    # run in part alone, nothing is claimed
    compiled._compiled.runs -= 1
    assert compiled.behaviour()["rollout.enforce_eager"].value is None
    # whoever steps around the graph is seen
    compiled._stepper = compiled.base
    compiled.score(SEQUENCES, request("rollout"))
    assert compiled.behaviour()["rollout.enforce_eager"].value is True


@needs_compiler
def test_compiled_numbers_do_not_depend_on_what_was_scored_before(bench):
    """Kernels are chosen for the sizes that a graph is compiled for: those of another case must not serve this one."""
    asked = {"rollout__enforce_eager": False}
    fresh, expected = bench.run("rollout", SEQUENCES, batch__size=8, **asked)
    graphs = fresh.behaviour()["rollout.enforce_eager"].evidence["graphs"]
    fresh.close()
    engine = bench.open("rollout", **asked)
    smaller = engine.score(SEQUENCES, request("rollout", batch__size=1, **asked))
    again = engine.score(SEQUENCES, request("rollout", batch__size=8, **asked))
    assert engine.behaviour()["rollout.enforce_eager"].evidence["graphs"] == graphs  # compiled anew, none left over
    assert again.logprobs.tobytes() == expected.logprobs.tobytes()
    assert smaller.logprobs.tobytes() != expected.logprobs.tobytes()
    engine.close()


@needs_compiler
def test_a_step_that_is_not_one_graph_is_refused(bench):
    engine = bench.open("rollout", rollout__enforce_eager=False)
    norm = engine.base.norm.forward

    def broken(states):
        torch._dynamo.graph_break()
        return norm(states)

    engine.base.norm.forward = broken
    with pytest.raises(XdError, match="not one graph") as refused:
        engine.score(SEQUENCES, request("rollout"))
    assert refused.value.status == Status.REFUSED
    engine.close()


@needs_compiler
def test_a_closed_engine_leaves_the_next_one_room_to_compile(bench):
    """torch compiles one function so many times a process, then runs it eager: here three times."""
    with torch._dynamo.config.patch(recompile_limit=3):
        torch.compiler.reset()  # what other tests compiled
        for _engine in range(3):
            engine, _ = bench.run("rollout", SEQUENCES, rollout__enforce_eager=False)
            shown = engine.behaviour()["rollout.enforce_eager"]
            assert shown.value is False, shown.evidence
            engine.close()


# -- attention


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_attention_is_counted_a_layer_and_batch(bench, teacher_forced, backend):
    engine, scores = bench.run("training", SEQUENCES, training__attention_backend=backend, batch__size=4)
    shown = engine.behaviour()["training.attention_backend"]
    assert (shown.value, shown.evidence["calls"]) == (backend, {backend: LAYERS * 3})
    if backend == "sdpa":  # the last of the three batches holds one sequence, without padding
        assert shown.evidence["masked"] == {"sdpa": LAYERS * 2}
    assert greatest(scores.logprobs, teacher_forced) < NEAR


@needs_compiler
def test_flex_attention_runs_on_the_cpu_and_compiles_for_each_scoring_anew(bench, teacher_forced):
    engine = bench.open("training", training__attention_backend="flex_attention")
    graphs = []
    for batch_size in (9, 4):
        torch._dynamo.utils.counters.clear()
        scores = engine.score(SEQUENCES, request("training", batch__size=batch_size))
        assert greatest(scores.logprobs, teacher_forced) < NEAR
        shown = engine.behaviour()["training.attention_backend"]
        batches = -(-SEQUENCES.num_sequences // batch_size)
        assert (shown.value, shown.evidence["calls"]) == ("flex_attention", {"flex_attention": LAYERS * batches})
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert min(graphs) >= 1  # the second takes over no kernel that was chosen for the first one's sizes


@pytest.mark.parametrize(("asked", "ran"), [("eager", "sdpa"), ("sdpa", "eager")])
def test_attention_is_what_ran_not_what_was_asked(bench, asked, ran):
    engine = bench.open("training", training__attention_backend=asked)
    engine.model.config._attn_implementation = ran
    engine.score(SEQUENCES, request("training"))
    assert engine.behaviour()["training.attention_backend"].value == ran


def test_a_mixture_of_attentions_is_not_called_one(bench):
    engine = bench.open("training", training__attention_backend="sdpa")
    odd = engine.base.layers[0].self_attn
    odd.config = copy.deepcopy(odd.config)
    odd.config._attn_implementation = "eager"
    engine.score(SEQUENCES, request("training"))
    shown = engine.behaviour()["training.attention_backend"]
    assert shown.value is None and set(shown.evidence["calls"]) == {"eager", "sdpa"}


@pytest.mark.parametrize("call", [
    lambda scores: torch.softmax(scores, -1), lambda scores: torch.nn.functional.softmax(input=scores, dim=-1),
    lambda scores: torch.special.softmax(scores, -1), lambda scores: scores.softmax(dim=-1),
])  # fmt: skip
def test_a_written_out_softmax_is_counted_however_it_is_called(call):
    calls = AttentionCalls()
    with calls.counting():
        call(torch.zeros(1, 2, 3, 3))
        call(torch.zeros(2, 3))  # of no attention
    assert calls.evidence() == {"calls": {"eager": 1}, "masked": {}}


def test_counting_leaves_transformers_as_it_was(bench):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS.valid_keys()}
    bench.run("training", DISTINCT)
    assert {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS.valid_keys()} == before


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
