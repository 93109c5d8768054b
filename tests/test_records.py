"""An attempt's records are one case's: none of them can be exchanged, and every tool that reads them says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from comparison_fixtures import PARAMETERS, floats, rewrite_json, scored
from materialize_fixtures import environments, policy

from libxd import canon, comparison, materialize, planner, records, resume, seal
from libxd.errors import Status, XdError
from libxd.records import Case
from libxd.rundir import Attempt, RunDirectory


def attempt(root: Path, **options: Any) -> Attempt:
    return scored(root, floats(-1, -2, -3), floats(-1, -2, -3), **options)


def other_tokens(made: Attempt) -> None:
    """Another identity, whole in itself: that of a case with other tokens."""
    sequences = made.identity()["sequences"] | {"token_ids": "0" * 64, "num_active": 2}
    rewrite_json(made, "identity.json", sequences=sequences)


def other_weights(made: Attempt) -> None:
    weights = made.identity()["weights"]
    weights["training"]["parameters"] = PARAMETERS | {"head": "0" * 64}
    rewrite_json(made, "identity.json", weights=weights)


def other_semantics(made: Attempt) -> None:
    rewrite_json(made, "identity.json", semantics=made.identity()["semantics"] | {"temperature": 0.5})


def another_request(made: Attempt) -> None:
    """Sound in itself, and of this case by its name; but then its content gives another."""
    row = made.requested()
    row["values"]["batch.size"] = 1
    rewrite_json(made, "requested.json", **row)


def another_request_whole(made: Attempt) -> None:
    row = made.requested()
    row["values"]["batch.size"] = 1
    row["case_digest"] = planner.case_digest(row)
    rewrite_json(made, "requested.json", **row)


def rekeyed(made: Attempt, **changed: Any) -> None:
    value = made.materialized() | changed
    rewrite_json(made, "materialized.json", **changed, execution_key=materialize.execution_key(value))


def another_key(made: Attempt) -> None:
    rewrite_json(made, "materialized.json", execution_key="0" * 64)


def other_environment(made: Attempt) -> None:
    """Under the old key."""
    sides = made.materialized()["sides"]
    sides["rollout"]["environment"]["python"] = "3.13.0"
    rewrite_json(made, "materialized.json", sides=sides)


def other_knob(made: Attempt) -> None:
    sides = made.materialized()["sides"]
    (record,) = [record for record in sides["rollout"]["knobs"] if record["knob"] == "rollout.dtype"]
    record |= {"requested": "float16", "materialized": "float16"}
    rekeyed(made, sides=sides)


def looser(made: Attempt) -> None:
    rekeyed(made, strict=False)


def other_repeat(made: Attempt) -> None:
    rekeyed(made, repeat=1)


EXCHANGES = {
    other_tokens: "identity.json#/sequences",
    other_weights: "identity.json#/weights/training/digest",
    other_semantics: "identity.json#/semantics",
    another_request: "requested.json#/case_digest",
    another_request_whole: "requested.json#/case_id",
    another_key: "materialized.json#/execution_key",
    other_environment: "materialized.json#/execution_key",
    other_knob: "materialized.json#/sides/rollout/knobs/3/requested",
    looser: "materialized.json#/strict",
    other_repeat: "materialized.json#/repeat",
}


def refused(work: Any, made: Attempt, place: str) -> None:
    with pytest.raises(XdError) as caught:
        work(made)
    assert caught.value.status == Status.INVALID
    assert place in caught.value.line()


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_exchanged_record_is_refused_where_records_are_read(tmp_path: Path, exchange: Any) -> None:
    made = attempt(tmp_path)
    Case.read(made)
    exchange(made)
    refused(Case.read, made, EXCHANGES[exchange])


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_it_is_neither_compared(tmp_path: Path, exchange: Any) -> None:
    made = attempt(tmp_path)
    exchange(made)
    refused(comparison.compare, made, EXCHANGES[exchange])
    assert not made.has("comparison.json")


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_nor_sealed(tmp_path: Path, exchange: Any) -> None:
    made = attempt(tmp_path)
    comparison.compare(made)
    exchange(made)
    refused(seal.seal, made, EXCHANGES[exchange])
    assert not made.sealed


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_nor_an_answer(tmp_path: Path, exchange: Any) -> None:
    """Even where somebody made a seal that fits: without the check a row would be answered by other tokens."""
    made = attempt(tmp_path)
    row = made.requested()
    comparison.compare(made)
    seal.seal(made)
    exchange(made)
    sealed = json.loads(made.file("COMPLETE").read_bytes())
    for name in sealed["files"]:
        data = made.file(name).read_bytes()
        sealed["files"][name] = {"blake3": canon.digest_bytes(data), "bytes": len(data)}
    rewrite_json(made, "COMPLETE", files=sealed["files"])
    for plan in (None, materialize.materialized(row, policy(), environments())):
        assert resume.outcome(row, RunDirectory(tmp_path, "test"), plan).state == "pending"


def test_a_records_digest_leaves_out_one_member_alone(tmp_path: Path) -> None:
    made = attempt(tmp_path)
    row, readback = made.requested(), made.readback("rollout")
    assert records.digest("requested.json", row) == records.digest("requested.json", row | {"locations": {}})
    assert records.digest("requested.json", row) != records.digest("requested.json", row | {"repeat": 1})
    name = "readback_rollout.json"
    assert records.digest(name, readback) == records.digest(name, readback | {"reuse": {}})
    assert records.digest(name, readback) != records.digest(name, readback | {"engine": {"threads": 3}})
    assert records.digest("identity.json", row) == canon.digest(row)


@pytest.mark.parametrize("side", ["rollout", "training"])
def test_a_record_of_each_knob(tmp_path, side):
    """What a ladder or a scorer looks for is there, once."""
    made = attempt(tmp_path)
    sides = made.materialized()["sides"]
    held = sides[side]["knobs"]
    for changed in (held[1:], [*held, held[0]]):
        sides[side]["knobs"] = changed
        rekeyed(made, sides=sides)
        with pytest.raises(XdError, match="one record of each knob") as caught:
            Case.read(made)
        assert caught.value.path == f"/sides/{side}/knobs"
    sides[side]["knobs"] = held
    rekeyed(made, sides=sides)
    Case.read(made)
