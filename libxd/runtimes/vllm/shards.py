"""A weight put together from what the ranks hold of it. Pure, on bits; no torch, no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: the name of a head's weight, which a checkpoint whose head is tied need not have
HEAD = "lm_head.weight"


class Part(NamedTuple):
    """A weight as each rank holds its part of it.

    axis: along which the ranks' parts make the whole; None: each rank holds all of it. copies: so many ranks, side by
    side, hold the same part, as where there are more ranks than key-value heads.
    """

    name: str
    axis: int | None = None
    copies: int = 1


def whole(part: Part, held: Sequence[np.ndarray]) -> np.ndarray:
    """The weight, from what each rank holds: integers of its elements' bits, in rank order.

    Copies that should be alike and are not all come into it: no weight of that shape, so that it shows.
    """
    copies = len(held) if part.axis is None else part.copies
    pieces = [_alike(held[first : first + copies]) for first in range(0, len(held), copies)]
    if max(map(len, pieces)) > 1:
        return np.concatenate([copy.reshape(-1) for piece in pieces for copy in piece])
    return pieces[0][0] if len(pieces) == 1 else np.concatenate([piece[0] for piece in pieces], axis=part.axis)


def _alike(copies: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """One of them when they are all the same."""
    return copies[:1] if all(np.array_equal(copy, copies[0]) for copy in copies) else copies
