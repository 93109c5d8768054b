"""Several attempts beside one another, what is found at hand, a live third scorer, and the tool."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_fixtures
import numpy as np
import pytest
from comparison_fixtures import floats, refused, rewrite_json, rewrite_score, score_path, scored
from conftest import ROOT
from doctor_fixtures import Held, evidence, held
from test_ladder import rungs
from tolerances import TINY_LLAMA_FLOAT32_NATS

import libxd
from libxd import comparison, doctor, pairs, schema, seal, tensors
from libxd.doctor import aggregates, at_hand, diagnosis, repeats, series, text, vocabulary
from libxd.doctor.evidence import Evidence
from libxd.errors import Status, XdError
from libxd.rundir import SIDES, Attempt

LENGTHS = (10,) * 12
TOKENS = sum(LENGTHS)
ACTIVE = np.arange(TOKENS) % 10 >= 2


def drawn(seed: int, size: float = 0.03, dtype: str = "bfloat16") -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    rollout = -draw.uniform(0.5, 3, TOKENS).astype(np.float32)
    return rollout, (rollout + draw.normal(0, size, TOKENS)).astype(np.float32)


def attempt(root: Path, sides: tuple[np.ndarray, np.ndarray], judge: bool = True, **given: Any) -> Attempt:
    made = scored(root, *sides, lengths=LENGTHS, active=ACTIVE, **{"dtype": "bfloat16", **given})
    if judge:
        comparison.compare(made)
    return made


def looked(made: Attempt) -> Evidence:
    return Evidence.of_pair(pairs.of_attempt(made))


# -- one attempt


def test_a_right_attempt_is_called_nothing_wrong(tmp_path):
    made = attempt(tmp_path, drawn(0))
    assert doctor.examine_pair(pairs.of_attempt(made)) == []
    shown = "\n".join(text.lines(diagnosis.of_pair(looked(made)), verbose=False))
    assert "Nothing wrong was found" in shown
    assert "Bug or rounding? undecided: one precision alone" in shown
    painted = text.lines(diagnosis.of_pair(looked(made)), verbose=False, style=lambda words, kind: f"<{kind} {words}>")
    assert "Bug or rounding? <undecided undecided>: one" in "\n".join(painted)
    assert "both sides in float32" in shown


def test_a_finding_is_json(tmp_path):
    rollout, training = drawn(0)
    training[ACTIVE.argmax()] = np.nan
    (found,) = doctor.examine_pair(pairs.of_attempt(attempt(tmp_path, (rollout, training), judge=False)))
    assert found.as_json() == {"cause": "fill-values", "likelihood": 0.95, "summary": found.summary,
                               "evidence": found.evidence, "next": found.next}  # fmt: skip
    assert "sequence 0, position 2" in found.evidence[0]


def test_what_the_verdict_found_comes_first(tmp_path):
    made = attempt(tmp_path, drawn(0), judge=False)
    moved = np.roll(ACTIVE, 1)
    rewrite_score(made, "training", active_mask=moved)
    comparison.compare(made)
    found = doctor.examine_pair(pairs.of_attempt(made))
    assert [each.cause for each in found] == ["identity", "masks"]
    assert "active-mask" in found[0].evidence[0] or "active_mask" in found[0].evidence[0]


def test_stored_aggregates_are_held_to_their_tokens(tmp_path):
    made = attempt(tmp_path, drawn(0))
    assert aggregates.examine(looked(made)) is None
    path = made.file("comparison.json")
    said = json.loads(path.read_bytes())
    said["logprob_difference"]["mean_absolute"] *= 1.01
    path.write_text(json.dumps(said))
    found = aggregates.examine(looked(made))
    assert found is not None and "comparison.json says mean_absolute" in found.evidence[0]
    answer = diagnosis.of_pair(looked(made)).answer
    assert answer is not None and answer.answer == "undecided"  # the report is wrong; the numbers may not be


def test_what_nobody_showed_is_no_cause_and_is_said(tmp_path):
    made = attempt(tmp_path, drawn(0))
    path = made.file("comparison.json")
    said = json.loads(path.read_bytes())
    unseen = {"code": "unobservable", "side": "rollout", "path": "readback_rollout.json#/observed/weights_before",
              "expected": None, "observed": None}  # fmt: skip
    path.write_text(json.dumps({**said, "status": "INVALID_IDENTITY", "violations": [unseen]}))
    found = diagnosis.of_pair(looked(made))
    assert found.findings == [] and found.silent["provenance"] == "was not shown: weights_before"
    path.write_text(json.dumps({**said, "status": "INVALID_IDENTITY", "violations": [{**unseen, "code": "weights"}]}))
    assert [each.cause for each in diagnosis.of_pair(looked(made)).findings] == ["identity"]


def test_stored_aggregates_of_an_invalid_attempt_are_held_to_their_tokens_too(tmp_path):
    made = attempt(tmp_path, drawn(0))
    said = json.loads(made.file("comparison.json").read_bytes())
    unseen = {"code": "unobservable", "side": "rollout", "path": "readback_rollout.json#/observed/weights_before",
              "expected": None, "observed": None}  # fmt: skip
    said |= {"status": "INVALID_IDENTITY", "violations": [unseen]}
    made.file("comparison.json").write_text(json.dumps(said))
    assert aggregates.examine(looked(made)) is None
    said["logprob_difference"]["mean_absolute"] *= 1.01
    made.file("comparison.json").write_text(json.dumps(said))
    found = aggregates.examine(looked(made))
    assert found is not None and "comparison.json says mean_absolute" in found.evidence[0]


def test_a_tampered_attempt_is_no_evidence(xd, tmp_path):
    """One float of a sealed score file, of any size: no other cause is named, and it is no rung and no repeat."""
    made, again = attempt(tmp_path / "a", drawn(0)), attempt(tmp_path / "b", drawn(0), repeat=1)
    assert seal.seal(made) and seal.seal(again)
    assert doctor.examine_pair(pairs.of_attempt(made)) == []
    with tensors.TensorFile(score_path(made, "training")) as file:
        values = np.array(file.array("logprobs"))
    values[ACTIVE.argmax()] = -50.0
    rewrite_score(made, "training", logprobs=values)
    found = diagnosis.of_pair(looked(made))
    assert [each.cause for each in found.findings] == ["tampered"]
    assert found.findings[0].evidence[0].startswith("score_training.safetensors: changed")
    assert "fill-values" not in found.findings[0].evidence[0] and found.silent["sentinels"].endswith("what was sealed")
    assert found.answer is not None and found.answer.answer == "undecided"
    assert diagnosis.rung(looked(made)) is None and diagnosis.rung(looked(again)) is not None
    assert xd("xd-seal", "--verify", made).status == 1
    ran = xd("xd-doctor", "--exit-code", made, again)
    assert ran.status == 1 and "1. tampered (0.95)" in ran.out and "together" not in ran.out
    made.file("COMPLETE").unlink()  # not sealed: its numbers are looked at
    assert "tampered" not in [each.cause for each in diagnosis.of_pair(looked(made)).findings]


# -- several


def test_a_ladder_answers_bug_or_rounding(tmp_path):
    for mistake, answer in ((0.0, "rounding"), (1e-3, "bug")):
        evidences = [looked(each) for each in rungs(tmp_path / answer, mistake)]
        climbed = diagnosis.climbed(rung for each in evidences if (rung := diagnosis.rung(each)))
        for each in evidences:
            diagnosed = diagnosis.of_pair(each, climbed[str(each.attempt)])
            found = diagnosed.answer
            assert found is not None and (found.answer, found.by) == (answer, "ladder")
            assert "ladder" not in diagnosed.silent
        assert diagnosis.of_pair(evidences[0]).silent["ladder"] == "needs the same tokens in two precisions"
    (alone,) = [diagnosis.rung(evidences[0])]
    assert alone is not None and diagnosis.climbed([alone]) == {}  # one precision alone is no ladder


def imported(runs: Path, dtype: str, size: float) -> Attempt:
    """What a trainer's hook hands over, judged."""
    rollout, training = drawn(3, size)
    path = libxd.write_scores(
        runs, "mine", token_ids=np.full(TOKENS, 7), active_mask=ACTIVE, rollout=rollout, training=training,
        cu_seqlens=np.cumsum([0, *LENGTHS]), dtype=dtype, checkpoint="c" * 64, semantics="raw",
    )  # fmt: skip
    made = Attempt.open(path)
    comparison.compare(made)
    return made


def test_the_declared_dtypes_of_imports_are_a_ladders(tmp_path):
    """No engine showed them; a contract's threshold and xd-ladder go by them, too."""
    evidences = [looked(imported(tmp_path, "bfloat16", 0.03)), looked(imported(tmp_path, "float32", 1e-6))]
    assert [set(each.dtypes.values()) for each in evidences] == [{"bfloat16"}, {"float32"}]
    alone = diagnosis.of_pair(evidences[0]).answer
    assert alone is not None and alone.answer == "undecided" and "--dtype float32" in alone.next[1]
    climbed = diagnosis.climbed(rung for each in evidences if (rung := diagnosis.rung(each)))
    answers = [diagnosis.of_pair(each, climbed[str(each.attempt)]).answer for each in evidences]
    assert [each.answer for each in answers if each] == ["rounding", "rounding"]
    much = looked(imported(tmp_path, "bfloat16", 0.5))
    assert "more-than-rounding" in [each.cause for each in diagnosis.of_pair(much).findings]


def test_the_declared_dtypes_stand_in_the_files_themselves(tmp_path):
    """Two score files of an import say what was declared, not as seen, without their attempt."""
    made = imported(tmp_path, "bfloat16", 0.03)
    pair = pairs.of_files([made.file(f"score_{side}.safetensors") for side in SIDES])
    alone = Evidence.of_pair(pair)
    assert alone.attempt is None and alone.dtypes == dict.fromkeys(SIDES, "bfloat16")
    assert [file.metadata["dtypes"]["parameters"] for file in alone.files] == [None, None]


def test_a_side_that_differs_from_itself(tmp_path):
    rollout, training = drawn(0)
    other = (rollout + np.random.default_rng(5).normal(0, 0.03, TOKENS)).astype(np.float32)
    first, second, third, same = (
        looked(attempt(tmp_path / name, (side, training), dtype="float32", **given))
        for name, side, given in (
            ("a", rollout, {}), ("b", other, {"repeat": 1}), ("c", other, {"change": ("batch.size", 1)}),
            ("d", rollout, {"repeat": 1}),
        )
    )  # fmt: skip
    (found,) = repeats.examine([first, second])
    assert found.cause == "not-repeatable" and found.evidence[0].startswith("rollout of")
    assert repeats.examine([first, same]) == []
    (found,) = repeats.examine([first, third])
    assert found.cause == "batch-shape" and "(another batch size)" in found.evidence[0]
    nearer = looked(attempt(tmp_path / "e", (rollout + np.float32(1e-4), training), dtype="float32",
                            change=("batch.size", 1)))  # fmt: skip
    assert repeats.examine([first, nearer]) == []  # far less than the two sides are apart


def step(number: int, size: float, weights: tuple[str | None, str | None]) -> Evidence:
    draw = np.random.default_rng(number)
    sequences = hf_fixtures.frozen((3, 4), ((20,) * 4, (20,) * 4))
    base = -draw.uniform(0.5, 3, sequences.num_tokens)
    sides: list[Held] = []
    for side, digest, apart in zip(("rollout", "training"), weights, (0.0, size), strict=True):
        values = np.where(sequences.active_mask, base + draw.normal(0, 1, base.size) * apart, np.nan)
        sides.append(held(side, values, sequences, "bfloat16"))
        sides[-1].metadata["observed"] = {"weights_before": digest}
    return evidence(*sides)


def test_a_series_names_the_update_that_one_side_missed():
    steps = [step(0, 0.01, ("a", "a")), step(1, 0.01, ("b", "b")), step(2, 0.05, ("b", "c")), step(3, 0.05, ("b", "d"))]
    (found,) = series.examine(steps)
    assert found.cause == "stale-weights"
    assert found.evidence[0].startswith("step 2: weights changed on training and not on rollout")
    assert "from step 2" in found.evidence[-1]
    assert series.examine(steps[:2]) == []


def test_a_jump_without_digests_asks_for_the_lr_0_control():
    steps = [step(n, 0.01 if n < 3 else 0.05, (None, None)) for n in range(5)]
    (found,) = series.examine(steps)
    assert found.cause == "jump" and found.evidence[0].startswith("from step 3")
    assert "lr = 0" in found.next[0]
    control = [step(n, 0.01 if n < 3 else 0.05, ("a", "a")) for n in range(5)]
    (found,) = series.examine(control)
    assert "no side's weights changed" in found.evidence[-1]
    assert series.examine([step(n, 0.01, (None, None)) for n in range(8)]) == []


def steps_of_a_run(runs: Path, said: bool) -> list[Attempt]:
    """A run whose difference grows five times at its fourth step of six."""
    made = []
    for number in range(6):
        rollout, training = drawn(number, 0.01 if number < 3 else 0.05)
        made.append(Attempt.open(libxd.write_scores(
            runs, "steps", token_ids=np.full(TOKENS, 7), active_mask=ACTIVE, rollout=rollout, training=training,
            cu_seqlens=np.cumsum([0, *LENGTHS]), dtype="bfloat16", semantics="raw", step=number if said else None,
        )))  # fmt: skip
        comparison.compare(made[-1])
    return made


def test_a_series_goes_by_the_steps_that_attempts_say(xd, tmp_path):
    """A shell's glob gives them in the order of their digests."""
    made = steps_of_a_run(tmp_path, said=True)
    for order in (made, made[::-1], [made[at] for at in (4, 1, 5, 0, 3, 2)]):
        found = diagnosis.together([looked(each) for each in order], in_order=True)
        assert found is not None and found.silent == {}
        (jump,) = [each for each in found.findings if each.cause == "jump"]
        assert jump.evidence[0].startswith("from step 3")
        assert found.subject == [str(each) for each in made]
    ran = xd("xd-doctor", "--series", *made[::-1])
    assert "from step 3" in ran.out and "in the order given" not in ran.out


def test_a_series_that_says_no_steps_keeps_the_order_given_and_says_so(xd, tmp_path):
    made = steps_of_a_run(tmp_path, said=False)
    assert series.ordered([looked(each) for each in made[::-1]])[0][0].attempt is not None
    ran = xd("xd-doctor", "--series", *made)
    assert "from step 3" in ran.out and "series (in the order given: not every attempt says its step)" in ran.out
    mixed = [made[at] for at in (4, 1, 5, 0, 3, 2)]
    ran = xd("xd-doctor", "--series", *mixed)
    assert "jump" not in ran.out and "in the order given" in ran.out


# -- what is at hand


def test_a_vocabulary_is_read_from_a_tokenizer_and_a_config(tmp_path):
    tokenizer = {"model": {"vocab": {"user": 7, "a": 3}}, "added_tokens": [
        {"id": 0, "content": "<|im_start|>"}, {"id": 1, "content": "<|im_end|>"}, {"id": 2, "content": "<pad>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({
        "eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}, "pad_token": "<pad>",
        "model_max_length": 10**30,
    }))  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64, "eos_token_id": [1, 9]}))
    found = vocabulary.read([tmp_path])
    assert (found.size, found.bos, found.eos, found.pad) == (64, 0, {1, 9}, 2)
    assert (found.openers, found.other_roles) == ({0}, {7: "user"})
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(XdError) as caught:
        vocabulary.read([tmp_path])
    assert caught.value.status == Status.INVALID
    with pytest.raises(XdError) as caught:
        vocabulary.read([tmp_path / "none"])
    assert caught.value.status == Status.MISSING


def test_a_directory_that_is_not_there_is_called_so(xd, tmp_path):
    made = attempt(tmp_path, drawn(0))
    for option in ("--model", "--tokenizer", "--rescore"):
        ran = xd("xd-doctor", option, "nope", made)
        assert (ran.status, ran.out) == (66, "") and "nope: no such directory" in ran.err
    (tmp_path / "empty").mkdir()
    assert "holds no config.json" in xd("xd-doctor", "--model", tmp_path / "empty", made).err


@pytest.mark.parametrize(("text", "right"), [
    ("0", False), ("-0", False), ("0.0", False), ("0.000", False), ("0e3", False),
    ("0.02", True), ("2e-2", True), ("0.0219", True), ("0.020", False), ("0.0200", False),
])  # fmt: skip
def test_a_reported_figure_has_the_digits_that_were_written(text, right):
    sequences = hf_fixtures.frozen((3, 4), ((20,) * 4, (20,) * 4))
    low = held("rollout", np.full(sequences.num_tokens, -1.0), sequences)
    high = held("training", np.full(sequences.num_tokens, np.float32(-1 + 0.0217)), sequences)
    asked = evidence(low, high, reported=at_hand.reported([f"mean_absolute={text}"]))
    assert (aggregates.examine(asked) is None) == right
    same = evidence(low, replace(high, logprobs=low.logprobs), reported=at_hand.reported([f"mean_absolute={text}"]))
    assert (aggregates.examine(same) is None) == (float(text) == 0)  # of a pair that is equal, 0 is right


@pytest.mark.parametrize("given", ["mean", "mean_absolute", "mean_absolute=x", "k1=1e400", "k1=inf", "k1=nan", "k4=1"])
def test_a_reported_figure_that_is_none_is_usage(given):
    with pytest.raises(XdError) as caught:
        at_hand.reported([given])
    assert caught.value.status == Status.USAGE


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny Llama, and two score files of it: the training side at temperature 0.7, said to be raw."""
    pytest.importorskip("torch")
    place = tmp_path_factory.mktemp("tiny")
    hf_fixtures.save_model(place / "model")
    bench = hf_fixtures.Bench(place / "model")
    sequences = hf_fixtures.frozen((4, 6, 5), ((20,) * 3,) * 3)
    logprobs = {
        "rollout": bench.logprobs("rollout", sequences),
        "training": bench.logprobs("training", sequences, semantics={"temperature": 0.7, "logprobs": "processed"}),
    }
    base = scored(place / "runs", floats(-1, -2), floats(-1, -2))
    for side, values in logprobs.items():
        with tensors.TensorFile(score_path(base, side)) as file:
            metadata = file.metadata
        tensors.write(place / f"{side}.safetensors", {
            "cu_seqlens": sequences.cu_seqlens, "token_ids": sequences.token_ids, "logprobs": values,
            "active_mask": sequences.active_mask,
        }, metadata)  # fmt: skip
    return place


def test_a_live_third_scorer_finds_the_temperature(tiny):
    found = evidence_of(tiny)
    known = at_hand.known(found, model=str(tiny / "model"), rescore=True)
    named = doctor.examine_pair(pairs.of_files([tiny / "training.safetensors", tiny / "rollout.safetensors"]), known)
    assert (named[0].cause, named[0].summary) == ("temperature", "training is the model with temperature 0.7")
    rescored = known.rescored
    assert rescored is not None
    r = found.rollout.logprobs[rescored.cells]
    assert np.abs(r - rescored.plain).max() < TINY_LLAMA_FLOAT32_NATS
    columns = {name: np.nanmedian(np.abs(column - r)) for name, column in rescored.otherwise.items()}
    assert all(columns[name] > 0.5 for name in ("logits of the place before", "the next token's", "the last token's"))
    assert np.isneginf(rescored.otherwise["top-p 0.8"]).any()


def evidence_of(tiny: Path) -> Evidence:
    return Evidence(*pairs.two_files([tiny / "rollout.safetensors", tiny / "training.safetensors"]))


# -- the tool


def test_the_tool_names_causes_and_what_to_try(xd, tmp_path):
    rollout, training = drawn(0)
    training[~ACTIVE] = np.nan
    training[np.flatnonzero(ACTIVE)[::9]] = 0.0
    made = attempt(tmp_path, (rollout, training))
    ran = xd("xd-doctor", made)
    assert ran.status == 0 and ran.err == ""
    assert "1. fill-values (0.95)" in ran.out and "exactly 0" in ran.out
    assert xd("xd-doctor", "--exit-code", made).status == 1
    two = xd("xd-doctor", "--json", score_path(made, "training"), score_path(made, "rollout"))
    assert schema.validate("diagnosis", json.loads(two.out), "")["findings"][0]["cause"] == "fill-values"
    clean = attempt(tmp_path / "clean", drawn(0))
    ran = xd("xd-doctor", "--exit-code", "-v", stdin=f"{clean}\n")
    assert ran.status == 0 and "Nothing wrong was found" in ran.out and "third-scorer: needs --rescore" in ran.out


def test_the_tool_rescores(xd, tiny):
    ran = xd("xd-doctor", "--json", "--rescore", tiny / "model", tiny / "rollout.safetensors",
             tiny / "training.safetensors")  # fmt: skip
    assert ran.status == 0, ran.err
    assert json.loads(ran.out)["findings"][0]["cause"] == "temperature"


def test_several_attempts_end_with_what_they_show_together(xd, tmp_path):
    rollout, training = drawn(0)
    other = (rollout + np.float32(0.25)).astype(np.float32)
    first = attempt(tmp_path / "a", (rollout, training))
    again = attempt(tmp_path / "b", (other, training), repeat=1)
    lines = xd("xd-doctor", "--json", first, again).out.splitlines()
    assert [len(json.loads(line)["subject"]) for line in lines] == [1, 1, 2]
    assert json.loads(lines[-1])["findings"][0]["cause"] == "not-repeatable"
    assert xd("xd-doctor", "--series", first).status == 2


def test_every_rule_is_shown(xd):
    ran = xd("xd-doctor", "--rules", "--json")
    rules = [schema.validate("doctor_rule", json.loads(line), "") for line in ran.out.splitlines()]
    assert [rule["detector"] for rule in rules] == [rule.detector for rule in diagnosis.RULES]
    shown = xd("xd-doctor", "--rules").out
    assert all(f"\n{rule['detector']}: " in f"\n{shown}" for rule in rules)


@pytest.mark.parametrize(("operands", "status"), [
    (["nowhere/c-0123456789abcdef/a0001"], 66),
    (["."], 65),
    (["not-an-attempt"], 66),
    (["one.safetensors"], 2),
    (["none.safetensors", "nor.safetensors"], 66),
    (["--reported", "luck=1", "x"], 2),
])  # fmt: skip
def test_what_cannot_be_read_is_said_in_a_line(xd, operands, status):
    ran = xd("xd-doctor", *operands)
    assert (ran.status, ran.out) == (status, "")
    assert len(ran.err.splitlines()) == 1 and ran.err.startswith("xd-doctor: ")


def test_a_damaged_record_is_said_and_costs_no_other_attempt_its_diagnosis(xd, tmp_path):
    bad, good = (attempt(tmp_path / name, drawn(0)) for name in ("bad", "good"))
    rewrite_json(bad, "comparison.json", threshold=2.0)
    ran = xd("xd-doctor", bad, good)
    assert ran.status == 65 and ran.out.count("Nothing wrong was found") == 1
    assert ran.err.startswith(f"xd-doctor: {bad}/comparison.json") and len(ran.err.splitlines()) == 1


def test_a_refused_attempt_is_passed_over_and_the_others_are_looked_at(xd, tmp_path):
    no = refused(tmp_path, ("training.attention_backend", "flash_attention_2"), "not here")
    ran = xd("xd-doctor", no, attempt(tmp_path / "right", drawn(0)))
    assert ran.status == 69 and "Nothing wrong was found" in ran.out


def test_the_documents_rules_are_the_programs():
    """docs/doctor.md names every cause that a detector may name, and no other."""
    page = (ROOT / "docs" / "doctor.md").read_text()
    missing = [cause for rule in diagnosis.RULES for cause in rule.causes if f"`{cause}`" not in page]
    assert missing == []
