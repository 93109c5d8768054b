"""An experiment, normalised: one baseline, its declared interventions, what is scored and by which contract."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from libxd import identity
from libxd.contract import Contract
from libxd.errors import XdError
from libxd.resolution import Resolution

SCHEMA_VERSION = "xd.experiment_config.v1"


@dataclass(frozen=True)
class Intervention:
    """One knob and the canonical values that it takes beside the baseline's."""

    path: str
    values: tuple[Any, ...]
    allow_fallback: bool


@dataclass(frozen=True)
class Experiment:
    """A normalised experiment: canonical knob values, bound operators, resolved identity.

    `operators` is the explicit mapping with options filled in, or None when logp.backend decides.
    """

    experiment_id: str
    scenario_id: str
    scenario: dict[str, str]
    contract: Contract
    strategy: str
    strict_fallback: bool
    resolution: Resolution
    baseline: dict[str, Any]
    interventions: tuple[Intervention, ...]
    pairs: tuple[tuple[str, str], ...]
    operators: dict[str, Any] | None

    def as_json(self) -> dict[str, Any]:
        """The experiment as a config again. Files are named by digest alone, so the same cases come of it anywhere."""
        pinned = self.resolution.identity
        checkpoint, tokenizer = pinned["checkpoint"], pinned["tokenizer"]
        names = ("synthetic", "digest") if checkpoint["synthetic"] else ("digest",)
        identity = pinned | {
            "checkpoint": {name: checkpoint[name] for name in names},
            "tokenizer": {name: tokenizer[name] for name in ("id", "policy", "digest")},
            "sequences": {"digest": pinned["sequences"]["digest"]},
        }
        if identity["model"] is None:
            del identity["model"]
        baseline: dict[str, Any] = {}
        for path, value in self.baseline.items():
            group, name = path.split(".")
            baseline.setdefault(group, {})[name] = value
        optional: dict[str, Any] = {}
        if self.pairs:
            optional["pairs"] = [list(pair) for pair in self.pairs]
        if self.operators:
            optional["operators"] = self.operators
        return {
            "schema_version": SCHEMA_VERSION,
            "experiment_id": self.experiment_id,
            "scenario_id": self.scenario_id,
            "contract_source": self.contract.source,
            "contract_version": self.contract.version,
            "strategy": self.strategy,
            "strict_fallback": self.strict_fallback,
            "identity": identity,
            "baseline": baseline,
            "interventions": [
                {"path": item.path, "values": list(item.values), "allow_fallback": item.allow_fallback}
                for item in self.interventions
            ],
            "scenario": self.scenario,
            **optional,
        }

    def toward(self, other: Experiment, where: str) -> Experiment:
        """A bisection from this experiment's baseline to the other's: what differs between them, one knob at a time.

        Identity, contract, scenario and operators must be equal. XdError 65 where they are not, or nothing differs;
        where: the other's file.
        """
        for what, ours, theirs in (
            ("identity", *(identity.pinned(each.resolution.identity) for each in (self, other))),
            ("contract", self.contract, other.contract),
            ("scenario", self.scenario, other.scenario),
            ("operators", self.operators, other.operators),
        ):
            if ours != theirs:
                raise XdError(f"is of another {what}: no knobs alone lead from one to the other", code=f"other-{what}",
                              where=where, path=f"/{what}", found=theirs, expected=ours)  # fmt: skip
        ours = self.baseline
        differing = {path: value for path, value in other.baseline.items() if value != ours[path]}
        changes = tuple(Intervention(path, (value,), False) for path, value in differing.items())
        if not changes:
            raise XdError("has the same baseline", code="one-end", where=where, path="/baseline",
                          hint="give an experiment whose baseline is the other setting")  # fmt: skip
        if self.operators and any(change.path == "logp.backend" for change in changes):
            raise XdError("an explicit operator mapping leaves logp.backend without effect", code="operator-conflict",
                          where=where, path="/baseline/logp/backend")  # fmt: skip
        return replace(self, strategy="bisect", interventions=changes, pairs=())
