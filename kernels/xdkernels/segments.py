"""Rows by the sequence or turn they belong to: counts, and means whose bits do not depend on the other segments."""

from __future__ import annotations

from functools import cached_property

import torch


class Segments:
    """A partition of n rows. The rows of a segment need not be adjacent; a segment may have none.

    index: int64 [n], each in [0, size). size: how many segments there may be (a bound is enough).
    """

    def __init__(self, index: torch.Tensor, size: int) -> None:
        self.index = index
        ones = torch.ones_like(index)
        self.counts = index.new_zeros(size).index_add_(0, index, ones)  # integers: exact in any order

    @property
    def row_counts(self) -> torch.Tensor:
        """int64 [n]: how many rows the segment of each row has."""
        return self.counts[self.index]

    @property
    def present(self) -> torch.Tensor:
        """int64, 0-d: the number of segments that have a row. Stays on the device."""
        return (self.counts > 0).sum()

    @cached_property
    def _layout(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows sorted by segment: their order, each one's position in its segment, and where a segment starts."""
        order = torch.argsort(self.index, stable=True)
        starts = self.counts.cumsum(0) - self.counts
        return order, torch.arange(len(order), device=order.device) - starts[self.index[order]], starts

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """float64 [n]: the mean of a segment's values [n], at each of its rows.

        Added in float64 by folding halves: position p takes p + h for h = ..., 4, 2, 1, counted from the segment's
        first row. So the order of a sum depends on its own length alone: no atomics, no neighbours. log2(n) passes
        over [n], and no synchronisation with the host.
        """
        if not len(self.index):
            return values.to(torch.float64)
        order, position, starts = self._layout
        last = self.row_counts[order]
        sums = values.to(torch.float64)[order]
        step = 1 << (len(sums) - 1).bit_length() >> 1
        while step:
            takes = (position[:-step] < step) & (position[:-step] + step < last[:-step])
            sums[:-step] += torch.where(takes, sums[step:], 0.0)
            step >>= 1
        return sums[starts[self.index]] / self.row_counts

    def within(self, coarser: Segments) -> torch.Tensor:
        """bool, 0-d: each of these segments lies in one of the coarser ones."""
        low = self.index.new_full((len(self.counts),), len(coarser.counts))
        low = low.scatter_reduce(0, self.index, coarser.index, "amin")
        high = self.index.new_full((len(self.counts),), -1).scatter_reduce(0, self.index, coarser.index, "amax")
        return ((low == high) | (self.counts == 0)).all()
