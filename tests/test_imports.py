"""Scores of others as attempts: from records to a verdict, and through every tool that attempts go through."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from comparison_fixtures import floats, scored, snapshot

from libxd import canon, comparison, ladder, planner, schema, seal, sequences, table, table_text, verdict
from libxd.errors import Status, XdError
from libxd.identity import UNPROCESSED
from libxd.imports import publish
from libxd.imports.batch import ZERO_TAIL, Batch
from libxd.imports.record import UNKNOWN_SEMANTICS, Record
from libxd.imports.request import Declared
from libxd.knobs import CATALOG, DTYPE_OF_SIDE
from libxd.records import Case
from libxd.rundir import SIDES, Attempt
from libxd.tensors import TensorFile

NAN = np.float32(np.nan)
DTYPES = dict.fromkeys(SIDES, "float32")
RAW = {"logprobs": "raw", **UNPROCESSED}
DECLARED = Declared(DTYPES, checkpoint="c" * 64, semantics=RAW)


def record(ids: list[int], prompt_len: int | None, rollout: list[float], training: list[float], **more: Any) -> Record:
    """Active behind the prompt; the logprobs are those of the response."""
    prompt = prompt_len or 0
    filled = {side: floats(*[np.nan] * prompt, *values) for side, values in (("rollout", rollout),
                                                                            ("training", training))}  # fmt: skip
    return Record(np.array(ids), prompt_len, np.arange(len(ids)) >= prompt, filled, **more)


RECORDS = [
    record([5, 6, 7, 8], 2, [-1.0, -2.0], [-1.0, -2.5], where="dump.jsonl:1"),
    record([5, 6, 9], 2, [-0.25], [-0.25], where="dump.jsonl:2"),
]


def imported(runs, records=RECORDS, declared: Declared = DECLARED, name: str = "step 1", sides=SIDES) -> Attempt:
    batch = Batch.of_records(records, "dump.jsonl")
    attempt = publish.begin(runs, "mine", name, batch, declared)
    for side in sides:
        publish.add(attempt, side, batch)
    return attempt


# -- an attempt like any other


def test_an_import_is_judged_sealed_and_read_again(tmp_path):
    attempt = imported(tmp_path)
    judged = comparison.compare(attempt)
    assert (judged["status"], judged["violations"]) == ("MISMATCH", [])
    assert judged["counts"] == {"tokens": 7, "active": 3, "mismatches": 1, "bitwise_equal": 2, "nonfinite_rollout": 0,
                                "nonfinite_training": 0}  # fmt: skip
    assert judged["first_mismatch"] == {"sequence": 0, "position": 3, "token_id": 8, "rollout_logprob": -2.0,
                                        "training_logprob": -2.5}  # fmt: skip
    assert seal.seal(attempt) and seal.verify(attempt) == []
    assert verdict.read(attempt, Case.read(attempt))["status"] == "MISMATCH"
    same = imported(tmp_path / "same", [record([5, 6, 7], 2, [-1.0], [-1.0])])
    assert comparison.compare(same)["status"] == "PASS"


def test_the_request_makes_no_knob_up(tmp_path):
    """All that nobody declared is null, in the row, in what was built and in what was seen; the digests are theirs."""
    attempt = imported(tmp_path)
    row = attempt.requested()
    planner.require_sound(row, "row")
    declared = set(DTYPE_OF_SIDE.values())
    assert {knob for knob, value in row["values"].items() if value is not None} == declared
    assert set(row["values"]) == set(CATALOG) and not row["executable"] and not row["strict_fallback"]
    assert row["contract"]["dtype"] == "float32" and row["scenario"] == {"level": None, "device": None}
    for side in SIDES:
        records = attempt.materialized()["sides"][side]["knobs"]
        assert {each["status"] for each in records} == {"unobservable"}
        readback = attempt.readback(side)
        assert all(each["actual"] is None for each in readback["knobs"])
        seen = {name for name, value in readback["observed"].items() if value is not None}
        assert seen == {"selected_ids", "cu_seqlens", "active_mask", "semantics"}
        assert readback["observed"]["semantics"] == UNKNOWN_SEMANTICS


def test_rows_are_held_to_be_silent_or_planned(tmp_path):
    """A knob set in an imported row, an unknown one in a planned row, a row that calls itself executable."""
    row = imported(tmp_path).requested()
    for change, place in (
        ({"values": {**row["values"], "batch.size": 4}}, "/values/batch.size"),
        ({"executable": True}, "/executable"),
        ({"strategy": "pairwise"}, "/scenario/level"),
    ):
        with pytest.raises(XdError) as caught:
            schema.validate("plan_row", {**row, **change}, "row")
        assert place in {issue.path for issue in caught.value.issues}
    known = {**row, "missing": [each for each in row["missing"] if "/values" not in each]}
    with pytest.raises(XdError) as caught:
        planner.require_sound(known, "row")
    assert "/missing" in {issue.path for issue in caught.value.issues}


@pytest.mark.parametrize(
    ("declared", "undeclared"),
    [
        (Declared(DTYPES), ["the checkpoint", "the semantics"]),
        (replace(DECLARED, checkpoint=None), ["the checkpoint"]),
        (replace(DECLARED, semantics=None), ["the semantics"]),
    ],
)
def test_what_nobody_declared_is_no_identity_and_the_differences_are_written(tmp_path, declared, undeclared):
    attempt = imported(tmp_path, declared=declared)
    judged = comparison.compare(attempt)
    assert judged["status"] == "INVALID_IDENTITY" and judged["counts"]["mismatches"] == 1
    assert table.read(attempt).reason == f"nobody declared {' and '.join(undeclared)}"
    assert seal.seal(attempt)
    known = imported(tmp_path)
    comparison.compare(known)
    assert table.read(known).reason.startswith("as declared")


def test_a_side_that_says_another_semantics_is_no_identity(tmp_path):
    batch = Batch.of_records(RECORDS, "dump")
    for temperature, status in ((1.0, "MISMATCH"), (0.7, "INVALID_IDENTITY")):
        attempt = publish.begin(tmp_path, "mine", str(temperature), batch, DECLARED)
        publish.add(attempt, "rollout", batch, semantics={**UNKNOWN_SEMANTICS, "temperature": temperature})
        publish.add(attempt, "training", batch)
        assert comparison.compare(attempt)["status"] == status


def test_a_checkpoint_is_a_directory_or_its_digest(tmp_path, monkeypatch):
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(XdError, match="is no checkpoint"):
        imported(tmp_path, declared=replace(DECLARED, checkpoint=model))
    (model / "model.safetensors").write_bytes(b"weights")
    row = imported(tmp_path, declared=replace(DECLARED, checkpoint=model)).requested()
    planner.require_sound(row, "row")
    assert row["identity"]["model"] == config and row["derived"]["vocab_size"] == 320
    assert row["derived"]["vocab_padded_size"] is None and row["locations"]["checkpoint"] == str(model)
    digest = row["identity"]["checkpoint"]["digest"]
    again = imported(tmp_path / "again", declared=replace(DECLARED, checkpoint=digest)).requested()
    assert again["case_id"] == row["case_id"]
    (model / "model.safetensors").write_bytes(b"weight!")  # a trainer saves over it: digested anew
    assert imported(tmp_path, declared=replace(DECLARED, checkpoint=model)).requested()["case_id"] != row["case_id"]
    with pytest.raises(XdError) as caught:
        imported(tmp_path, declared=replace(DECLARED, checkpoint=tmp_path / "gone"))
    assert caught.value.status == Status.MISSING
    assert not list((tmp_path / "mine").glob("cases/*/*/.tmp*"))


def test_a_tokenizer_is_a_directory_to_show_text_by(tmp_path):
    place = tmp_path / "tokenizer"
    place.mkdir()
    with pytest.raises(XdError, match="no tokenizer file"):
        imported(tmp_path, declared=replace(DECLARED, tokenizer=place))
    (place / "tokenizer.json").write_text("{}")
    row = imported(tmp_path, declared=replace(DECLARED, tokenizer=place)).requested()
    planner.require_sound(row, "row")
    assert row["locations"]["tokenizer"] == str(place) and row["identity"]["tokenizer"]["policy"] is None


def test_a_verdict_takes_a_dtype_and_there_is_no_default(tmp_path):
    for dtypes in ({}, {"rollout": "float32"}, dict.fromkeys(SIDES, "int8")):
        with pytest.raises(XdError, match="no default") as caught:
            imported(tmp_path, declared=replace(DECLARED, dtypes=dtypes))
        assert caught.value.status == Status.USAGE
    assert not list(tmp_path.iterdir()), "nothing is written"
    mixed = imported(tmp_path, declared=replace(DECLARED, dtypes={"rollout": "bfloat16", "training": "float32"}))
    assert mixed.requested()["contract"]["dtype"] == "bfloat16"


def test_the_tokens_can_be_scored_again(tmp_path):
    """Beside the attempt lie its sequences, as the identity names them; the same tokens are one file."""
    attempts = [imported(tmp_path, name=name) for name in ("step 1", "step 2")]
    (path,) = (tmp_path / "mine" / "sequences").iterdir()
    frozen = sequences.read(path)
    assert frozen.token_ids.tolist() == [5, 6, 7, 8, 5, 6, 9] and frozen.prompt_lens.tolist() == [2, 2]
    assert frozen.positions.tolist() == [0, 1, 2, 3, 0, 1, 2] and frozen.prompt_index.tolist() == [0, 0]
    for attempt in attempts:
        row = attempt.requested()
        assert row["locations"]["sequences"] == str(path)
        assert row["identity"]["sequences"] == sequences.identity(path)
    assert attempts[0].case_id != attempts[1].case_id, "a step is a case of its own"


def test_responses_without_prompts_pin_no_tokens(tmp_path):
    """What the logprobs are given is unknown then: the differences are written, and no verdict is had."""
    attempt = imported(tmp_path, [record([7, 8], None, [-1.0, -2.0], [-1.0, -2.5])])
    judged = comparison.compare(attempt)
    assert judged["status"] == "INVALID_IDENTITY" and judged["counts"]["mismatches"] == 1
    assert table.read(attempt).reason == "nobody declared the prompts"
    assert not (tmp_path / "mine" / "sequences").exists() and seal.seal(attempt)


# -- two dumps


def test_two_sides_come_from_two_dumps(tmp_path):
    attempt = imported(tmp_path, sides=["rollout"])
    assert table.read(attempt).verdict == "incomplete"
    with pytest.raises(XdError) as caught:
        comparison.compare(attempt)
    assert caught.value.status == Status.MISSING
    training = [replace(each, logprobs={"training": each.logprobs["training"]}) for each in RECORDS]
    publish.add(attempt, "training", Batch.of_records(training, "other.csv"))
    together = imported(tmp_path / "together")
    names = [f"score_{side}.safetensors" for side in SIDES] + [f"readback_{side}.json" for side in SIDES]
    assert {name: snapshot(attempt)[name] for name in names} == {name: snapshot(together)[name] for name in names}
    publish.add(attempt, "training", Batch.of_records(training, "other.csv"))  # the same once more passes
    other = [replace(each, logprobs={"training": each.logprobs["training"] - 1}) for each in RECORDS]
    with pytest.raises(XdError) as caught:
        publish.add(attempt, "training", Batch.of_records(other, "other.csv"))
    assert caught.value.status == Status.CONFLICT


def changed(index: int, **changes: Any) -> list[Record]:
    return [replace(each, **changes) if i == index else each for i, each in enumerate(RECORDS)]


@pytest.mark.parametrize(
    ("records", "what"),
    [
        (changed(1, token_ids=np.array([5, 6, 10])),
         r"dump.jsonl:2.*another token.*sequence 1, position 2 \(found 10, expected 9\)"),
        (changed(0, token_ids=np.array([5, 1, 7, 8])),
         r"dump.jsonl:1.*another token.*sequence 0, position 1 \(found 1, expected 6\)"),
        ([record([5, 6, 7], 2, [-1.0], [-1.0]), RECORDS[1]],
         r"another length.*sequence 0, position 3 \(found 3 tokens, expected 4 tokens\)"),
        ([record([5, 6, 4, 8, 9], 2, [-1.0] * 3, [-1.0] * 3), RECORDS[1]],
         r"another token.*sequence 0, position 2 \(found 4, expected 7\)"),
        (RECORDS[:1], r"another number of sequences.*\(found 1, expected 2\)"),
        (changed(0, active=np.array([False, False, True, False])),
         r"another mask.*sequence 0, position 3 \(found false, expected true\)"),
    ],
)  # fmt: skip
def test_other_tokens_are_refused_by_the_first_that_differs(tmp_path, records, what):
    attempt = imported(tmp_path, sides=["rollout"])
    before = snapshot(attempt)
    with pytest.raises(XdError) as caught:
        publish.add(attempt, "training", Batch.of_records(records, "dump.jsonl"))
    assert caught.value.code == "other-tokens"
    assert re.search(what, caught.value.line()), caught.value.line()
    assert snapshot(attempt) == before


def test_what_is_no_place_for_a_side(tmp_path):
    batch = Batch.of_records(RECORDS, "dump")
    planned = scored(tmp_path, floats(-1, -2), floats(-1, -2))
    with pytest.raises(XdError, match="is no imported attempt"):
        publish.add(planned, "training", batch)
    attempt = imported(tmp_path, sides=[])
    with pytest.raises(XdError, match="holds other tokens"):
        publish.add(attempt, "rollout", Batch.of_records(RECORDS[:1], "dump"))
    with pytest.raises(XdError, match="no logprobs of the training side"):
        publish.add(attempt, "training", Batch.of_records(
            [replace(each, logprobs={"rollout": each.logprobs["rollout"]}) for each in RECORDS], "dump"))  # fmt: skip


# -- what counts as scored


def test_missing_is_nan_and_a_filled_cell_is_missing():
    given = Record(
        np.arange(6), 2, np.array([False, False, True, False, True, False]),
        {"rollout": floats(-9, 0, 0, 0, np.nan, -0.0), "training": floats(0, -3, -1, -2, -1, 0)},
    )  # fmt: skip
    batch = Batch.of_records([given], "dump")
    # the first has none; masked zeros are a fill; an active zero is a probability of one; a missing one stays missing
    np.testing.assert_array_equal(batch.logprobs["rollout"], floats(np.nan, np.nan, 0, np.nan, np.nan, np.nan))
    np.testing.assert_array_equal(batch.logprobs["training"], floats(np.nan, -3, -1, -2, -1, np.nan))
    assert len({value.tobytes() for value in batch.logprobs["rollout"] if np.isnan(value)}) == 1, "one quiet NaN"


def test_a_missing_active_logprob_is_an_invalid_artifact(tmp_path):
    attempt = imported(tmp_path, [record([5, 6, 7, 8], 2, [-1.0, np.nan], [-1.0, -2.0])])
    assert comparison.compare(attempt)["status"] == "INVALID_ARTIFACT"


def test_zeros_to_the_end_are_taken_as_scored_and_spoken_of(tmp_path):
    def notes(zeros: int, before: float = -1.0) -> list[str]:
        values = [before, *[0.0] * zeros]
        one = record(list(range(2 + len(values))), 2, values, [-1.0] * len(values))
        batch = Batch.of_records([RECORDS[0], one], "dump")
        attempt = publish.begin(tmp_path, "mine", f"{zeros} {before}", batch, DECLARED)
        publish.add(attempt, "training", batch)
        return publish.add(attempt, "rollout", batch)

    assert notes(ZERO_TAIL - 1) == []
    (said,) = notes(ZERO_TAIL)
    assert "of 1 of the sequences (sequence 1 from position 3 on)" in said
    assert "sequence 1 from position 2 on" in notes(ZERO_TAIL, 0.0)[0], "zeros alone"


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (changed(1, token_ids=np.array([5, 6, -100])), "no token id.*found -100"),
        (changed(1, token_ids=np.array([5, 6, 2**31])), "no token id"),
        (changed(1, active=np.ones(2, bool)), "another length.*/active|/active.*another length"),
        (changed(1, logprobs={"rollout": floats(-1), "training": floats(-1, -1, -1)}), "another length"),
        (changed(1, logprobs={"rollout": floats(-1, -1, -1)}), "other sides"),
        (changed(1, token_ids=np.array([5.0, 6.0, 9.5])), "another type.*found float64, expected integer"),
        (changed(1, active=np.array([0, 0, 1])), "another type.*found int64, expected bool"),
        (changed(1, prompt_len=4), "longer than its sequence"),
        (changed(1, active=np.ones(3, bool)), "prompt's token is active"),
        (changed(1, advantage=np.ones(2)), "another length"),
        (changed(1, token_ids=np.array([], int)), "without tokens"),
        ([], "no sequence"),
    ],
)
def test_records_that_contradict_themselves(bad, what):
    with pytest.raises(XdError) as caught:
        Batch.of_records(bad, "dump.jsonl")
    assert caught.value.status == Status.INVALID
    assert re.search(what, caught.value.line()) and ("dump.jsonl:2" if bad else "dump.jsonl") in caught.value.line()
    Batch.of_records(RECORDS, "dump.jsonl")


def test_what_a_dump_holds_beside_its_scores_is_kept(tmp_path):
    beside = [
        replace(each, prompt="p", advantage=value, reward=float(i), version=7)
        for i, (each, value) in enumerate(zip(RECORDS, (0.5, np.array([0, 0, -1.0])), strict=True))
    ]
    attempt = imported(tmp_path, beside)
    with TensorFile(attempt.file("score_rollout.safetensors")) as file:
        np.testing.assert_array_equal(file.array("advantages"), floats(0.5, 0.5, 0.5, 0.5, 0, 0, -1))
        assert file.array("rewards").tolist() == [0, 1] and file.array("versions").tolist() == [7, 7]
        assert file.array("prompt_index").tolist() == [0, 0]
    assert comparison.compare(attempt)["status"] == "MISMATCH"
    partly = imported(tmp_path, [beside[0], RECORDS[1]], name="partly")  # half of them is none of them
    with TensorFile(partly.file("score_rollout.safetensors")) as file:
        assert not {"advantages", "rewards", "versions", "prompt_index"} & set(file.names)


# -- the tools


def test_tables_are_of_an_experiment_and_in_order(tmp_path):
    attempts = [imported(tmp_path, name=name) for name in ("step 10", "step 2")]
    for attempt in attempts:
        comparison.compare(attempt)
    (found,) = table.tables([table.read(attempt) for attempt in attempts])
    assert [row.changed for row in found.rows] == ["step 2", "step 10"] and not found.floors
    assert all(not row.effects for row in found.rows)
    text = "\n".join(table_text.lines(found))
    assert "mine (imported)" in text and "float32, as declared" in text and "baseline." not in text.split("\n")[0]
    assert "Noise floor" not in text and "Scored by others" in text


def test_ladders_take_the_declared_dtypes(tmp_path):
    names = ("bfloat16", "float16", "float32")
    attempts = [imported(tmp_path, declared=replace(DECLARED, dtypes=dict.fromkeys(SIDES, each))) for each in names]
    for attempt in attempts:
        comparison.compare(attempt)
    (found,) = ladder.ladders(ladder.read(attempt) for attempt in attempts)
    assert [rung.dtypes["rollout"] for rung in found.rungs] == list(names)
    schema.validate("ladder", found.as_json(), "ladder")


def test_every_tool_takes_an_imported_attempt_or_says_why_not(xd, tmp_path):
    attempts = [str(imported(tmp_path, name=name)) for name in ("step 1", "step 2")]
    paths = "".join(f"{path}\n" for path in attempts)
    rows = b"".join(canon.dumps(Attempt(path).requested()) + b"\n" for path in attempts).decode()
    assert xd("xd-compare", *attempts).out == xd("xd-seal", *attempts).out == paths
    assert xd("xd-seal", "--verify", *attempts).status == 0
    assert "mine (imported)" in xd("xd-compare", "--table", *attempts).out
    assert xd("xd-ladder", *attempts).status == 0
    effect = json.loads(xd("xd-compare", "--against", *attempts).out)
    assert effect["rollout"]["mean_absolute"] == 0
    assert set(effect["conditions"].values()) == {"conditions that nobody saw (imported)"}
    assert xd("xd-resume", "--runs", tmp_path, "--answers", stdin=rows).out == paths
    for tool, arguments, stdin in (
        ("xd-resume", ["--runs", tmp_path, "--runtime", "cpu-smoke"], rows),
        ("xd-materialize", ["--runs", tmp_path, "--runtime", "cpu-smoke"], rows),
        ("xd-score", ["--side", "rollout"], paths),
    ):
        ran = xd(tool, *arguments, stdin=stdin)
        assert (ran.status, ran.out) == (Status.REFUSED, "")
        assert ran.err.count("imported") >= 2 and "Traceback" not in ran.err
