"""Runtime hf: which attention ran, counted where it ran."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import tolerances
from hf_fixtures import (
    ENVIRONMENT,
    LAYERS,
    Bench,
    frozen,
    greatest,
    request,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from libxd.runtimes.hf.attention import AttentionCalls  # noqa: E402

SEQUENCES = frozen()
#: no two prompts equal
DISTINCT = frozen(response_lens=((4,), (6,), (3,)))
NEAR = tolerances.TINY_LLAMA_FLOAT32_NATS
needs_compiler = pytest.mark.skipif(ENVIRONMENT["compiler"] is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench.tiny(tmp_path_factory)


@pytest.fixture(scope="module")
def teacher_forced(bench) -> np.ndarray:
    """float32 [T]: the training side's logprobs of SEQUENCES."""
    return bench.logprobs("training", SEQUENCES)

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
