"""Runtimes by name, from the entry points of group `xd.runtimes`."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import cast

from libxd.errors import Status, XdError
from libxd.runtimes.protocol import Runtime

GROUP = "xd.runtimes"


def names() -> list[str]:
    """The runtimes this interpreter has."""
    return sorted(_entries())


@functools.cache
def load(name: str) -> Runtime:
    """The runtime of that name. XdError 2 when there is none, 70 when its module cannot be loaded."""
    entry = _entries().get(name)
    if entry is None:
        raise XdError("no such runtime", status=Status.USAGE, code="unknown-runtime", found=name,
                      expected=" or ".join(names()))
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise XdError(f"runtime {name} cannot be loaded: {error}", status=Status.BUG, code="bad-runtime",
                      where=entry.value) from error
    runtime = cast(Runtime, found() if isinstance(found, type) else found)
    if runtime.name != name:
        raise XdError("a runtime is registered under another name than its own", status=Status.BUG, code="bad-runtime",
                      where=entry.value, found=name, expected=runtime.name)
    return runtime


@functools.cache
def _entries() -> dict[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
