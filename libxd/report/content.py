"""A report's content: everything that any of its formats says, as one JSON value (schemas/report.schema.json).

Nothing of it depends on a clock, a host name or where the run directory lies: the same evidence gives the same value.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from libxd import bootstrap, canon, doctor, effect, impact, pairs, table
from libxd.bootstrap import Interval
from libxd.difference import Difference
from libxd.errors import XdError
from libxd.pairs import Pair
from libxd.plain import plain, shortened
from libxd.report import answer, conditions, strip
from libxd.report.survey import Survey
from libxd.report.vocabulary import Vocabulary
from libxd.rundir import SEAL, SIDES, Attempt
from libxd.table import Row, Table
from libxd.table_text import claim
from libxd.tensors import TensorFile

SCHEMA_VERSION = "xd.report.v1"
#: windows of tokens a case, and tokens a window: fewer of many cases, which keeps a page of 256 under ten megabytes
_MANY = 64
WINDOWS_OF_FEW, WINDOWS_OF_MANY = (4, 60), (2, 48)
_RATIO = ("count", "p01", "p50", "p99", "max", "ess_fraction", "chi_square")
_MOST_EVIDENCE = 240
_MOST_VIOLATIONS = 32


@dataclass(frozen=True)
class Report:
    """The verdict table that a report is about, and all that it says."""

    table: Table
    value: dict[str, Any]


def read(rows: list[Row], vocabulary: Vocabulary | None, redact: bool, done: Callable[[], None]) -> Report:
    """A report of rows that are of one experiment under one contract. `done` is called after each.

    redact: no token's text and no token's id. XdError 65 for rows of several experiments, or of none.
    """
    found = table.tables(rows)
    if len(found) != 1:
        raise _several(found)
    (judged,) = found
    first, imported = judged.rows[0].requested, judged.rows[0].is_imported
    seen = [row for row in judged.rows if row.comparison] or judged.rows[:1]
    windows = WINDOWS_OF_FEW if len(rows) <= _MANY else WINDOWS_OF_MANY
    cases = []
    for row in judged.rows:
        cases.append({"name": judged.name(row), **_case(row, windows, vocabulary, redact)})
        done()
    value = {
        "schema_version": SCHEMA_VERSION,
        **{name: first[name] for name in ("experiment_id", "contract")},
        "imported": imported,
        "scenario_id": None if imported else first["scenario_id"],
        "scenario": None if imported else first["scenario"],
        "claim": claim(judged.rows),
        "threshold": judged.threshold,
        "redacted": redact,
        "identity": _identity([row.requested["identity"] for row in seen]),
        "floors": [
            {
                "baseline": cases[judged.rows.index(floors.baseline)]["name"],
                "repeats": floors.repeats,
                "sides": {
                    side: {"mean_absolute": floors.sides[side][0], "max_absolute": floors.sides[side][1]}
                    if side in floors.sides
                    else None
                    for side in SIDES
                },
            }
            for floors in judged.floors
        ],
        "cases": cases,
        "conditions": conditions.compared(
            [(case["name"], row.attempt) for case, row in zip(cases, judged.rows, strict=True) if row.attempt]
        ),
    }
    return Report(judged, {**value, "answer": answer.of(value)})


def _several(found: list[Table]) -> XdError:
    """Tables that one report cannot hold, and which attempts each of them has."""
    named = ", ".join(f"{each.rows[0].requested['experiment_id']} under {each.threshold:.6g} nats" for each in found)
    attempts = [[str(row.attempt) for row in each.rows if row.attempt] for each in found]
    each = (shlex.quote(some[0]) + (f" and {len(some) - 1} more" if some[1:] else "") for some in attempts if some)
    hint = f"give the attempts of one: {', or '.join(each)}"
    return XdError("a report is of one experiment under one threshold", code="several-experiments",
                   found=named or "no rows", expected="one", hint=hint)  # fmt: skip


def _identity(identities: list[dict[str, Any]]) -> dict[str, Any]:
    """What both sides had to score; null where that is not at hand, or not the same for all."""
    found = [
        {
            **{name: each[name]["digest"] for name in ("checkpoint", "tokenizer", "sequences")},
            **{name: each["sequences"][name] for name in ("num_sequences", "num_tokens", "num_active")},
            **{name: each[name] for name in ("semantics", "rollout_mode", "model_state")},
        }
        for each in identities
    ]
    return {name: value if all(each[name] == value for each in found) else None for name, value in found[0].items()}


def _case(row: Row, windows: tuple[int, int], vocabulary: Vocabulary | None, redact: bool) -> dict[str, Any]:
    """One row of the table, with all that is shown of it."""
    comparison = row.comparison
    numbers = comparison if comparison is not None and comparison["counts"] is not None else None
    return {
        **{name: row.requested[name] for name in ("case_id", "repeat", "intervention")},
        "baseline": row.is_baseline,
        "attempt": row.attempt.attempt_id if row.attempt else None,
        "verdict": row.verdict,
        "reason": row.reason,
        "sealed": bool(row.attempt and row.attempt.sealed),
        "counts": numbers and numbers["counts"],
        "logprob_difference": numbers and numbers["logprob_difference"],
        "kl": numbers and numbers["kl"],
        "value_grid": numbers and numbers["value_grid"],
        "worst": _place(numbers and numbers["worst"], redact),
        "first_mismatch": _place(numbers and numbers["first_mismatch"], redact),
        "effects": [_effect(row, *each) for each in row.effects],
        "change_of_difference": _change(row),
        **_survey(row, numbers, windows, vocabulary, redact),
        "knobs": _knobs(row),
        "violations": [
            {key: violation[key] for key in ("code", "side", "path")}
            for violation in (comparison["violations"][:_MOST_VIOLATIONS] if comparison else ())
        ],
        "digests": _digests(row),
    }


def _place(place: dict[str, Any] | None, redact: bool) -> dict[str, Any] | None:
    return place and {**place, "token_id": None if redact else place["token_id"]}


def _effect(row: Row, side: str, measured: effect.SideEffect, standing: str) -> dict[str, Any]:
    """How far a side is from the baseline's, on average over tokens and with its interval."""
    finite = measured.mean_absolute is not None
    mean = bootstrap.mean(*effect.sequence_sums(row.tried, row.beside[side].tried, side)) if finite else None
    return {
        "side": side,
        "mean_absolute": _interval(mean),
        "max_absolute": measured.max_absolute,
        "bitwise_equal_share": measured.bitwise_equal_share,
        "standing": standing,
    }


def _change(row: Row) -> dict[str, Any] | None:
    """Mean |training - rollout| here less that of the baseline, over the same draws; null without a baseline."""
    if len({id(baseline) for baseline in row.beside.values()}) != 1:
        return None
    sums, counts = _sums(row)
    theirs, other = _sums(next(iter(row.beside.values())))
    if not (np.isfinite(sums).all() and np.isfinite(theirs).all() and np.array_equal(counts, other)):
        return None
    return _interval(bootstrap.mean(sums, counts, theirs))


def _sums(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Of each sequence: sum of |training - rollout|, and active tokens."""
    with TensorFile(row.tried.file("token_diffs.safetensors")) as file:
        return tuple(np.array(file.array(name)) for name in ("sequence_sum_absolute", "sequence_active"))


def _interval(found: Interval | None) -> dict[str, Any] | None:
    return found and vars(found)


def _survey(
    row: Row, numbers: dict[str, Any] | None, windows: tuple[int, int], vocabulary: Vocabulary | None, redact: bool
) -> dict[str, Any]:
    """What one more pass over the tokens shows; nulls where there are no numbers."""
    if numbers is None:
        return {"distribution": None, "positions": None, "strips": []}
    pair = pairs.of_attempt(row.tried)
    difference = Difference(pair.rollout, pair.training, numbers["threshold"])
    survey = Survey(difference)
    most, width = windows
    return {
        "distribution": survey.distribution(),
        "positions": survey.positions(),
        "strips": strip.strips(difference, survey.worst(most), width, vocabulary, redact),
        "findings": _findings(pair, row.tried, redact),
        **_impact(pair),
    }


def _findings(pair: Pair, attempt: Attempt, redact: bool) -> list[dict[str, Any]]:
    """What the doctor says from the scores alone; the attempt by its place in the run, wherever that lies.

    redact: without the lines of evidence, which name token ids.
    """
    place = f"cases/{attempt.case_id}/{attempt.attempt_id}"

    def moved(lines: list[str]) -> list[str]:
        for path in (shlex.quote(str(attempt)), str(attempt)):
            lines = [line.replace(path, place) for line in lines]
        return lines

    return [
        {**found.as_json(), "evidence": [] if redact else moved(found.evidence), "next": moved(found.next)}
        for found in doctor.examine_pair(pair)
    ]


def _impact(pair: Pair) -> dict[str, Any]:
    """What the difference does to an update, as far as the scores alone say it; {} where no ratio can be formed."""
    try:
        found = impact.of_pair(pair).figures
    except XdError:  # other tokens, nothing active, a logprob that is not finite: the verdict says so
        return {}
    return {"impact": {
        "ratio": {level: {name: found["ratio"][level][name] for name in _RATIO} for level in ("token", "sequence")},
        "clipped": [{"name": each["name"], **each["outside"]} for each in found["objectives"]],
    }}  # fmt: skip


def _knobs(row: Row) -> list[dict[str, Any]]:
    """Requested, materialised and actual, each with what shows it; of a case that was not judged, as far as it came."""
    if row.attempt is None:
        return []
    sides = row.attempt.materialized()["sides"]
    judged = row.comparison is not None
    shown = {side: row.attempt.readback(side)["knobs"] if judged else [] for side in SIDES}
    records = []
    for side in SIDES:
        seen = {record["knob"]: record for record in shown[side]}
        for planned in sides[side]["knobs"]:
            live = seen.get(planned["knob"])
            evidence = canon.dumps(live["evidence"]).decode() if live and live["evidence"] else ""
            records.append({
                "knob": planned["knob"],
                "side": side,
                **{name: planned[name] for name in ("requested", "materialized", "lifecycle")},
                "actual": live["actual"] if live else None,
                "status": live["status"] if live else ("unobservable" if judged else planned["status"]),
                "planned": _evidence(planned["evidence"]),
                "seen": _evidence(evidence),
            })  # fmt: skip
    return records


def _evidence(text: str) -> str:
    return shortened(plain(text), _MOST_EVIDENCE)


def _digests(row: Row) -> dict[str, str]:
    """Of the files that the verdict rests on and of those it wrote, as the comparison names them."""
    if row.comparison is None:
        return {}
    named = {**row.comparison["inputs"], "actual.json": row.comparison["actual"]}
    named["token_diffs.safetensors"] = row.comparison["token_diffs"]
    if row.tried.has(SEAL):
        named["comparison.json"] = row.tried.read(SEAL)["files"]["comparison.json"]["blake3"]
    return {**named, "execution_key": row.comparison["execution_key"]}
