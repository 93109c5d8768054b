"""Flat arrays that lie in several files, read as one array without being copied together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Joined:
    """Parts laid end to end, [N] and read-only: what is asked of it is copied where it lies in more than one part.

    Takes an integer, a slice of step 1, or an array of indices. `np.asarray` of it lays out all of it.
    """

    ndim = 1

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = parts
        self._ends = np.cumsum([part.size for part in parts])
        self.dtype = parts[0].dtype
        self.size = int(self._ends[-1])
        self.shape = (self.size,)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, where: Any) -> Any:
        if isinstance(where, slice):
            start, stop, step = where.indices(self.size)
            assert step == 1, "blocks are read, in order"
            return self._block(start, max(start, stop))
        if isinstance(where, int | np.integer):
            place = range(self.size)[where]
            return self._block(place, place + 1)[0]
        return self._gather(np.asarray(where))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("what lies in several files is laid out by copying it")
        return np.concatenate(self._parts).astype(dtype or self.dtype, copy=False)

    def _block(self, start: int, stop: int) -> np.ndarray:
        first = int(np.searchsorted(self._ends, start, side="right"))
        pieces = []
        for part, end in zip(self._parts[first:], self._ends[first:].tolist(), strict=True):
            begin = end - part.size
            if begin >= stop:
                break
            pieces.append(part[max(start - begin, 0) : stop - begin])
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.zeros(0, self.dtype)

    def _gather(self, where: np.ndarray) -> np.ndarray:
        """The values at flat indices [N] in any order."""
        out = np.empty(where.shape, self.dtype)
        of = np.searchsorted(self._ends, where, side="right")
        for number in np.unique(of).tolist():
            inside = of == number
            part = self._parts[number]
            out[inside] = part[where[inside] - (int(self._ends[number]) - part.size)]
        return out


def join(parts: Sequence[np.ndarray]) -> np.ndarray | Joined:
    """One array of them all: the part itself where it is one."""
    return parts[0] if len(parts) == 1 else Joined(parts)
