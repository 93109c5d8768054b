"""The precision ladder: the same tokens scored with both sides in one dtype after another, and what goes with it.

A rung is a judged attempt; the dtypes that its two engines showed give it its unit roundoff, that of the coarser side.
Attempts that are equal but for the two dtypes are one ladder. `roundoff` holds the rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from libxd import canon, identity, knobs, roundoff, table
from libxd.effect import SideEffect, conditions, side_effect
from libxd.errors import XdError
from libxd.plain import leaves
from libxd.roundoff import Judgement, Sample
from libxd.rundir import SIDES, Attempt
from libxd.tensors import TensorFile

SCHEMA_VERSION = "xd.ladder.v1"
#: verdicts whose numbers are a difference of the two sides and nothing else
_MEASURED = ("PASS", "MISMATCH")
FIGURES = ("mean_absolute", "p50_absolute", "p99_absolute", "max_absolute")
#: two float64 sums of the same float32 numbers, relative
_SAME_MEAN = 1e-9


@dataclass(frozen=True)
class Rung:
    """An attempt as a rung.

    shared: what all rungs of its ladder have in common, in the terms of ladder.schema.json; pinned: what else they
    do. dtypes: by side, as the engines showed them (as materialised where one shows none, which `reason` says; as
    requested where nothing ran). unit_roundoff: of the coarser side. sample: None where the status is no measurement.
    beside: how far each side is from the reference.
    """

    attempt: Attempt
    shared: dict[str, Any]
    pinned: dict[str, Any]
    dtypes: dict[str, str]
    unit_roundoff: float
    status: str
    reason: str
    active: int
    figures: dict[str, float | None]
    sample: Sample | None
    beside: dict[str, SideEffect] | None

    @property
    def nearer(self) -> str | None:
        """The side with the smaller mean distance from the reference, "neither" for equal ones; None without."""
        means = [self.beside[side].mean_absolute for side in SIDES] if self.beside else [None]
        if None in means:
            return None
        return "neither" if means[0] == means[1] else SIDES[means.index(min(means))]

    def as_json(self) -> dict[str, Any]:
        return {
            "attempt": str(self.attempt),
            "case_id": self.attempt.case_id,
            "dtypes": self.dtypes,
            "unit_roundoff": self.unit_roundoff,
            "status": self.status,
            "reason": self.reason,
            "active": self.active,
            **self.figures,
            "reference": self.beside and {side: vars(effect) for side, effect in self.beside.items()},
            "nearer": self.nearer,
        }


@dataclass(frozen=True)
class Ladder:
    """Rungs that are equal but for the two dtypes, from the coarsest to the finest, and the answer."""

    rungs: list[Rung]
    judgement: Judgement

    def as_json(self) -> dict[str, Any]:
        """A line of `xd-ladder --json`."""
        judged = self.judgement
        return {
            "schema_version": SCHEMA_VERSION,
            **self.rungs[0].shared,
            "rungs": [rung.as_json() for rung in self.rungs],
            "slope": judged.slope and vars(judged.slope),
            "mean": judged.mean and vars(judged.mean),
            "max": judged.maximum and vars(judged.maximum),
            "answer": judged.answer,
            "why": judged.why,
        }


class Reference:
    """A third scorer of the same tokens: the training side of an attempt, in float32 and one pass.

    XdError 65 when it was judged invalid or computed in another precision, 69 when it was refused.
    """

    def __init__(self, attempt: Attempt) -> None:
        if refusal := attempt.refusal():
            raise refusal.error(attempt, "it is no reference")
        row = table.read(attempt)
        if row.verdict not in _MEASURED:
            raise XdError("is no reference, for it holds no valid scores", code="bad-reference", where=str(attempt),
                          found=row.verdict, expected=" or ".join(_MEASURED))  # fmt: skip
        dtype, unit_roundoff = _precision(attempt, "training")
        if unit_roundoff != roundoff.UNIT_ROUNDOFF["float32"]:
            found = f"{dtype} with TF32 products" if dtype == "float32" else dtype
            raise XdError("its training side is no reference", code="bad-reference", where=str(attempt), found=found,
                          expected="float32", hint="give the attempt of a float32 case")  # fmt: skip
        self.attempt = attempt

    def beside(self, attempt: Attempt) -> dict[str, SideEffect]:
        """How far each side of an attempt is from it. XdError 65 when it scored other tokens, weights or semantics."""
        return {side: side_effect(attempt, self.attempt, side, "training") for side in SIDES}


def ladders(rungs: Iterable[Rung]) -> list[Ladder]:
    """The ladders that these rungs make, in the order in which each first comes."""
    found: dict[str, list[Rung]] = {}
    for rung in rungs:
        found.setdefault(canon.digest([rung.shared, rung.pinned]), []).append(rung)
    return [_ladder(sorted(each, key=lambda rung: -rung.unit_roundoff)) for each in found.values()]


def apart(found: list[Ladder]) -> dict[str, list[str]]:
    """What keeps ladders from being one, beside the knobs: path -> the values there, each once. Empty for one ladder,
    and where knobs alone differ."""
    seen: dict[str, dict[str, None]] = {}
    for each in found:
        rung = each.rungs[0]
        for path, text in leaves({name: rung.shared[name] for name in ("experiment_id", "runtimes")} | rung.pinned):
            seen.setdefault(path, {})[text] = None
    return {path: list(values) for path, values in seen.items() if len(values) > 1}


def _ladder(rungs: list[Rung]) -> Ladder:
    return Ladder(rungs, roundoff.judge([rung.sample for rung in rungs if rung.sample]))


def read(attempt: Attempt, reference: Reference | None = None) -> Rung:
    """An attempt as a rung: judged, refused or left off. XdError 65 or 66 where its files are damaged."""
    row = table.read(attempt)
    comparison = row.comparison
    measured = comparison if row.verdict in _MEASURED else None
    shown = {side: _precision(attempt, side) if comparison else _requested(row.requested, side) for side in SIDES}
    unit_roundoff = max(u for _, u in shown.values())
    shared = _shared(attempt, row.requested["experiment_id"], judged=comparison is not None)
    return Rung(
        attempt=attempt,
        shared=shared,
        pinned=_pinned(attempt),
        dtypes={side: dtype for side, (dtype, _) in shown.items()},
        unit_roundoff=unit_roundoff,
        status=row.verdict,
        reason=row.reason,
        active=comparison["counts"]["active"] if comparison and comparison["counts"] else 0,
        figures={name: measured["logprob_difference"][name] if measured else None for name in FIGURES},
        sample=_sample(attempt, measured["logprob_difference"], unit_roundoff) if measured else None,
        beside=reference.beside(attempt) if reference and measured else None,
    )


def _shared(attempt: Attempt, experiment_id: str, judged: bool) -> dict[str, Any]:
    """Runtimes and knobs but for the dtypes: as the engines showed them, else as they were to be."""
    sides = attempt.materialized()["sides"]
    records = attempt.read("actual.json")["knobs"] if judged else []
    shown = {(each["side"], each["knob"]): each["actual"] for each in records if each["actual"] is not None}
    return {
        "experiment_id": experiment_id,
        "runtimes": {side: sides[side]["runtime"] for side in SIDES},
        "knobs": {
            side: {
                record["knob"]: shown.get((side, record["knob"]), record["materialized"])
                for record in sides[side]["knobs"]
                if record["knob"] != knobs.DTYPE_OF_SIDE[side]
            }
            for side in SIDES
        },
    }


def _pinned(attempt: Attempt) -> dict[str, Any]:
    """What else rungs of one ladder have in common: tokens, weights and semantics, and what they were scored with."""
    materialized = attempt.materialized()
    operators = {side: materialized["sides"][side]["operator"] for side in SIDES}
    return {
        "identity": identity.pinned(attempt.identity()),
        "submission": materialized["submission"],
        "conditions": {side: conditions(materialized, side) for side in SIDES},
        "operators": {
            side: {name: bound[name] for name in ("backend", "options", "version", "build")}
            for side, bound in operators.items()
        },
    }


def _requested(requested: dict[str, Any], side: str) -> tuple[str, float]:
    dtype = requested["values"][knobs.DTYPE_OF_SIDE[side]]
    return dtype, roundoff.UNIT_ROUNDOFF[dtype]


def _precision(attempt: Attempt, side: str) -> tuple[str, float]:
    """The dtype that a side of a judged attempt computed in, and its unit roundoff. XdError 65 for one that has none.

    Of float32 on CUDA whose products are in TF32, it is that of TF32.
    """
    wanted = (side, knobs.DTYPE_OF_SIDE[side])
    record = next(each for each in attempt.read("actual.json")["knobs"] if (each["side"], each["knob"]) == wanted)
    dtype = record["actual"] or record["materialized"]
    device = attempt.materialized()["sides"][side]["engine"].get("device")
    numerics = attempt.readback(side)["engine"].get("numerics")
    if dtype not in roundoff.UNIT_ROUNDOFF:
        raise XdError("computed in a dtype that is on no ladder", code="unknown-dtype", where=str(attempt),
                      path=f"/{wanted[1]}", found=dtype, expected=" ".join(roundoff.UNIT_ROUNDOFF))  # fmt: skip
    if dtype == "float32" and device == "cuda" and isinstance(numerics, dict) and numerics.get("matmul_tf32"):
        return dtype, roundoff.TF32_ROUNDOFF
    return dtype, roundoff.UNIT_ROUNDOFF[dtype]


def _sample(attempt: Attempt, difference: dict[str, Any], unit_roundoff: float) -> Sample:
    """From the sums of each sequence beside the token differences. XdError 65 when they do not give that mean."""
    path = attempt.file("token_diffs.safetensors")
    with TensorFile(path) as file:
        sums, counts = (np.array(file.array(name)) for name in ("sequence_sum_absolute", "sequence_active"))
    sample = Sample(unit_roundoff, sums, counts, difference["max_absolute"])
    if not math.isclose(sample.mean, difference["mean_absolute"], rel_tol=_SAME_MEAN):
        raise XdError("is not what the comparison was made of", code="not-its-verdict", where=str(path),
                      path="/sequence_sum_absolute", found=sample.mean, expected=difference["mean_absolute"],
                      hint="compare a new attempt; evidence is not edited")  # fmt: skip
    return sample
