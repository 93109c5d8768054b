"""What the ranks of an engine show, as one engine shows it: alike, or the one that is not. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def agreed(values: Sequence[T]) -> T | None:
    """What all say; None when they do not say the same."""
    return values[0] if all(value == values[0] for value in values) else None


def odd_one(values: Sequence[T]) -> T:
    """What all have alike; else what one has that is another than the first's."""
    return next((each for each in values if each != values[0]), values[0])


def state(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`Engine.state` of all: in training where any rank is; with an optimizer where any rank has one."""
    training = any(each["mode"] == "train" for each in states)
    return {"mode": "train" if training else "eval", "optimizer": any(each["optimizer"] for each in states)}
