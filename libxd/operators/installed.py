"""Which operators are installed: entry points, of which nothing is imported."""

from __future__ import annotations

from libxd.plugins import entries

GROUP = "xd.operators"
SMOKE_GROUP = "xd.smoke_operators"


def backends() -> list[str]:
    """The backends there are, test operators among them."""
    return sorted(entries(GROUP) | entries(SMOKE_GROUP))


def smoke_backends() -> list[str]:
    """The backends that only registration and authorisation together bring in."""
    return sorted(entries(SMOKE_GROUP))
