"""Runtime hf: what samples of a prompt share, and what that changes."""

from __future__ import annotations

import dataclasses

import pytest
import tolerances
from hf_fixtures import (
    PROMPT_LENS,
    Bench,
    frozen,
    greatest,
    joined,
    only,
    request,
)

from libxd.runtimes.protocol import Observation

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from libxd.runtimes.hf.prefix import PrefixStore  # noqa: E402

SEQUENCES = frozen()
#: no two prompts equal
DISTINCT = frozen(response_lens=((4,), (6,), (3,)))
NEAR = tolerances.TINY_LLAMA_FLOAT32_NATS


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench.tiny(tmp_path_factory)


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
