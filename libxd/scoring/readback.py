"""What the live engine showed, against what was materialised. Pure: data in, data out.

An engine shows a knob in `settings` (before scoring) or in `behaviour` (right after). What it shows is compared with
`materialized` of the knob's record; nothing is ever copied from the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from libxd.runtimes.protocol import Observation

if TYPE_CHECKING:
    import numpy as np

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


def operator_refusals(plan: Mapping[str, Any], operator: Mapping[str, Any], to_score: bool = True) -> list[Refusal]:
    """The operator record of materialized.json against the one read from the instance: it, and no other, ran.

    These are refused in every mode: scores that did not come from the operator are not the case's scores. Where there
    is nothing to score (to_score False), it need not have run.
    """
    refusals = [
        Refusal("operator", None, plan[key], operator[key], f"the instance is of another {key}")
        for key in ("backend", "version", "build")
        if operator[key] != plan[key]
    ]
    if to_score and operator["calls"] < 1:
        refusals.append(Refusal("operator", None, "at least one call", operator["calls"],
                                "the engine never called the operator"))
    return refusals


def scored_refusals(
    returned: tuple[np.ndarray, np.ndarray], selected_ids: np.ndarray, logprobs: np.ndarray, scored: np.ndarray,
    active_mask: np.ndarray, vocabulary_shards: int,
) -> list[Refusal]:  # fmt: skip
    """What is published against what the operator returned: every number came from it, refused in every mode otherwise.

    returned: ids int64 [n] and logprobs float32 [n] of its calls. selected_ids int32, logprobs float32, scored and
    active_mask bool: [T]. Published logprobs must be, bit for bit, those that it gave for the same ids; where it is
    given one of several vocabulary shards at a time, only their number can be held against the published ones.
    """
    import numpy as np

    ids, values = returned
    unscored = int(np.count_nonzero(active_mask & ~scored)) if len(ids) else 0
    made_up = int(np.count_nonzero(~scored & ~np.isnan(logprobs)))
    count = int(np.count_nonzero(scored))
    refusals = []
    if unscored:
        refusals.append(_uncovered(unscored, "active tokens that the operator was not called for"))
    if made_up:
        refusals.append(_uncovered(made_up, "logprobs of tokens that the operator was not called for"))
    if len(ids) not in {count, count * vocabulary_shards}:
        refusals.append(Refusal("operator", None, count, len(ids),
                                "the operator gave another number of logprobs than are published"))
    elif len(ids) == count:
        given, published = _pairs(ids, values), _pairs(selected_ids[scored], logprobs[scored])
        if differing := int(np.count_nonzero(given != published)):
            refusals.append(_uncovered(differing, "published logprobs that the operator did not give"))
    return refusals


def _uncovered(count: int, what: str) -> Refusal:
    return Refusal("operator", None, 0, count, what)


def _pairs(ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
    """Ids and the bits of their logprobs, int64 [n], in one order however they came."""
    import numpy as np

    bits = np.ascontiguousarray(logprobs, np.float32).view(np.uint32).astype(np.int64)
    return np.sort((ids.astype(np.int64) << 32) | bits)


def submission_refusals(submission: str, in_order: bool, ran: Sequence[Sequence[int]]) -> list[Refusal]:
    """The order of submission as it ran; another one than was materialised is another repeat, refused in every mode."""
    if in_order:
        return []
    return [Refusal("behaviour", None, submission, [list(batch) for batch in ran][:8],
                    "the sequences were submitted in another order; observed are the first batches")]
