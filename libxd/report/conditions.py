"""What the cases were scored with, beside the knobs, and where that is not the same for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from libxd.effect import conditions
from libxd.plain import leaves
from libxd.rundir import SIDES, Attempt


def compared(attempts: Sequence[tuple[str, Attempt]]) -> dict[str, Any]:
    """Of named attempts: each side's conditions of the first one, flat, and those that differ among all of them.

    A condition is `effect.conditions` and the operator's build, by its path. values: each value that is there (null:
    not set) with the names of the attempts that have it, in order.
    """
    seen: dict[str, dict[str, dict[str, list[str]]]] = {side: {} for side in SIDES}  # side -> path -> value -> names
    first: dict[str, dict[str, str]] = {side: {} for side in SIDES}
    for name, attempt in attempts:
        materialized = attempt.materialized()
        for side in SIDES:
            flat = dict(leaves(conditions(materialized, side)))
            first[side] = first[side] or flat
            for path, value in flat.items():
                seen[side].setdefault(path, {}).setdefault(value, []).append(name)
    names = [name for name, _ in attempts]
    return {
        **first,
        "differing": [
            {"side": side, "path": path, "values": _values(values, names)}
            for side in SIDES
            for path, values in sorted(seen[side].items())
            if len(values) > 1 or sum(map(len, values.values())) < len(names)
        ],
    }


def _values(values: dict[str, list[str]], names: list[str]) -> list[dict[str, Any]]:
    having = {name for members in values.values() for name in members}
    left = [name for name in names if name not in having]
    return [{"value": value, "cases": members} for value, members in values.items()] + (
        [{"value": None, "cases": left}] if left else []
    )
