"""Which operators are installed: entry points, of which nothing is imported."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

GROUP = "xd.operators"
SMOKE_GROUP = "xd.smoke_operators"


@cache
def entries(group: str) -> dict[str, EntryPoint]:
    """Backend -> entry point of one group."""
    return {entry.name: entry for entry in entry_points(group=group)}


def backends() -> list[str]:
    """The backends there are, test operators among them."""
    return sorted(entries(GROUP) | entries(SMOKE_GROUP))


def smoke_backends() -> list[str]:
    """The backends that only registration and authorisation together bring in."""
    return sorted(entries(SMOKE_GROUP))
