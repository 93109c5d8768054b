"""Runtimes by name, from the entry points of group `xd.runtimes`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, cast

from libxd import plugins
from libxd.errors import Status, XdError

if TYPE_CHECKING:
    from libxd.runtimes.protocol import Runtime

GROUP = "xd.runtimes"


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
    runtime = cast("Runtime", found() if isinstance(found, type) else found)
    if runtime.name != name:
        raise XdError("a runtime is registered under another name than its own", status=Status.BUG, code="bad-runtime",
                      where=entry.value, found=name, expected=runtime.name)
    return runtime
