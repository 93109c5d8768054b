"""Score files: the form an engine's scores must have, the bytes they become, and what may already stand there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scoring_fixtures import Bench, frozen

from libxd import sequences as sequences_file
from libxd.errors import Status, XdError
from libxd.rundir import Attempt
from libxd.runtimes.protocol import ObservedInputs, Scores
from libxd.scoring import score_file
from libxd.scoring.task import Task
from libxd.tensors import TensorFile

T = 12


def scores(**changes):
    fed = frozen()
    observed = ObservedInputs(fed.token_ids, fed.token_ids, fed.positions, fed.attention_mask,
                              np.ones(T, bool), "none", [])  # fmt: skip
    made = Scores(np.full(T, -1, np.float32), observed, "float32")
    inner = {key: value for key, value in changes.items() if hasattr(observed, key)}
    outer = {key: value for key, value in changes.items() if key not in inner}
    return replace(made, observed=replace(observed, **inner), **outer)


def test_scores_as_promised_pass():
    score_file.check(scores(), T)
    score_file.check(scores(logprobs=np.full(T, np.inf, np.float32)), T)  # a verdict, not an error
    score_file.check(scores(positions=None, attention_mask=None, cache=None), T)  # not seen


@pytest.mark.parametrize(
    "flaw",
    [
        {"logprobs": np.zeros(T - 1, np.float32)},
        {"logprobs": np.zeros(T, np.float64)},
        {"logprobs": np.zeros((T, 1), np.float32)},
        {"logprobs": [0.0] * T},
        {"scored": np.ones(T - 1, bool)},
        {"token_ids": np.zeros(T, np.int64)},
        {"selected_ids": np.zeros(T + 1, np.int32)},
        {"token_ids": None},
        {"positions": np.zeros(T, np.int64)},
        {"attention_mask": np.ones(T, np.uint8)},
        {"cache": "perhaps"},
    ],
    ids=lambda flaw: next(iter(flaw)),
)
def test_scores_of_another_form_are_a_bug_of_the_engine(flaw):
    with pytest.raises(XdError) as caught:
        score_file.check(scores(**flaw), T)
    assert (caught.value.status, caught.value.code) == (Status.BUG, "engine-output")


@pytest.fixture
def bench(xd, tmp_path):
    return Bench(xd, tmp_path)


@pytest.fixture
def scored(bench):
    """An attempt with its rollout side scored."""
    (path,) = bench.attempts("plain")
    assert bench.score(path).status == 0
    return bench.open(path)


def test_what_a_score_file_holds(scored):
    with TensorFile(scored.file("score_rollout.safetensors")) as file:
        assert file.names == ["cu_seqlens", "token_ids", "logprobs", "active_mask"]
        fed, logprobs = frozen(), file.array("logprobs")
        for name in ("cu_seqlens", "token_ids", "active_mask"):
            np.testing.assert_array_equal(file.array(name), getattr(fed, name))
        assert set(logprobs[~fed.active_mask].view(np.uint32)) == {0x7FC00000}
        np.testing.assert_array_equal(logprobs[fed.active_mask], (-(fed.token_ids % 8) / 8)[fed.active_mask])
        readback = scored.readback("rollout")
        assert file.metadata["observed"] == readback["observed"]
        assert file.metadata["execution_key"] == scored.materialized()["execution_key"]
        assert (file.metadata["mode"], file.metadata["side"]) == ("decode", "rollout")
        assert file.metadata["dtypes"] == {"parameters": "float32", "logits": None}  # its operator takes hidden states


def test_all_nans_are_written_as_one(tmp_path, scored):
    with TensorFile(scored.file("score_rollout.safetensors")) as file:
        metadata = file.metadata
    odd = np.full(T, -1, np.float32)
    odd[:3] = np.array([0x7FC00001, 0xFFC00000, 0x7F800001], np.uint32).view(np.float32)
    place = Attempt(tmp_path)
    assert score_file.write(place, frozen(), scores(logprobs=odd), metadata)
    odd[:3] = np.nan
    assert not score_file.write(place, frozen(), scores(logprobs=odd), metadata)


def task(attempt):
    return Task.read(attempt.path, "rollout")


def test_a_scored_attempt_is_answered(scored):
    assert task(scored).answered()


def rewrite(scored, metadata=None, **tensors):
    """The same score file with some of it replaced."""
    path = scored.file("score_rollout.safetensors")
    with TensorFile(path) as file:
        kept = {name: file.array(name).copy() for name in file.names}
        was = file.metadata
    path.unlink()
    from libxd import tensors as writer

    writer.write(path, {name: array for name, array in {**kept, **tensors}.items() if array is not None},
                 {**was, **(metadata or {})})  # fmt: skip


@pytest.mark.parametrize(
    ("flaw", "code"),
    [
        ({"token_ids": frozen(first_id=6).token_ids}, "tampered"),
        ({"active_mask": ~frozen().active_mask}, "tampered"),
        ({"logprobs": np.zeros(T - 1, np.float32)}, "bad-tensor"),
        ({"logprobs": np.zeros(T, np.float64)}, "bad-tensor"),
        ({"logprobs": None}, "missing-tensor"),
        ({"metadata": {"side": "training"}}, "foreign-file"),
        ({"metadata": {"case_id": "c-" + "0" * 16}}, "foreign-file"),
        ({"metadata": {"execution_key": "0" * 64}}, "foreign-file"),
        ({"metadata": {"threshold": 1}}, "unknown-field"),
    ],
    ids=["ids", "mask", "length", "dtype", "no-tensor", "side", "case", "key", "field"],
)  # fmt: skip
def test_a_score_file_of_something_else_is_no_answer(scored, flaw, code):
    rewrite(scored, **flaw)
    with pytest.raises(XdError) as caught:
        task(scored).answered()
    assert (caught.value.issues[0].status, caught.value.issues[0].code) == (Status.INVALID, code)


def test_rewriting_alone_does_no_harm(scored):
    """Negative control of the test above."""
    rewrite(scored)
    assert task(scored).answered()


@pytest.mark.parametrize("name", ["readback_rollout.json", "score_rollout.safetensors"])
def test_one_file_of_two_is_no_answer_yet(scored, name):
    scored.file(name).unlink()
    assert not task(scored).answered()


def test_scores_beside_a_refusal_are_tampered_with(bench, scored):
    (refused,) = bench.attempts("ignores:rollout.dtype")
    bench.score(refused)
    attempt = bench.open(refused)
    with pytest.raises(XdError) as caught:
        task(attempt).answered()
    assert caught.value.status == Status.REFUSED
    attempt.file("score_rollout.safetensors").write_bytes(scored.file("score_rollout.safetensors").read_bytes())
    with pytest.raises(XdError) as caught:
        task(attempt).answered()
    assert caught.value.code == "tampered"


def test_a_rewritten_sequences_file_has_other_digests(bench):
    """What the command test of changed sequences rests on."""
    before = sequences_file.identity(bench.sequences)
    bench.sequences.unlink()
    sequences_file.write(bench.sequences, frozen(first_id=6))
    after = sequences_file.identity(bench.sequences)
    assert {key for key in before if before[key] != after[key]} == {"digest", "token_ids", "selected_ids"}
