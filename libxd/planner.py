"""Experiment -> plan rows: the baseline and its declared variations, never a Cartesian product.

A plan is all its rows in order: the baseline, its repeats, then the cases. The case digest depends on nothing that a
run shows; a repeat is the same case once more. Of a bisection only the two ends are planned; `subset` makes the rows
between them, one at a time, as outcomes ask for them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from libxd import canon, identity, knobs, publish, schema, strictjson, topology
from libxd.contract import looser
from libxd.errors import XdError, XdErrors
from libxd.experiment import Experiment, Intervention
from libxd.rundir import RunDirectory

SCHEMA_VERSION = "xd.plan_row.v1"
#: parts of a row that its case digest covers as they are; the identity enters pinned, the scenario with its id
_HASHED = ("values", "operators", "contract")
#: what its request digest covers: the case, and why and how it is tried
_REQUESTED = (
    "experiment_id", "strategy", "baseline", "case_digest", "intervention", "repeat", "submission", "strict_fallback",
)  # fmt: skip
#: the strategy of a row that was never planned: its scores were imported, and its knobs are unknown
IMPORTED = "imported"
#: how many knobs a case of a strategy changes
_CHANGES = {
    "one_at_a_time": (0, 1), "pairwise": (0, 2), "bisect": range(len(knobs.CATALOG) + 1), IMPORTED: (0,),
}  # fmt: skip
#: what all rows of a plan share
_SHARED = (
    "schema_version", "experiment_id", "scenario_id", "scenario", "strategy", "contract", "baseline", "identity",
    "locations", "strict_fallback", "executable", "missing",
)  # fmt: skip


def rows(
    experiment: Experiment, repeats: int = 0, submission: str = "canonical", parts: Parts | None = None
) -> list[dict[str, Any]]:
    """The plan: baseline, `repeats` repeats of it submitted in that order, then one row a case.

    parts: keeps what is made canonical for `encode`.
    """
    parts = parts or Parts()
    shared = {
        "schema_version": SCHEMA_VERSION,
        "experiment_id": experiment.experiment_id,
        "scenario_id": experiment.scenario_id,
        "scenario": experiment.scenario,
        "strategy": experiment.strategy,
        "contract": {
            "source": experiment.contract.source,
            "version": experiment.contract.version,
            "digest": experiment.contract.digest,
            "dtype": looser(*(experiment.baseline[knob] for knob in knobs.DTYPE_OF_SIDE.values())),
        },
        "baseline": experiment.baseline,
        "identity": experiment.resolution.identity,
        "locations": experiment.resolution.locations,
        "strict_fallback": experiment.strict_fallback,
        "executable": not experiment.resolution.missing,
        "missing": experiment.resolution.missing,
    }
    cases = _Cases(shared, parts)

    def case(changes: Sequence[tuple[Intervention, Any]]) -> dict[str, Any]:
        changed = [{"path": of.path, "value": to, "allow_fallback": of.allow_fallback} for of, to in changes]
        return cases.row(changed, experiment.operators)

    baseline = case(())
    again = [
        cases.requesting(baseline | {"repeat": number, "submission": submission}) for number in range(1, repeats + 1)
    ]
    return [baseline, *again, *(case(changes) for changes in _variations(experiment))]


def subset(far: Mapping[str, Any], paths: Collection[str], repeat: int = 0) -> dict[str, Any]:
    """The row of a bisection that makes those of the changes of its far end, in their order, and no other.

    far: the row of strategy "bisect" that makes them all.
    """
    changed = [change for change in far["intervention"] if change["path"] in paths]
    bound_by_knob = any(change["path"] == "logp.backend" for change in far["intervention"])
    cases = _Cases({name: far[name] for name in _SHARED}, Parts())
    row = cases.row(changed, None if bound_by_knob else far["operators"])
    return cases.requesting(row | {"repeat": repeat})


class _Cases:
    """Rows that differ in what they change, and share all else."""

    def __init__(self, shared: dict[str, Any], parts: Parts) -> None:
        self._shared, self._parts = shared, parts
        self._pinned = canon.dumps(identity.pinned(shared["identity"]))
        self._scenario = canon.dumps(_scenario(shared))

    def row(self, changes: list[dict[str, Any]], operators: dict[str, Any] | None) -> dict[str, Any]:
        """The case that makes these changes. operators: an explicit mapping; None: logp.backend binds both sides."""
        values = self._shared["baseline"] | {change["path"]: change["value"] for change in changes}
        operators = operators or _both_sides(values["logp.backend"])
        digest = canon.digest_bytes(canon.join({
            "identity": self._pinned, "scenario": self._scenario, "contract": self._parts.of(self._shared["contract"]),
            "values": self._parts.of(values), "operators": self._parts.of(operators)}))  # fmt: skip
        return self.requesting(self._shared | {
            "case_id": f"c-{digest[:16]}",
            "case_digest": digest,
            "repeat": 0,
            "submission": "canonical",
            "intervention": changes,
            "values": values,
            "operators": operators,
            "derived": topology.derived(values, self._shared["identity"]["model"]),
        })

    def requesting(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with the digest of its request."""
        whole = canon.join({name: self._parts.of(row[name]) for name in _REQUESTED})
        return row | {"request_digest": canon.digest_bytes(whole)}


def _variations(experiment: Experiment) -> Iterator[tuple[tuple[Intervention, Any], ...]]:
    """What each case changes; the config has been held to the cap already."""
    if experiment.strategy == "one_at_a_time":
        for item in experiment.interventions:
            yield from (((item, value),) for value in item.values)
        return
    if experiment.strategy == "bisect":
        yield tuple((item, value) for item in experiment.interventions for value in item.values)
        return
    by_path = {item.path: item for item in experiment.interventions}
    for first, second in ((by_path[a], by_path[b]) for a, b in experiment.pairs):
        yield from (((first, a), (second, b)) for a, b in product(first.values, second.values))


@cache  # one object for all its rows, so that it is made canonical once
def _both_sides(backend: str) -> dict[str, Any]:
    return {"selected_logprob": {side: {"backend": backend, "options": {}} for side in knobs.SIDES}}


def _scenario(row: dict[str, Any]) -> dict[str, str]:
    return {"id": row["scenario_id"], **row["scenario"]}


def case_digest(row: dict[str, Any]) -> str:
    """The digest that a row's content gives."""
    hashed = {name: row[name] for name in _HASHED}
    return canon.digest(hashed | {"identity": identity.pinned(row["identity"]), "scenario": _scenario(row)})


def request_digest(row: dict[str, Any]) -> str:
    """The digest of what a row asks for: its case, what the case changes of which baseline, and how it is tried."""
    return canon.digest({name: row[name] for name in _REQUESTED})


def encode(plan: Sequence[dict[str, Any]], parts: Parts | None = None) -> Iterator[bytes]:
    """Each row's canonical bytes, checked against the schema. parts: those that `rows` was given."""
    parts = parts or Parts()
    for row in plan:
        schema.validate("plan_row", row, row["case_id"])
        yield parts.of(row)


class Parts:
    """Canonical bytes of rows and their parts. What rows share is made canonical once: planning is mostly this."""

    def __init__(self) -> None:
        self._by_object: dict[int, tuple[Any, bytes]] = {}  # holds the object, so that its id stays its own
        self._by_scalar: dict[tuple[type, Any], bytes] = {}

    def of(self, part: Any) -> bytes:
        if not isinstance(part, dict | list):
            key = (type(part), part)
            if key not in self._by_scalar:
                self._by_scalar[key] = canon.dumps(part)
            return self._by_scalar[key]
        if id(part) not in self._by_object:
            if isinstance(part, dict):
                whole = canon.join({name: self.of(item) for name, item in part.items()})
            else:
                whole = b"[" + b",".join([self.of(item) for item in part]) + b"]"
            self._by_object[id(part)] = part, whole
        return self._by_object[id(part)][1]


def requested(row: dict[str, Any], side: str, knob: str) -> Any:
    """What a side is asked to use for a knob: its value, or the backend its operator binding overrides it with."""
    if knob == "logp.backend":
        return row["operators"]["selected_logprob"][side]["backend"]
    return row["values"][knob]


def read_row(line: str | bytes, where: str) -> dict[str, Any]:
    """One plan row, whole: strict JSON, its schema, and no part that contradicts another. XdErrors with all flaws."""
    row = schema.validate("plan_row", strictjson.loads(line, where), where)
    require_sound(row, where)
    return row


def require_sound(row: dict[str, Any], where: str) -> None:
    """XdErrors with all places in which a row of the right form contradicts itself."""
    issues = list(_contradictions(row, where))
    if issues:
        raise XdErrors(issues)


def _contradictions(row: dict[str, Any], where: str) -> Iterator[XdError]:
    def differs(
        path: str, found: Any, expected: Any, message: str = "contradicts the rest of the row"
    ) -> Iterator[XdError]:
        if found != expected or type(found) is not type(expected):
            yield XdError(message, code="forged-row", where=where, path=path, found=found, expected=expected,
                          hint="plan the experiment again; rows are not edited")

    for part in ("values", "baseline"):
        for knob, value in row[part].items():
            if value is None:  # the schema lets an imported row alone be silent
                continue
            try:
                pointer = f"/{part}/{knob}"
                yield from differs(pointer, value, knobs.normalise(knob, value, where, pointer))
            except XdError as error:
                yield error
                return
    changes = {change["path"]: change["value"] for change in row["intervention"]}
    for place, change in enumerate(row["intervention"]):
        if change["value"] == row["baseline"][change["path"]]:
            yield XdError("changes nothing of the baseline", code="forged-row", where=where,
                          path=f"/intervention/{place}/value", found=change["value"])
        if change["path"] == "logp.backend":
            yield from differs("/operators", row["operators"], _both_sides(change["value"]))
    for knob, value in (row["baseline"] | changes).items():
        what = "is not the baseline's as the case changes it"
        yield from differs(f"/values/{knob}", row["values"][knob], value, what)
    number = len(row["intervention"])
    again = number and row["repeat"] and row["strategy"] != "bisect"  # only there is more than a baseline repeated
    if number != len(changes) or number not in _CHANGES[row["strategy"]] or again:
        yield from differs("/intervention", [change["path"] for change in row["intervention"]], [])
    dtype = looser(*(row["baseline"][knob] for knob in knobs.DTYPE_OF_SIDE.values()))
    yield from differs("/contract/dtype", row["contract"]["dtype"], dtype)
    if not row["repeat"]:
        yield from differs("/submission", row["submission"], "canonical")
    yield from differs("/executable", row["executable"], not row["missing"])
    yield from differs("/derived", row["derived"], topology.derived(row["values"], row["identity"]["model"]))
    for flaw in identity.contradictions(row["identity"], row["locations"]):
        yield from differs(*flaw)
    lacking = identity.lacking(row["identity"]) | ({"/values"} if None in row["values"].values() else set())
    yield from differs("/missing", sorted({reason.partition(":")[0] for reason in row["missing"]}), sorted(lacking))
    digest = case_digest(row)
    yield from differs("/case_digest", row["case_digest"], digest)
    yield from differs("/case_id", row["case_id"], f"c-{digest[:16]}")
    yield from differs("/request_digest", row["request_digest"], request_digest(row))


def publish_plan(runs: str | os.PathLike[str], experiment: Experiment, encoded: Sequence[bytes]) -> Path:
    """Put a plan into the run directory and point `plan` there at it. Returns the plan's directory.

    Its name is the digest of both files, so a plan that exists is never written over and a changed one is beside it.
    experiment.json and plan.jsonl lead through `plan`, the one link that moves: never are they of two plans.
    """
    run = RunDirectory(runs, experiment.experiment_id)
    config = schema.validate("experiment_config", experiment.as_json(), experiment.experiment_id)
    files = {"experiment.json": canon.dumps(config) + b"\n", "plan.jsonl": b"".join(line + b"\n" for line in encoded)}
    digest = canon.digest({name: canon.digest_bytes(data) for name, data in files.items()})
    directory = run.path / "plans" / digest
    publish.directory(directory)
    for name, data in files.items():
        publish.publish(directory / name, data)
    publish.point(run.path / "plan", directory)
    for name in files:
        publish.point(run.path / name, run.path / "plan" / name)
    return directory
