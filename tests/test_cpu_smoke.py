"""cpu-smoke as a decoder: right against transformers, every knob by its mechanism, evidence from what ran."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import tolerances
from smoke_fixtures import BASELINE, ROWS, RUNTIME, SEQUENCES, greatest, logprobs, opened, plan, request, row

from libxd import canon, checkpoint, freezing, identity, knobs, prompts, sampling
from libxd.errors import XdError
from libxd.runtimes.cpu_smoke import weights

torch = pytest.importorskip("torch")

from libxd.runtimes.cpu_smoke import attention, gemm, geometry  # noqa: E402
from libxd.runtimes.cpu_smoke.cache import BLOCK_TOKENS, BlockPool  # noqa: E402

SYNTHETIC = BASELINE["identity"]["checkpoint"]["synthetic"]
#: of seed 7 in float32: the weights are a promise to every machine and every version of numpy and torch
WEIGHTS_DIGEST = "2ef309de7bafc9c96842880c692382b98f849433a2c1ba430fa7841c1c95d47e"
#: a knob, its value in s0, and the sides it moves; no side: a real zero
EFFECTS = [
    ("batch.size", 1, {"rollout", "training"}),
    ("rollout.tensor_parallel_size", 2, {"rollout"}),
    ("rollout.context_parallel_size", 2, {"rollout"}),
    ("rollout.dtype", "bfloat16", {"rollout"}),
    ("rollout.dtype", "float16", {"rollout"}),
    ("rollout.enable_prefix_caching", False, {"rollout"}),
    ("rollout.enforce_eager", False, {"rollout"}),
    ("training.attention_backend", "eager", {"training"}),
    ("training.compute_dtype", "bfloat16", {"training"}),
    ("logp.backend", "xd.reference_logp", {"rollout", "training"}),
    ("logp.backend", "smoke_only.logp_reference", set()),
    ("logp.backend", "smoke_only.logp_offset", {"rollout"}),
    ("training.sharding", "fsdp", set()),
]


@pytest.fixture(scope="module")
def baseline() -> dict[str, np.ndarray]:
    return {side: logprobs(side) for side in knobs.SIDES}


# -- weights


def test_weights_are_the_same_everywhere():
    assert canon.digest(weights.digests(SYNTHETIC, "float32")) == WEIGHTS_DIGEST
    other = weights.digests({**SYNTHETIC, "seed": 8}, "float32")
    assert not set(other.values()) & set(weights.digests(SYNTHETIC, "float32").values())


def test_draws_have_mean_zero_and_variance_one():
    draws = weights.standard_normal("a key", (200_000,))
    assert abs(draws.mean()) < tolerances.SAMPLE_MOMENT and abs(draws.var() - 1) < tolerances.SAMPLE_MOMENT


@pytest.mark.parametrize(
    ("side", "changes"),
    [
        *(("rollout", {"rollout__dtype": dtype}) for dtype in knobs.DTYPES),
        ("rollout", {"rollout__tensor_parallel_size": 2}),
        ("rollout", {"rollout__tensor_parallel_size": 4, "rollout__dtype": "bfloat16"}),
        ("training", {"training__sharding": "fsdp"}),
        ("training", {"training__sharding": "fsdp", "training__compute_dtype": "float16"}),
    ],
)
def test_held_weights_are_the_checkpoints_however_they_are_spread(side, changes):
    """The runtime's numpy casts against what torch made, the split undone."""
    dtype = changes.get("rollout__dtype") or changes.get("training__compute_dtype") or "float32"
    held = {
        name: checkpoint.parameter_digest(held_dtype, shape, [raw])
        for name, held_dtype, shape, raw in opened(side, row(**changes)).parameters()
    }
    assert held == RUNTIME.synthetic_parameters(SYNTHETIC, dtype)


# -- numbers


def transformers_logprobs() -> np.ndarray:
    """float32 [A]: the same weights in transformers' Llama, one sequence at a time."""
    transformers = pytest.importorskip("transformers")
    shape = geometry.of(SYNTHETIC)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
            vocab_size=shape.vocab, rms_norm_eps=shape.norm_epsilon, tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        )
    ).eval()  # fmt: skip
    state = {name: torch.from_numpy(array) for name, array in weights.parameters(SYNTHETIC).items()}
    model.load_state_dict(state, strict=True)
    found = np.full(SEQUENCES.num_tokens, np.nan, np.float32)
    for sequence in range(SEQUENCES.num_sequences):
        span = SEQUENCES.span(sequence)
        ids = torch.from_numpy(SEQUENCES.token_ids[span].astype(np.int64))
        with torch.inference_mode():
            logits = model(input_ids=ids.unsqueeze(0)).logits[0, :-1].float()
        taken = logits.log_softmax(-1).gather(1, ids[1:].unsqueeze(1)).squeeze(1)
        found[span.start + 1 : span.stop] = taken.numpy()
    return found[SEQUENCES.active_mask]


def test_both_sides_are_the_model_that_transformers_runs(baseline):
    reference = transformers_logprobs()
    for side in knobs.SIDES:
        assert greatest(baseline[side], reference) < tolerances.SMOKE_FLOAT32_NATS
    shifted = dataclasses.replace(SEQUENCES, positions=SEQUENCES.positions * 2)  # negative control: other positions
    assert greatest(logprobs("training", given=shifted), reference) > 100 * tolerances.SMOKE_FLOAT32_NATS


@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (2, 1), (1, 2), (4, 3)])
def test_every_way_of_running_is_the_same_model(baseline, mode, eager, tensor, context):
    found = logprobs(
        "rollout", mode, rollout__tensor_parallel_size=tensor, rollout__context_parallel_size=context,
        rollout__enforce_eager=eager,
    )  # fmt: skip
    assert greatest(found, baseline["training"]) < tolerances.SMOKE_FLOAT32_NATS


@pytest.mark.parametrize(("knob", "value", "moved"), EFFECTS)
def test_a_knob_moves_its_own_side_and_no_other(baseline, knob, value, moved):
    changes = {knob.replace(".", "__"): value}
    assert {side for side in knobs.SIDES if greatest(logprobs(side, **changes), baseline[side]) > 0} == moved


def test_every_knob_is_in_the_experiment_and_among_the_effects():
    varied = {change for (change, *_) in filter(None, ROWS)}
    assert {path for path, _ in varied} == set(knobs.CATALOG)
    assert {(knob, value) for knob, value, _ in EFFECTS} == varied - {
        ("training.attention_backend", "flash_attention_2")
    }


def test_the_experiment_has_both_verdicts(baseline):
    """float32 rounding stays below ws1's 1e-5 with room; a narrower dtype does not."""
    assert greatest(baseline["training"], baseline["rollout"]) < 1e-5
    for dtype in ("float16", "bfloat16"):
        assert greatest(baseline["training"], logprobs("rollout", rollout__dtype=dtype)) > 1e-5


def test_scoring_twice_gives_the_same_bits(baseline):
    engine = opened("rollout", BASELINE)
    first, second = (engine.score(SEQUENCES, request("rollout", BASELINE)) for _ in range(2))
    assert first.logprobs.tobytes() == second.logprobs.tobytes()
    assert first.logprobs[SEQUENCES.active_mask].tobytes() == baseline["rollout"].tobytes()


def test_without_split_k_a_row_does_not_depend_on_its_neighbours(monkeypatch):
    """Batch size and prefix sharing act through the row count of the products, and through nothing else."""
    monkeypatch.setattr(gemm, "WORKERS", 1)  # one worker: never a cut
    together = logprobs("rollout")
    assert greatest(together, logprobs("rollout", batch__size=1)) == 0
    assert greatest(together, logprobs("rollout", rollout__enable_prefix_caching=False)) == 0
    assert greatest(logprobs("training"), logprobs("training", batch__size=1)) == 0


def test_split_k_follows_the_shape():
    assert [gemm.split_k(rows, 64, 64) for rows in (1, 4, 8, 16, 32, 64)] == [8, 8, 8, 4, 2, 1]
    assert gemm.split_k(1, 320, 64) == 2  # five tiles already keep workers busy
    assert gemm.split_k(1, 64, 24) == 2  # pieces stay long enough
    assert gemm.split_k(1, 64, 25) == 1


def test_a_token_that_is_not_attended_moves_nobody_after_it():
    hidden, cell = SEQUENCES.attention_mask.copy(), 2
    hidden[cell] = False
    masked = dataclasses.replace(SEQUENCES, attention_mask=hidden)
    ids = SEQUENCES.token_ids.copy()
    ids[cell] ^= 1
    for side in knobs.SIDES:
        changes = {"rollout__enable_prefix_caching": False}  # the altered prompt would share less
        same = logprobs(side, given=masked, **changes)
        assert greatest(same, logprobs(side, given=dataclasses.replace(masked, token_ids=ids), **changes)) == 0
        seen = dataclasses.replace(SEQUENCES, token_ids=ids)
        assert greatest(logprobs(side, **changes), logprobs(side, given=seen, **changes)) > 0  # negative control
        scores = opened(side, BASELINE).score(masked, request(side, BASELINE))
        assert scores.observed.attention_mask.tolist() == hidden.tolist()


def test_temperature_divides_processed_logprobs_only():
    def at(temperature: float, kind: str) -> np.ndarray:
        changed = row()
        changed["identity"]["semantics"] |= {"logprobs": kind, "temperature": temperature}
        scores = opened("training", changed).score(SEQUENCES, request("training", changed))
        return scores.logprobs[SEQUENCES.active_mask]

    assert greatest(at(0.5, "raw"), at(1.0, "processed")) == 0
    assert greatest(at(0.5, "processed"), at(1.0, "processed")) > 0.1


@pytest.mark.parametrize("tensor", [1, 2])
def test_an_operator_passes_through_vocabulary_shards(tensor):
    """What it adds to a shard's logprobs is added once, however many shards there are."""
    plain = logprobs("rollout", rollout__tensor_parallel_size=tensor, logp__backend="smoke_only.logp_reference")
    offset = logprobs("rollout", rollout__tensor_parallel_size=tensor, logp__backend="smoke_only.logp_offset")
    assert greatest(offset, plain + np.float32(0.125)) < tolerances.SMOKE_FLOAT32_NATS


# -- attention


@pytest.fixture
def attended() -> tuple[torch.Tensor, ...]:
    """query [5, 8, 4], key and value [21, 2, 4], causal visibility of the last five of 21 tokens."""
    drawn = [torch.from_numpy(weights.standard_normal(name, shape)).float()
             for name, shape in (("q", (5, 8, 4)), ("k", (21, 2, 4)), ("v", (21, 2, 4)))]  # fmt: skip
    return *drawn, torch.ones(5, 21, dtype=torch.bool).tril(16)


def test_attentions_agree(attended):
    whole = attention.eager(*attended)
    for out in (attention.sdpa(*attended), attention.online(*attended)[0]):
        assert greatest(out.numpy(), whole.numpy()) < tolerances.ATTENTION_FLOAT32
    assert greatest(attention.online(*attended)[1].numpy(), attention.plain(*attended)[1].numpy()) < (
        tolerances.ATTENTION_FLOAT32
    )
    later = attention.eager(*attended[:3], torch.ones(5, 21, dtype=torch.bool))  # negative control: not causal
    assert greatest(later.numpy(), whole.numpy()) > tolerances.ATTENTION_FLOAT32


@pytest.mark.parametrize("attend", [attention.plain, attention.online])
def test_merged_shards_are_the_whole(attended, attend):
    query, key, value, visible = attended
    whole, _ = attend(query, key, value, visible)
    parts = [slice(0, 9), slice(9, 18), slice(18, 21)]  # the first queries see nothing of the last shard
    partials = [attend(query, key[part], value[part], visible[:, part]) for part in parts]
    assert torch.isinf(partials[-1][1][0]).all()
    assert greatest(attention.merge(partials).numpy(), whole.numpy()) < tolerances.ATTENTION_FLOAT32
    assert greatest(attention.merge(partials[1:]).numpy(), whole.numpy()) > tolerances.ATTENTION_FLOAT32


def test_merged_log_sum_exp_is_the_whole():
    logits = torch.from_numpy(weights.standard_normal("logits", (3, 30))).float()
    merged = attention.merge_log_sum_exp([part.logsumexp(-1) for part in logits.split(10, dim=1)])
    assert greatest(merged.numpy(), logits.logsumexp(-1).numpy()) < tolerances.ATTENTION_FLOAT32


# -- cache


def pool(share: bool) -> BlockPool:
    return BlockPool(1, 1, 1, (1, 2), torch.float32, share)


def cells(ids: str) -> tuple[tuple[int, int, bool], ...]:
    return tuple((ord(letter), index, True) for index, letter in enumerate(ids))


def test_a_known_prefix_is_the_same_blocks():
    blocks = pool(share=True)
    first, second = blocks.table(cells("abcdefghij"), 0), blocks.table(cells("abcdefghXY"), 100)
    assert [a is b for a, b in zip(first.blocks, second.blocks, strict=True)] == [True, True, False]
    assert (blocks.hits, blocks.allocated) == (2, 4)
    assert second.origins() == [*range(8), 108, 109]
    assert (
        blocks.table(cells("bbcdefghij"), 200).blocks[0] is not first.blocks[0]
    )  # the second block alone is no prefix


def test_the_last_prompt_token_is_never_shared():
    blocks = pool(share=True)
    first, again = blocks.table(cells("abcdefgh"), 0), blocks.table(cells("abcdefgh"), 8)
    assert again.blocks[0] is first.blocks[0] and again.blocks[1] is not first.blocks[1]
    assert len(first.blocks) == len(again.blocks) == 8 // BLOCK_TOKENS


def test_nothing_is_shared_unasked():
    blocks = pool(share=False)
    assert blocks.table(cells("abcdefgh"), 0).blocks[0] is not blocks.table(cells("abcdefgh"), 8).blocks[0]
    assert blocks.lookups == 0


# -- what is observed


@pytest.mark.parametrize("key", [key for key in ROWS if ("training.attention_backend", "flash_attention_2") not in key])
@pytest.mark.parametrize("side", knobs.SIDES)
def test_the_engine_shows_every_knob_of_its_side_and_what_it_was_fed(key, side):
    planned = {record.knob: record.materialized for record in plan(side, ROWS[key]).knobs}
    engine = opened(side, ROWS[key])
    before = engine.settings()
    scores = engine.score(SEQUENCES, request(side, ROWS[key]))
    for shown in (before, engine.behaviour()):
        assert {knob: seen.value for knob, seen in shown.items()} == {knob: planned[knob] for knob in shown}
    assert before.keys() | engine.behaviour().keys() == planned.keys()
    for name in ("token_ids", "positions", "attention_mask"):
        assert getattr(scores.observed, name).tolist() == getattr(SEQUENCES, name).tolist()
    assert scores.observed.selected_ids.tolist() == SEQUENCES.token_ids.tolist()
    assert scores.observed.cache == ("kv_cache" if side == "rollout" else "none")
    assert engine.state() == {"mode": "eval", "optimizer": False}
    canon.dumps([seen.evidence for seen in engine.behaviour().values()] + [engine.describe()])  # JSON, all of it


@pytest.mark.parametrize("size", [5, 12, 40])
@pytest.mark.parametrize("submission", ["canonical", "rotated"])
def test_batches_are_counted_as_run(size, submission):
    engine = opened("rollout", row(batch__size=size))
    engine.score(SEQUENCES, request("rollout", row(batch__size=size), submission=submission))
    seen = engine.behaviour()["batch.size"]
    assert seen.value == size
    assert seen.evidence == {"batches": {5: [5, 5, 2], 12: [12], 40: [12]}[size]}


def test_behaviour_is_that_of_the_last_scoring():
    engine = opened("rollout", BASELINE)
    engine.score(SEQUENCES, request("rollout", BASELINE))
    calls = engine.behaviour()["logp.backend"].evidence
    engine.score(SEQUENCES, request("rollout", BASELINE))
    assert engine.behaviour()["logp.backend"].evidence == calls


def test_unscored_tokens_are_nan():
    for side in knobs.SIDES:
        scores = opened(side, BASELINE).score(SEQUENCES, request(side, BASELINE))
        assert np.isfinite(scores.logprobs).tolist() == SEQUENCES.active_mask.tolist()


def test_an_id_beyond_the_vocabulary_is_the_users_mistake():
    ids = SEQUENCES.token_ids.copy()
    ids[5] = 320
    with pytest.raises(XdError, match="vocabulary"):
        opened("training", BASELINE).score(dataclasses.replace(SEQUENCES, token_ids=ids), request("training", BASELINE))


# -- materialising


def record(side: str, changed: dict, knob: str, **options):
    (found,) = (each for each in plan(side, changed, **options).knobs if each.knob == knob)
    return found


@pytest.mark.parametrize("backend", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_attention_that_is_not_there_is_unsupported_or_falls_back_where_declared(backend):
    knob = "training.attention_backend"
    changed = row(training__attention_backend=backend)
    assert (record("training", changed, knob).status, record("training", changed, knob).materialized) == (
        "unsupported", None,
    )  # fmt: skip
    fallback = record("training", changed, knob, allow_fallback=frozenset({knob}))
    assert (fallback.status, fallback.requested, fallback.materialized) == ("fallback", backend, "sdpa")


@pytest.mark.parametrize(("size", "status"), [(1, "applied"), (4, "applied"), (8, "unsupported"), (3, "unsupported")])
def test_ranks_that_do_not_divide_the_model_are_unsupported(size, status):
    knob = "rollout.tensor_parallel_size"
    assert record("rollout", row(rollout__tensor_parallel_size=size), knob).status == status


def spoiled(**changes) -> dict:
    changed = row()
    for path, value in changes.items():
        place = changed
        *parents, last = path.split("__")
        for name in parents:
            place = place[name]
        place[last] = value
    return changed


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        (spoiled(scenario__device="cuda"), "cuda"),
        (spoiled(identity__checkpoint__synthetic=None), "synthetic"),
        (spoiled(identity__checkpoint__synthetic={"name": "other", "seed": 7}), "synthetic"),
        (spoiled(identity__semantics__logprobs="processed", identity__semantics__top_p=0.9), "top-p"),
    ],
)
def test_what_it_cannot_do_at_all_is_refused_with_the_reason(changed, word):
    (reason,) = RUNTIME.materialize("rollout", changed, {"packages": {"torch": "2"}}, frozenset()).refusals
    assert word in reason


def test_materialising_needs_torch_installed_but_loads_none():
    (reason,) = RUNTIME.materialize("rollout", row(), {"packages": {}}, frozenset()).refusals
    assert "torch" in reason
    code = (
        "import sys; from libxd.runtimes import registry; runtime = registry.load('cpu-smoke'); "
        "runtime.synthetic_parameters({'name': 'xd-smoke-1', 'seed': 7}, 'bfloat16'); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_only_the_topology_changes_the_process():
    base = plan("rollout", row())
    for name in ("tensor_parallel_size", "context_parallel_size"):
        assert plan("rollout", row(**{f"rollout__{name}": 2})).process != base.process
    changed = plan("rollout", row(rollout__dtype="bfloat16"))
    assert changed.process == base.process and changed.construction != base.construction
    request_level = plan("rollout", row(batch__size=1))
    assert (request_level.construction, request_level.process) == (base.construction, base.process)


# -- the generator


def test_the_committed_sequences_are_what_the_generator_samples(root):
    path = root / "experiments" / "prompts" / "s0.jsonl"
    rows = prompts.parse(prompts.rows(path.read_bytes(), str(path)), str(path))
    chosen = {key: value for key, value in SEQUENCES.metadata["sampling"].items() if key != "draws"}
    generator = RUNTIME.generator("xd-smoke-1:7", "float32")
    responses = sampling.sample(generator, rows, sampling.Sampling(**chosen), lambda _: None)
    frozen = freezing.freeze(responses, {})
    assert frozen.token_ids.tolist() == SEQUENCES.token_ids.tolist()
    assert frozen.prompt_index.tolist() == SEQUENCES.prompt_index.tolist()
    active = SEQUENCES.active_mask
    assert greatest(frozen.logprobs[active], SEQUENCES.logprobs[active]) < tolerances.SMOKE_FLOAT32_NATS
    assert generator.describe()["model"]["digest"] == BASELINE["identity"]["checkpoint"]["digest"]


def test_sequences_differ_in_length_and_share_prefixes():
    lengths = np.diff(SEQUENCES.cu_seqlens)
    assert len(set((lengths - SEQUENCES.prompt_lens).tolist())) > 4 and len(set(SEQUENCES.prompt_lens.tolist())) > 4
    assert np.bincount(SEQUENCES.prompt_index).tolist() == [2] * 6


@pytest.mark.parametrize(
    ("model", "prompt"),
    [("xd-smoke-1", {}), ("other:7", {}), ("xd-smoke-1:7", {"text": "12 320"}), ("xd-smoke-1:7", {"text": "a"}),
     ("xd-smoke-1:7", {"messages": [{"role": "user", "content": "12"}]})],
)  # fmt: skip
def test_bad_models_and_prompts_of_the_generator(model, prompt):
    with pytest.raises(XdError):
        RUNTIME.generator(model, "float32").encode(prompt)


@pytest.mark.parametrize("name", ["vocab_size", "num_attention_heads", "num_key_value_heads"])
def test_sizes_that_are_not_the_synthetic_models_are_refused(name):
    """A row's layouts are computed from them, and no digest covers them where the checkpoint has one."""
    changed = row()
    plans = {side: {"runtime": "cpu-smoke", "knobs": []} for side in knobs.SIDES}
    assert identity.expected(changed, plans)["model"] == changed["identity"]["model"]
    changed["identity"]["model"][name] *= 2
    with pytest.raises(XdError) as caught:
        identity.expected(changed, plans)
    assert (caught.value.status, caught.value.path) == (65, f"/identity/model/{name}")
