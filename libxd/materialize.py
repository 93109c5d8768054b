"""What the adapters will build for a row, or why it is refused. Pure: no engine, no torch, no weights.

The same function serves xd-materialize and xd-resume, so that a row is answered by what it would get now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from libxd import canon, environment, knobs, planner, plugins
from libxd.errors import Status, XdError
from libxd.operators import catalog, installed
from libxd.operators.catalog import SemanticOperatorCatalog
from libxd.operators.descriptor import LIFECYCLES, TOPOLOGY, OperatorDescriptor
from libxd.policy import Policy
from libxd.rundir import SIDES
from libxd.runtimes.protocol import KnobRecord, Runtime, SidePlan

SCHEMA_VERSION = "xd.materialized.v1"
OPERATION = "selected_logprob"
OPERATOR_KNOB = "logp.backend"


def materialized(
    row: dict[str, Any], policy: Policy, environments: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """The materialized.json value of a plan row under a policy; environments: side -> `environment.describe()`.

    XdError 69 for the row of an imported attempt, whose knobs are unknown.
    """
    if row["strategy"] == planner.IMPORTED:
        raise XdError("nothing can be built for scores that were imported: their knobs are unknown",
                      status=Status.REFUSED, code="imported", where=row["case_id"],
                      hint="plan an experiment over the sequences that the row names")  # fmt: skip
    operators = policy.catalog
    strict = row["strict_fallback"] or policy.strict
    refusals = [_refusal(None, None, "unsupported", reason) for reason in row["missing"]]
    if not row["executable"] and not refusals:
        refusals.append(_refusal(None, None, "unsupported", "the row is not executable"))
    sides = {}
    for side in SIDES:
        builder = _Side(row, side, policy, environments[side], operators)
        sides[side] = builder.record()
        refusals += builder.refusals(strict)
    value = {
        "schema_version": SCHEMA_VERSION,
        "case_id": row["case_id"],
        "repeat": row["repeat"],
        "submission": row["submission"],
        "strict": strict,
        "status": "refused" if refusals else "ready",
        "refusals": refusals,
        "catalog": operators.digest,
        "smoke_operators": policy.smoke_operators,
        "sides": sides,
    }
    return {**value, "execution_key": execution_key(value)}


def execution_key(value: Mapping[str, Any]) -> str:
    """The execution key that a materialisation has by its own content. Evidence is prose and does not enter."""
    sides = {
        side: {**record, "knobs": [{k: v for k, v in knob.items() if k != "evidence"} for knob in record["knobs"]]}
        for side, record in value["sides"].items()
    }
    kept = ("case_id", "repeat", "submission", "strict", "catalog", "smoke_operators")
    return canon.digest({**{key: value[key] for key in kept}, "sides": sides})


def group(value: Mapping[str, Any]) -> str:
    """Equal for materialisations that can share both engines: fingerprints and operator bindings of both sides."""
    return canon.digest(
        {side: {"fingerprints": s["fingerprints"], "operator": s["operator"]} for side, s in value["sides"].items()}
    )


def declared_fallbacks(row: Mapping[str, Any]) -> frozenset[str]:
    """The knobs whose fallback the row's intervention declares; only these may fall back, strict or not."""
    return frozenset(change["path"] for change in row["intervention"] if change["allow_fallback"])


def _refusal(side: str | None, knob: str | None, status: str, reason: str) -> dict[str, Any]:
    return {"side": side, "knob": knob, "status": status, "reason": reason}


class _Side:
    """One side of a row: what its runtime plans, what its operator allows."""

    def __init__(
        self,
        row: dict[str, Any],
        side: str,
        policy: Policy,
        description: dict[str, Any],
        catalog: SemanticOperatorCatalog,
    ) -> None:
        self.row = row
        self.side = side
        self.runtime: Runtime = policy.runtimes[side]
        self.smoke_authorised = policy.allow_smoke_operators
        self.catalog = catalog
        self.environment = environment.numeric(description, self.runtime.name)
        self.scorer = environment.scorer(description, self.runtime.name)
        self.declared = declared_fallbacks(row)
        self.binding = row["operators"][OPERATION][side]
        self.plan = self._plan()
        planned = {record.knob: record for record in self.plan.knobs}
        self.planned = frozenset(planned)
        self.knobs = {knob.path: planned.pop(knob.path, None) or self._unplanned(knob) for knob in knobs.of_side(side)}
        self.foreign = sorted(planned)
        self.descriptor, self.knobs[OPERATOR_KNOB] = self._bind(self.knobs[OPERATOR_KNOB])

    def requested(self, knob: str) -> Any:
        """What the row asks of this side."""
        return planner.requested(self.row, self.side, knob)

    def _plan(self) -> SidePlan:
        try:
            return self.runtime.materialize(self.side, self.row, self.environment, self.declared)
        except XdError as error:
            if error.status != Status.REFUSED:
                raise
            return SidePlan([], {}, {}, {}, {}, [issue.line() for issue in error.issues])
        except Exception as error:
            name, module = self.runtime.name, type(self.runtime).__module__
            raise plugins.foreign("runtime", name, f"cannot plan the {self.side} side", error, module) from error

    def _unplanned(self, knob: knobs.Knob) -> KnobRecord:
        """An adapter must answer for every knob of its side, unless it refused the side as a whole."""
        status = "unsupported" if self.plan.refusals else "error"
        evidence = f"runtime {self.runtime.name} planned nothing for it"
        return KnobRecord(knob.path, self.requested(knob.path), None, status, knob.lifecycle, evidence)

    # -- the operator

    def _bind(self, planned: KnobRecord) -> tuple[OperatorDescriptor | None, KnobRecord]:
        """The operator that will be used, and the record of logp.backend: the adapter's, unless it left that to us."""
        if planned.status == "unobservable":  # the engine's own: which it is, nobody knows
            return None, planned
        if planned.status != "applied":
            return self._known(self.binding["backend"]), planned
        asked = self.binding["backend"]
        reasons = self._objections(asked)
        found = self._known(asked)
        if not reasons and found:
            return found, replace(planned, evidence=f"{asked} version {found.version} takes {found.inputs}")
        reason = "; ".join(reasons)
        substitute = self._known(found.fallback) if found and found.fallback else None
        if substitute and OPERATOR_KNOB in self.declared and not self._objections(substitute.backend):
            evidence = f"{reason}; its declared fallback is {substitute.backend}"
            return substitute, replace(planned, materialized=substitute.backend, status="fallback", evidence=evidence)
        return found, replace(planned, materialized=None, status="unsupported", evidence=reason)

    def _known(self, backend: str) -> OperatorDescriptor | None:
        try:
            return self.catalog.get(OPERATION, backend)
        except XdError:
            return None

    def _objections(self, backend: str) -> list[str]:
        """Why this side cannot use an operator; empty: it can."""
        if backend in installed.smoke_backends():
            missing = []
            if not self.runtime.registers_smoke_operators:
                missing.append(f"runtime {self.runtime.name} registers no smoke operators, and {backend} is one")
            if not self.smoke_authorised:
                missing.append(f"{backend} is a smoke operator and is not authorised (--allow-smoke-operators)")
            if missing:
                return missing
        descriptor = self._known(backend)
        if descriptor is None:
            return [f"no {OPERATION} operator {backend} (there are: {', '.join(self.catalog.backends(OPERATION))})"]
        device = self.plan.engine.get("device", self.row["scenario"]["device"])
        dtype = self._setting(knobs.DTYPE_OF_SIDE[self.side])
        spread = {name: self._setting(f"{self.side}.{name}") for name in TOPOLOGY[self.side]}
        reasons = catalog.check(descriptor, self.side, device, dtype, spread)
        if descriptor.inputs not in getattr(self.runtime, "operator_inputs", ("logits", "hidden")):
            reasons.append(f"runtime {self.runtime.name} cannot hand out the {descriptor.inputs} {backend} takes")
        unknown = sorted(set(self.binding["options"]) - set(descriptor.options))
        if unknown:
            reasons.append(f"{backend} does not take the option {', '.join(unknown)}")
        return reasons

    def _setting(self, knob: str) -> Any:
        """What a knob will be; where the adapter refused it, what was asked, so that no second reason is made up."""
        record = self.knobs[knob]
        return record.requested if record.materialized is None else record.materialized

    def _operator(self) -> dict[str, Any]:
        options = self.binding["options"]
        if self.descriptor:
            return self.descriptor.record(options)
        backend = self.binding["backend"]
        unknown = {"version": None, "build": None, "inputs": None, "properties": []}
        return {"operation": OPERATION, "backend": backend, "options": options, **unknown}

    # -- the record

    def record(self) -> dict[str, Any]:
        """This side of materialized.json."""
        operator = self._operator()
        return {
            "runtime": self.runtime.name,
            "knobs": [record.as_json() for record in self.knobs.values()],
            "engine": self.plan.engine,
            "operator": operator,
            "fingerprints": self._fingerprints(operator),
            "environment": self.environment,
            "scorer": self.scorer,
        }

    def _fingerprints(self, operator: dict[str, Any]) -> dict[str, str]:
        """What must be equal for an engine to be kept. Each covers what a change of its kind would have to rebuild.

        Nothing of a request (batch size, order of submission) enters; the operator does where its lifecycle says.
        """
        checkpoint = self.row["identity"]["checkpoint"]
        parts: dict[str, dict[str, Any]] = {
            "construction": {
                "arguments": self.plan.construction,
                "checkpoint": {"digest": checkpoint["digest"], "synthetic": checkpoint["synthetic"]},
            },
            "context": {"arguments": self.plan.context},
            "process": {
                "arguments": self.plan.process,
                "side": self.side,
                "runtime": self.runtime.name,
                "scorer": self.scorer,
                "environment": self.environment,
                "catalog": self.catalog.digest,
                # each repeat in a process of its own: what they differ in is noise from run to run
                "repeat": self.row["repeat"],
            },
        }
        lifecycle = self.descriptor.lifecycle if self.descriptor else "construction"
        if lifecycle in parts:
            parts[lifecycle]["operator"] = operator
        return {name: canon.digest(part) for name, part in parts.items()}

    # -- refusals

    def refusals(self, strict: bool) -> Iterator[dict[str, Any]]:
        """Why this side may not be scored."""
        for reason in self.plan.refusals:
            yield _refusal(self.side, None, "unsupported", reason)
        for path in self.foreign:
            reason = f"runtime {self.runtime.name} planned a knob that is not of this side"
            yield _refusal(self.side, path, "error", reason)
        for record in self.knobs.values():
            if self.plan.refusals and record.knob not in self.planned:
                continue  # refused with the side as a whole
            flaw = self._flaw(record, strict)
            if flaw:
                yield _refusal(self.side, record.knob, *flaw)

    def _flaw(self, record: KnobRecord, strict: bool) -> tuple[str, str] | None:
        """A record's refusal: its status and the reason."""
        if record.requested != self.requested(record.knob):
            return "error", f"runtime {self.runtime.name} answered another request: {record.requested!r}"
        if LIFECYCLES.index(record.lifecycle) < LIFECYCLES.index(knobs.CATALOG[record.knob].lifecycle):
            return "error", f"runtime {self.runtime.name} would change it within a {record.lifecycle}"
        if record.status == "applied" and record.materialized != record.requested:
            return "error", f"runtime {self.runtime.name} calls {record.materialized!r} applied"
        if record.status in ("unsupported", "error"):
            return record.status, record.evidence
        if record.status == "fallback" and record.knob not in self.declared:
            return "fallback", f"{record.evidence}; the intervention declares no fallback (allow_fallback)"
        if record.status == "unobservable" and strict:
            return "unobservable", f"{record.evidence}; strict mode refuses what cannot be observed"
        return None
