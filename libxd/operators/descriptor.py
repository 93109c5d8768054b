"""What an operator says of itself, before any of it is imported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from libxd import canon
from libxd.environment import sources_digest
from libxd.errors import Status, XdError
from libxd.knobs import DTYPES
from libxd.rundir import SIDES

OPERATIONS = ("selected_logprob",)
DEVICES = ("cpu", "cuda")
INPUTS = ("logits", "hidden")
LIFECYCLES = ("request", "construction", "process")
#: what a descriptor may promise about alignment
PROPERTIES = (
    "float32_logits", "float32_accumulation", "batch_invariant", "tensor_parallel_invariant",
    "context_parallel_invariant",
)  # fmt: skip
#: the settings by which a side is spread over ranks, by side: the last part of the knobs' names
TOPOLOGY = {"rollout": ("tensor_parallel_size", "context_parallel_size"), "training": ("sharding",)}
#: test operators bear their nature in their name
SMOKE_PREFIX = "smoke_only."

_BACKEND = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*\Z")
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")


@dataclass(frozen=True)
class OperatorDescriptor:
    """One implementation of one semantic operation. Checked on construction: XdError `bad-descriptor`.

    targets: the sides it may serve. devices, dtypes: where, and in which compute dtype of the engine.
    inputs: "logits" [N, V], or "hidden" [N, H] with the head weight [V, H].
    factory: "module:callable", called with the side and the options; `options` are the option names it takes.
    sources: modules beside the factory's that its numbers depend on.
    lifecycle: what must be done anew to change to it.
    topology: target -> setting -> the values it can serve; a setting that is not named is not restricted.
    properties: what it promises (PROPERTIES). fallback: the backend that a declared fallback goes to.
    is_smoke_only: a test operator, on the CPU alone.
    """

    operation: str
    backend: str
    targets: frozenset[str]
    devices: frozenset[str]
    dtypes: frozenset[str]
    inputs: str
    factory: str
    version: str
    lifecycle: str = "construction"
    topology: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict, hash=False)
    properties: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    fallback: str | None = None
    is_smoke_only: bool = False

    def __post_init__(self) -> None:
        self._require(bool(_BACKEND.match(self.backend)), "backend", self.backend, "dotted lower-case names")
        self._among("operation", [self.operation], OPERATIONS)
        self._among("targets", self.targets, SIDES)
        self._among("devices", self.devices, DEVICES)
        self._among("dtypes", self.dtypes, DTYPES)
        self._among("inputs", [self.inputs], INPUTS)
        self._among("lifecycle", [self.lifecycle], LIFECYCLES)
        self._among("properties", self.properties, PROPERTIES, may_be_empty=True)
        self._among("topology", self.topology, tuple(self.targets), may_be_empty=True)
        for side, settings in self.topology.items():
            self._among(f"topology/{side}", settings, TOPOLOGY[side])
            for setting, values in settings.items():
                self._require(bool(values), f"topology/{side}/{setting}", list(values), "the values it can serve")
        self._require(bool(_FACTORY.match(self.factory)), "factory", self.factory, "module:callable")
        self._require(bool(self.version), "version", self.version, "a version")
        self._require(self.fallback != self.backend, "fallback", self.fallback, "another backend")
        named_smoke = self.backend.startswith(SMOKE_PREFIX)
        self._require(self.is_smoke_only == named_smoke, "is_smoke_only", self.is_smoke_only, named_smoke)
        if self.is_smoke_only:
            self._require(self.devices == {"cpu"}, "devices", sorted(self.devices), ["cpu"])
        frozen = {side: MappingProxyType(dict(settings)) for side, settings in self.topology.items()}
        object.__setattr__(self, "topology", MappingProxyType(frozen))

    def _among(self, name: str, found: Iterable[str], known: tuple[str, ...], may_be_empty: bool = False) -> None:
        found = sorted(found)
        self._require((may_be_empty or bool(found)) and set(found) <= set(known), name, found, list(known))

    def _require(self, holds: bool, name: str, found: Any, expected: Any) -> None:
        if not holds:
            raise XdError("an operator descriptor is wrong", code="bad-descriptor", where=f"operator {self.backend}",
                          path=f"/{name}", found=found, expected=expected)

    @cached_property
    def build(self) -> str:
        """Digest over the sources of the factory's module and of `sources`: another text is another build."""
        modules = sorted({self.factory.partition(":")[0], *self.sources})
        digests = {module: sources_digest(module) for module in modules}
        lost = [module for module, digest in digests.items() if digest is None]
        if lost:
            raise XdError(f"a module of the operator cannot be found: {', '.join(lost)}", status=Status.BUG,
                          code="bad-descriptor", where=f"operator {self.backend}",
                          path="/factory" if self.factory.partition(":")[0] in lost else "/sources")  # fmt: skip
        return canon.digest(digests)

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON, the build included; what a catalog's digest covers."""
        return {
            "operation": self.operation,
            "backend": self.backend,
            "targets": sorted(self.targets),
            "devices": sorted(self.devices),
            "dtypes": sorted(self.dtypes),
            "topology": {side: {k: list(v) for k, v in settings.items()} for side, settings in self.topology.items()},
            "properties": list(self.properties),
            "lifecycle": self.lifecycle,
            "inputs": self.inputs,
            "factory": self.factory,
            "options": list(self.options),
            "version": self.version,
            "build": self.build,
            "fallback": self.fallback,
            "is_smoke_only": self.is_smoke_only,
        }

    def record(self, options: dict[str, Any]) -> dict[str, Any]:
        """The `operator` record of a side of materialized.json."""
        return {
            "operation": self.operation,
            "backend": self.backend,
            "options": options,
            "version": self.version,
            "build": self.build,
            "inputs": self.inputs,
            "properties": list(self.properties),
        }
