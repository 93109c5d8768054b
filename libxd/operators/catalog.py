"""The operators there are: immutable, by operation and backend, with a digest that shows when it changed."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from libxd import canon, plugins
from libxd.errors import Status, XdError
from libxd.operators.descriptor import OperatorDescriptor
from libxd.operators.installed import GROUP, SMOKE_GROUP


class SemanticOperatorCatalog:
    """Descriptors by (operation, backend). `register` gives a new catalog; this one stays what its digest says."""

    def __init__(self, descriptors: Iterable[OperatorDescriptor] = ()) -> None:
        found: dict[tuple[str, str], OperatorDescriptor] = {}
        for descriptor in descriptors:
            key = (descriptor.operation, descriptor.backend)
            if key in found:
                raise XdError("an operator is registered twice", code="duplicate-operator",
                              where=f"operator {descriptor.backend}")
            found[key] = descriptor
        self._descriptors: Mapping[tuple[str, str], OperatorDescriptor] = MappingProxyType(dict(sorted(found.items())))

    def __iter__(self) -> Iterator[OperatorDescriptor]:
        return iter(self._descriptors.values())

    def __len__(self) -> int:
        return len(self._descriptors)

    @functools.cached_property
    def digest(self) -> str:
        """BLAKE3 over all descriptors, builds included."""
        return canon.digest([descriptor.as_json() for descriptor in self])

    def backends(self, operation: str) -> list[str]:
        """The backends of an operation."""
        return [descriptor.backend for descriptor in self if descriptor.operation == operation]

    def get(self, operation: str, backend: str) -> OperatorDescriptor:
        """The descriptor. XdError 69 `unknown-operator` when the catalog has none."""
        descriptor = self._descriptors.get((operation, backend))
        if descriptor is None:
            raise XdError(f"no {operation} operator {backend}", status=Status.REFUSED, code="unknown-operator",
                          found=backend, expected=" or ".join(self.backends(operation)))
        return descriptor

    def register(self, descriptor: OperatorDescriptor) -> SemanticOperatorCatalog:
        """A catalog that has this operator, too."""
        return SemanticOperatorCatalog([*self, descriptor])


@functools.cache
def load(smoke: bool) -> SemanticOperatorCatalog:
    """The catalog of this installation: production operators, and with `smoke` the test operators as well."""
    groups = (GROUP, SMOKE_GROUP) if smoke else (GROUP,)
    catalog = SemanticOperatorCatalog()
    for group in groups:
        for entry in plugins.entries(group).values():
            catalog = catalog.register(_descriptor(entry, group))
    return catalog


def check(
    descriptor: OperatorDescriptor, side: str, device: str, dtype: str, topology: Mapping[str, Any]
) -> list[str]:
    """Why the operator cannot serve a side as it is set up; empty: it can.

    topology: the side's settings by the last part of their knobs' names, such as tensor_parallel_size. What the
    descriptor restricts and the topology does not say is a reason, too.
    """
    if side not in descriptor.targets:
        return [f"{descriptor.backend} does not serve the {side} side"]
    reasons = []
    for what, found, supported in (("device", device, descriptor.devices), ("dtype", dtype, descriptor.dtypes)):
        if found not in supported:
            reasons.append(f"{descriptor.backend} does not support {what} {found} (supports {_listed(supported)})")
    for setting, values in descriptor.topology.get(side, {}).items():
        if topology.get(setting) not in values:
            reasons.append(
                f"{descriptor.backend} does not support {setting} {topology.get(setting)} (supports {_listed(values)})"
            )
    return reasons


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, values)))


def _descriptor(entry: importlib.metadata.EntryPoint, group: str) -> OperatorDescriptor:
    """An entry point's descriptor. XdError 70 when it cannot be loaded or is not what its entry says."""
    descriptor = plugins.load("operator", entry)
    if not isinstance(descriptor, OperatorDescriptor) or descriptor.backend != entry.name:
        found = descriptor.backend if isinstance(descriptor, OperatorDescriptor) else type(descriptor).__name__
        raise XdError("an operator's entry point must name its backend and lead to its descriptor", status=Status.BUG,
                      code="bad-operator", where=plugins.origin(entry), found=found, expected=entry.name)
    if descriptor.is_smoke_only != (group == SMOKE_GROUP):
        raise XdError(f"a smoke-only operator belongs into {SMOKE_GROUP}, every other one into {GROUP}",
                      status=Status.BUG, code="bad-operator", where=plugins.origin(entry), found=group)
    return descriptor
