"""What the live engine showed, against what was materialised. Pure: data in, data out.

An engine shows a knob in `settings` (before scoring) or in `behaviour` (right after). What it shows is compared with
`materialized` of the knob's record; nothing is ever copied from the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from libxd.runtimes.protocol import Observation

Stage = Literal["settings", "behaviour", "operator"]


@dataclass(frozen=True)
class Refusal:
    """Why the scores of this attempt are not published; `knob` None when it is about no single knob."""

    stage: Stage
    knob: str | None
    expected: Any
    observed: Any
    reason: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class KnobReadback:
    """One knob as the engine showed it. status: applied, fallback (a declared one), ignored or unobservable."""

    knob: str
    actual: Any
    status: str
    stage: Stage
    evidence: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    records: Sequence[Mapping[str, Any]], observations: Mapping[str, Observation], stage: Stage, strict: bool
) -> tuple[list[KnobReadback], list[Refusal]]:
    """Set the knob records of a side beside what the engine shows at one stage.

    At "settings" a knob that is not among the observations is left for "behaviour"; at "behaviour" a knob that is not
    there cannot be seen at all. What is ignored or unobservable is refused in strict mode, and recorded otherwise.
    """
    knobs, refusals = [], []
    for record in records:
        name, expected = record["knob"], record["materialized"]
        if name not in observations and stage == "settings":
            continue
        seen = observations.get(name, Observation(None))
        if seen.value is None:
            status, reason = "unobservable", "the engine cannot show what it uses"
        elif not same(seen.value, expected):
            status, reason = "ignored", "the engine uses another value than the materialised one"
        else:
            status, reason = record["status"], ""
        knobs.append(KnobReadback(name, seen.value, status, stage, seen.evidence))
        if reason and strict:
            refusals.append(Refusal(stage, name, expected, seen.value, reason))
    return knobs, refusals


def remaining(
    records: Sequence[Mapping[str, Any]], settings: Sequence[KnobReadback], behaviour: Mapping[str, Observation]
) -> list[Mapping[str, Any]]:
    """The records to compare with the behaviour: not shown as settings, or shown again by running."""
    shown = {knob.knob for knob in settings if knob.actual is not None}
    return [record for record in records if record["knob"] not in shown or record["knob"] in behaviour]


def merge(
    records: Sequence[Mapping[str, Any]], settings: Sequence[KnobReadback], behaviour: Sequence[KnobReadback]
) -> list[KnobReadback]:
    """One readback a knob, in the records' order; what running showed outweighs what the settings said."""
    found = {knob.knob: knob for knob in (*settings, *behaviour)}
    return [found[record["knob"]] for record in records if record["knob"] in found]


def same(observed: Any, expected: Any) -> bool:
    """Equality of knob values; true is not 1."""
    return type(observed) is type(expected) and observed == expected


def operator_refusals(plan: Mapping[str, Any], operator: Mapping[str, Any]) -> list[Refusal]:
    """The operator record of materialized.json against the one read from the instance: it, and no other, ran.

    These are refused in every mode: scores that did not come from the operator are not the case's scores.
    """
    refusals = [
        Refusal("operator", None, plan[key], operator[key], f"the instance is of another {key}")
        for key in ("backend", "version", "build")
        if operator[key] != plan[key]
    ]
    if operator["calls"] < 1:
        refusals.append(Refusal("operator", None, "at least one call", operator["calls"],
                                "the engine never called the operator"))
    return refusals
