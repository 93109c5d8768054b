"""Runtimes by name, from the entry points of group `xd.runtimes`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, cast

from libxd import plugins
from libxd.errors import Status, XdError

if TYPE_CHECKING:
    from libxd.runtimes.protocol import Runtime

GROUP = "xd.runtimes"
#: what every runtime must have
_PARTS = (
    "name", "version", "sides", "registers_smoke_operators", "materialize", "estimate_bytes", "open",
)  # fmt: skip


def names() -> list[str]:
    """The runtimes this interpreter has."""
    return sorted(plugins.entries(GROUP))


@functools.cache
def load(name: str) -> Runtime:
    """The runtime of that name. XdError 2 when there is none, 70 when its module cannot be loaded."""
    entry = plugins.entries(GROUP).get(name)
    if entry is None:
        raise XdError("no such runtime", status=Status.USAGE, code="unknown-runtime", found=name,
                      expected=" or ".join(names()))
    found = plugins.load("runtime", entry)
    where = plugins.origin(entry)
    try:
        runtime = cast("Runtime", found() if isinstance(found, type) else found)
    except Exception as error:
        raise plugins.foreign("runtime", name, "cannot be made", error, where) from error
    missing = [part for part in _PARTS if not hasattr(runtime, part)]
    if missing:
        raise XdError(f"runtime {name} lacks a part of the protocol: {', '.join(missing)}", status=Status.BUG,
                      code="bad-runtime", where=where, hint="libxd/runtimes/protocol.py says what a Runtime has")
    if runtime.name != name:
        raise XdError("a runtime is registered under another name than its own", status=Status.BUG, code="bad-runtime",
                      where=where, found=name, expected=runtime.name)
    return runtime
