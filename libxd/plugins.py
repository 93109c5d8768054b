"""What is installed beside xd and found by entry point: runtimes and operators. Listing them imports nothing."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any

from libxd.errors import Status, XdError


@cache  # finding them reads the metadata of every package there is
def _installed() -> EntryPoints:
    return entry_points()


@cache
def entries(group: str) -> dict[str, EntryPoint]:
    """Name -> entry point of one group. XdError 70 when two packages claim one name."""
    found: dict[str, EntryPoint] = {}
    for entry in _installed().select(group=group):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise XdError(f"two packages install {entry.name} into {group}", status=Status.BUG, code="duplicate-plugin",
                          found=" and ".join(sorted(map(origin, (other, entry)))), hint="uninstall one of them")
    return found


def load(kind: str, entry: EntryPoint) -> Any:
    """What an entry point leads to. kind: "runtime" or "operator". XdError 70 when that cannot be imported."""
    try:
        return entry.load()
    except Exception as error:  # it runs the whole of a foreign module
        raise foreign(kind, entry.name, "cannot be loaded", error, origin(entry)) from error


def foreign(kind: str, name: str, what: str, error: Exception, where: str) -> XdError:
    """XdError 70 for an exception that came out of another package's code; it says whose. kind: as for `load`."""
    said = error.line() if isinstance(error, XdError) else " ".join(f"{type(error).__name__}: {error}".split())
    return XdError(f"{kind} {name} {what}: {said}", status=Status.BUG, code=f"bad-{kind}", where=where,
                   hint="mend or uninstall it; XD_DEBUG=1 shows the traceback")  # fmt: skip


def origin(entry: EntryPoint) -> str:
    """Where an entry point leads, and whose it is."""
    package = entry.dist
    return f"{entry.value} of {package.name} {package.version}" if package else entry.value
