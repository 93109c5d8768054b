"""Engines that break a promise, one a test: caught before scoring, right after it, or by the identity they leave."""

from __future__ import annotations

import numpy as np
import pytest
from scoring_fixtures import Bench, frozen
from scripted_engine import OTHER, SEEN_RUNNING

from libxd import identity, judge, knobs
from libxd.errors import Status
from libxd.runtimes.protocol import Piece
from libxd.scoring import evidence
from libxd.scoring.evidence import Snapshot
from libxd.scoring.observer import Observer
from libxd.tensors import TensorFile


@pytest.fixture
def bench(xd, tmp_path):
    return Bench(xd, tmp_path)


def violations(bench, path):
    """What identity says of an attempt whose rollout side was scored."""
    attempt = bench.open(path)
    readback = attempt.readback("rollout")
    with TensorFile(attempt.file("score_rollout.safetensors")) as file:
        score = {"metadata": file.metadata}
    judging = judge._Judge(attempt.identity(), "rollout", readback, score, True)
    return {code for code, *_ in judging.violations()}


@pytest.mark.parametrize("side", knobs.SIDES)
def test_an_engine_that_ignores_any_one_knob_is_caught_and_publishes_no_scores(bench, side):
    names = [knob.path for knob in knobs.of_side(side)]
    honest, *paths = bench.attempts("plain", *(f"ignores:{name}" for name in names))
    ran = bench.score(honest, *paths, side=side)
    assert (ran.status, ran.out.splitlines()) == (Status.REFUSED, [honest])
    assert bench.files(honest) == {f"readback_{side}.json", f"score_{side}.safetensors"}
    for name, path in zip(names, paths, strict=True):
        assert bench.files(path) == {f"readback_{side}.json"}, name
        readback = bench.open(path).readback(side)
        assert readback["status"] == "refused"
        stage = "behaviour" if name in SEEN_RUNNING else "settings"
        assert [(r["knob"], r["stage"], r["observed"]) for r in readback["refusals"]] == [(name, stage, OTHER[name])]
        assert (readback["operator"]["calls"] > 0) == (stage == "behaviour")  # a refused setting is not scored with
        assert f"{name}: the engine uses another value" in ran.err


@pytest.mark.parametrize("act", ["hides", "forgets"])
@pytest.mark.parametrize("name", ["rollout.dtype", "batch.size"])
def test_an_engine_that_cannot_show_a_knob_is_refused_in_strict_mode_and_recorded_otherwise(bench, act, name):
    strict, loose = bench.materialize(bench.case(f"{act}:{name}"), bench.case(f"{act}:{name}", repeat=1, strict=False))
    ran = bench.score(strict, loose)
    assert (ran.status, ran.out.splitlines()) == (Status.REFUSED, [loose])
    assert [r["knob"] for r in bench.open(strict).readback("rollout")["refusals"]] == [name]
    readback = bench.open(loose).readback("rollout")
    record = next(record for record in readback["knobs"] if record["knob"] == name)
    assert (record["status"], record["actual"], readback["status"]) == ("unobservable", None, "ok")


def test_an_ignored_knob_is_recorded_where_it_is_not_refused(bench):
    (path,) = bench.materialize(bench.case("ignores:rollout.dtype", strict=False))
    assert bench.score(path).status == 0
    record = next(r for r in bench.open(path).readback("rollout")["knobs"] if r["knob"] == "rollout.dtype")
    assert (record["status"], record["actual"]) == ("ignored", "float16")


def test_an_engine_that_never_calls_the_operator_is_refused_in_every_mode(bench):
    paths = bench.materialize(bench.case("avoids-operator"), bench.case("avoids-operator", repeat=1, strict=False))
    ran = bench.score(*paths)
    assert (ran.status, ran.out) == (Status.REFUSED, "")
    for path in paths:
        assert bench.files(path) == {"readback_rollout.json"}
        assert [r["stage"] for r in bench.open(path).readback("rollout")["refusals"]] == ["operator"]


@pytest.mark.parametrize(
    ("act", "stage"), [("refuses-to-open", "settings"), ("refuses-to-score", "behaviour")]
)
def test_an_engine_that_finds_out_that_it_cannot_is_refused_and_says_why(bench, act, stage):
    (path,) = bench.attempts(act)
    ran = bench.score(path)
    assert (ran.status, ran.out) == (Status.REFUSED, "")
    readback = bench.open(path).readback("rollout")
    assert [(r["stage"], r["knob"]) for r in readback["refusals"]] == [(stage, None)]
    assert readback["refusals"][0]["reason"] in ran.err
    assert set(readback["observed"].values()) == {None}


def test_a_faithful_engine_leaves_no_violation(bench):
    (path,) = bench.attempts("plain")
    assert bench.score(path).status == 0
    assert violations(bench, path) == set()


@pytest.mark.parametrize(
    ("act", "code"),
    [("alters-an-id", "token-ids"), ("trains", "weights-changed"), ("leaves-train-mode", "mode-changed"),
     ("optimizer", "optimizer")],
)  # fmt: skip
def test_an_engine_that_breaks_the_identity_is_observed_doing_it(bench, act, code):
    (path,) = bench.attempts(act)
    assert bench.score(path).status == 0  # a verdict, not an error
    assert code in violations(bench, path)


def test_a_changed_parameter_is_named(bench):
    (path,) = bench.attempts("trains")
    bench.score(path)
    readback = bench.open(path).readback("rollout")
    assert set(readback["changed_parameters"]) == {"head"}
    assert readback["changed_parameters"]["head"] != readback["parameters"]["head"]


def test_an_altered_id_stands_in_the_score_file(bench):
    """The file holds the tokens whose logprobs it gives, not the ones that were asked for."""
    (path,) = bench.attempts("alters-an-id")
    bench.score(path)
    with TensorFile(bench.open(path).file("score_rollout.safetensors")) as file:
        assert (file.array("token_ids") != frozen().token_ids).nonzero()[0].tolist() == [11]


# -- the parts


def snapshot(**changes):
    return Snapshot(**{"parameters": {"a": "1", "b": "2"}, "dtype": "float32", "mode": "eval", "optimizer": False,
                       **changes})  # fmt: skip


def test_what_changed_between_two_snapshots():
    assert snapshot().changed(snapshot()) == {}
    assert snapshot().changed(snapshot(parameters={"a": "1", "b": "3", "c": "4"})) == {"b": "3", "c": "4"}
    assert snapshot().changed(snapshot(parameters={"a": "1"})) == {"b": None}


def test_a_buffer_that_changed_counts_like_a_parameter():
    """A module of torch that carries a table beside its weights; an entry of it changes between two looks."""
    torch = pytest.importorskip("torch")

    from libxd.runtimes import live

    class Holder:
        def __init__(self):
            self.model = torch.nn.Linear(2, 2)
            self.model.register_buffer("table", torch.arange(3), persistent=False)
            self.model.register_buffer("scale", torch.tensor(1.0))

        def state(self):
            return live.state(self.model)

        def parameters(self):
            return ((name, "float32", tuple(p.shape), live.raw_bytes(p)) for name, p in self.model.named_parameters())

        def buffers(self):
            return live.buffers(self.model)

    engine = Holder()
    before = Snapshot.take(engine)
    assert before.buffers.keys() == {"table", "scale"}
    assert before == Snapshot.take(engine)
    engine.model.table[1] += 1
    after = Snapshot.take(engine)
    assert before.weights == after.weights
    assert before.changed(after) == {"table": after.buffers["table"]["digest"]}
    assert before != after


@pytest.mark.parametrize(
    ("before", "after", "expected", "state"),
    [
        (snapshot(), snapshot(), snapshot().weights, "pre_update"),
        (snapshot(), snapshot(), None, "pre_update"),
        (snapshot(), snapshot(), "another", None),
        (snapshot(), snapshot(parameters={"a": "1"}), snapshot().weights, None),
        (snapshot(optimizer=True), snapshot(), snapshot().weights, None),
    ],
)
def test_the_model_state_is_only_what_can_be_seen(before, after, expected, state):
    assert evidence._model_state(before, after, expected) == state


class Called:
    """An operator after a run."""

    def __init__(self, temperatures, given=frozenset(), inputs="logits"):
        self.calls, self.inputs = len(temperatures), inputs
        self.temperatures, self.logits_given = set(temperatures), set(given)


UNSEEN = dict.fromkeys(("top_p", "top_k", "penalties"))


@pytest.mark.parametrize(
    ("operator", "head_outputs", "seen"),
    [
        (Called([1.0], {11}), {11, 12}, {}),
        (Called([0.7], {11, 12}), {11, 12}, {"temperature": 0.7}),
        (Called([1.0], {11, 13}), {11, 12}, UNSEEN),  # something was done to the logits on their way
        (Called([1.0], {11}), None, UNSEEN),  # the engine does not show what its head gives
        (Called([1.0], {None}), {11}, UNSEEN),
        (Called([1.0], inputs="hidden"), None, {}),  # it makes the logits itself
        (Called([0.7, 1.0], {11}), {11}, {"temperature": None}),
    ],
)
def test_semantics_are_what_was_seen_done_to_the_logits(operator, head_outputs, seen):
    given = None if head_outputs is None else frozenset(head_outputs)
    assert evidence._semantics(operator, given) == {**identity.UNPROCESSED, **seen}


def test_without_a_call_no_logprob_has_a_meaning():
    assert evidence._semantics(Called([]), frozenset()) is None


@pytest.mark.parametrize(
    ("asked", "ran", "seen"),
    [("decode", "decode", "decode"), ("decode", "prefill", "prefill"), ("prefill", "decode", "decode"),
     ("prefill", "prefill", "prefill"), ("teacher_forced", "prefill", "teacher_forced"), ("decode", "half", "mixed"),
     ("teacher_forced", "decode", "decode")],
)  # fmt: skip
def test_the_mode_is_how_the_tokens_went_through(asked, ran, seen):
    given = frozen()
    observer = Observer(given.cu_seqlens)
    for s in range(given.num_sequences):
        length, prompt = int(np.diff(given.cu_seqlens)[s]), int(given.prompt_lens[s])
        counts = {"prefill": [length], "half": [prompt, length - prompt],
                  "decode": [prompt, *[1] * (length - prompt)]}[ran]  # fmt: skip
        for start, count in zip(np.cumsum([0, *counts[:-1]]).tolist(), counts, strict=True):
            cells = given.span(s).start + start + np.arange(count)
            observer.forward([Piece(s, start, count)], given.token_ids[cells], given.positions[cells],
                             given.attention_mask[cells])  # fmt: skip
    assert evidence._mode(given, asked, observer.observed(kept=False)) == seen


def test_digests_do_not_depend_on_byte_order_or_stride():
    plain = np.arange(6, dtype="<i4")
    assert evidence._digest(plain.astype(">i4"), "<i4") == evidence._digest(plain, "<i4")
    assert evidence._digest(np.repeat(plain, 2)[::2], "<i4") == evidence._digest(plain, "<i4")
    assert evidence._digest(plain[::-1], "<i4") != evidence._digest(plain, "<i4")
