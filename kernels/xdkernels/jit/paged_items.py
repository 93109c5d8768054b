"""Which split of which sequence a program of the paged attention takes, found from the lengths themselves.

A list of the splits would take a kernel of its own to write, and each launch is some microseconds in which nothing is
read. Integers throughout: any order of summation is exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: lengths that a program looks at together: a warp's lanes, so that warps need not wait for each other
FIND_BLOCK = 32


@triton.jit
def first_split(length, window, SPLIT: tl.constexpr):
    """The split that holds the first token within the window."""
    return tl.maximum(length - window, 0) // SPLIT


@triton.jit
def _counts(first, context_lens, batch, window, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """Splits within the window of each of BLOCK sequences from `first` on; 0 beyond the batch."""
    sequences = first + tl.arange(0, BLOCK)
    lengths = tl.load(context_lens + sequences, mask=sequences < batch, other=0)
    return tl.cdiv(lengths, SPLIT) - first_split(lengths, window, SPLIT)


@triton.jit
def count_splits(context_lens, batch, window, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """Splits of all sequences."""
    counts = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, batch, BLOCK):
        counts += _counts(first, context_lens, batch, window, SPLIT, BLOCK)
    return tl.sum(counts)


@triton.jit
def find_split(place, context_lens, batch, window, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """What is at a place among the splits of all sequences: the sequence, and how many of its splits come before."""
    total = 0
    sequence = 0
    before = 0
    for first in range(0, batch, BLOCK):
        counts = _counts(first, context_lens, batch, window, SPLIT, BLOCK)
        passed = total + tl.cumsum(counts) <= place  # false beyond the batch, where nothing is added to the last sum
        sequence += tl.sum(passed.to(tl.int32))
        before += tl.sum(tl.where(passed, counts, 0))
        total += tl.sum(counts)
    return sequence, place - before
