"""Runtime hf: decode steps under torch.compile."""

from __future__ import annotations

import pytest
import tolerances
from hf_fixtures import (
    ENVIRONMENT,
    Bench,
    frozen,
    greatest,
    request,
)

from libxd.errors import Status, XdError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


SEQUENCES = frozen()
NEAR = tolerances.TINY_LLAMA_FLOAT32_NATS
pytestmark = pytest.mark.skipif(ENVIRONMENT["compiler"] is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench.tiny(tmp_path_factory)


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


def test_a_closed_engine_leaves_the_next_one_room_to_compile(bench):
    """torch compiles one function so many times a process, then runs it eager: here three times."""
    with torch._dynamo.config.patch(recompile_limit=3):
        torch.compiler.reset()  # what other tests compiled
        for _engine in range(3):
            engine, _ = bench.run("rollout", SEQUENCES, rollout__enforce_eager=False)
            shown = engine.behaviour()["rollout.enforce_eager"]
            assert shown.value is False, shown.evidence
            engine.close()
