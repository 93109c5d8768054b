"""One pass over a pair's differences: how large they are, where in a sequence they lie, which sequences are the worst.

Constant memory but for a few numbers a sequence. |d| is |training - rollout| of active tokens, in nats.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from libxd.difference import Difference

#: |d| is counted in bins of a quarter of a decade between these powers of ten; what lies beyond is in the outermost
DECADES = (-10, 3)
PER_DECADE = 4
_EDGES = 10.0 ** (np.arange(DECADES[0] * PER_DECADE, DECADES[1] * PER_DECADE + 1) / PER_DECADE)
_FINE = 1024  # bins of positions while they are counted
_SHOWN = 64  # and as they are reported, at most


class Survey:
    """Magnitudes, positions and worst tokens of a `Difference` (T tokens, B sequences).

    A difference that is not finite counts as larger than any; it is in no bin of magnitudes or positions.
    """

    def __init__(self, difference: Difference) -> None:
        self._bounds = np.asarray(difference.rollout.cu_seqlens)
        lengths = np.diff(self._bounds)
        self._width = max(1, -(-int(lengths.max(initial=0)) // _FINE))
        self._magnitudes = np.zeros(_EDGES.size - 1, np.int64)
        self._zero = 0
        self._nonfinite = 0
        self._counts = np.zeros(_FINE, np.int64)
        self._sums = np.zeros(_FINE, np.float64)
        self._largest = np.zeros(_FINE, np.float64)
        self._worst = np.full(lengths.size, -1.0)  # of each sequence: |d|, and the flat index of its token
        self._where = np.zeros(lengths.size, np.int64)
        for where in difference.places():
            active = np.flatnonzero(difference.active(where))
            apart = np.abs(difference.all(where)[active].astype(np.float64))
            self._add(where.start + active, apart)

    def _add(self, index: np.ndarray, apart: np.ndarray) -> None:
        if not index.size:
            return
        sequence = np.searchsorted(self._bounds, index, side="right") - 1
        finite = np.isfinite(apart)
        self._nonfinite += int(np.count_nonzero(~finite))
        self._add_worst(index, sequence, np.where(finite, apart, np.inf))
        apart, bin_ = apart[finite], ((index - self._bounds[sequence]) // self._width)[finite]
        self._counts += np.bincount(bin_, minlength=_FINE)
        self._sums += np.bincount(bin_, weights=apart, minlength=_FINE)
        np.maximum.at(self._largest, bin_, apart)
        some = apart[apart > 0]
        self._zero += apart.size - some.size
        self._magnitudes += np.histogram(np.clip(some, _EDGES[0], _EDGES[-1]), _EDGES)[0]

    def _add_worst(self, index: np.ndarray, sequence: np.ndarray, apart: np.ndarray) -> None:
        starts = np.flatnonzero(np.diff(sequence, prepend=-1))  # of each sequence's tokens in this block
        for start, stop in zip(starts, [*starts[1:], index.size], strict=True):
            at = start + int(np.argmax(apart[start:stop]))
            if apart[at] > self._worst[sequence[start]]:
                self._worst[sequence[start]], self._where[sequence[start]] = apart[at], index[at]

    def distribution(self) -> dict[str, Any]:
        """Counts of |d| by magnitude; the bins that are named go from the first to the last with a token."""
        occupied = np.flatnonzero(self._magnitudes)
        first, stop = (int(occupied[0]), int(occupied[-1]) + 1) if occupied.size else (0, 0)
        return {
            "bins_per_decade": PER_DECADE,
            "first_log10": DECADES[0] + first / PER_DECADE,
            "counts": self._magnitudes[first:stop].tolist(),
            "zero": self._zero,
            "nonfinite": self._nonfinite,
        }

    def positions(self) -> dict[str, Any]:
        """Mean and largest |d| by position in the sequence, in bins of equally many positions; null for none."""
        occupied = np.flatnonzero(self._counts)
        if not occupied.size:
            return {"first": 0, "width": 1, "counts": [], "mean": [], "max": []}
        first = int(occupied[0])
        merged = -(-(int(occupied[-1]) + 1 - first) // _SHOWN)
        edges = np.arange(first, int(occupied[-1]) + 1, merged)
        counts = np.add.reduceat(self._counts, edges)
        sums, largest = np.add.reduceat(self._sums, edges), np.maximum.reduceat(self._largest, edges)
        some = [int(count) for count in counts]
        return {
            "first": first * self._width,
            "width": merged * self._width,
            "counts": some,
            "mean": [float(total) / count if count else None for total, count in zip(sums, some, strict=True)],
            "max": [float(value) if count else None for value, count in zip(largest, some, strict=True)],
        }

    def worst(self, most: int) -> list[tuple[int, int]]:
        """(sequence, flat index of its worst token), the worst first, of sequences that differ at all."""
        order = np.argsort(-self._worst, kind="stable")[:most]
        return [(int(each), int(self._where[each])) for each in order if self._worst[each] > 0]
