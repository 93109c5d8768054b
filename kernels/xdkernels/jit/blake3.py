"""BLAKE3 in Triton: a chunk a lane, then pairs of chaining values, level by level, to the root.

Shapes: C chunks of 1024 bytes; a chaining value is 8 words of 32 bits. All arithmetic is of unsigned 32-bit words,
modulo 2^32 (the BLAKE3 paper, https://github.com/BLAKE3-team/BLAKE3-specs, sections 2.2 to 2.4).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xdkernels.jit.launch import on_device_of

CHUNK_BYTES = 1024
#: chunks a program: a lane each
LANES = 128
#: chaining values that one program takes to one; a power of two, so that its pairs are the whole tree's
SUBTREE = 256

_CHUNK_START = tl.constexpr(1)
_CHUNK_END = tl.constexpr(2)
_PARENT = tl.constexpr(4)
_ROOT = tl.constexpr(8)
_IV0 = tl.constexpr(0x6A09E667)
_IV1 = tl.constexpr(0xBB67AE85)
_IV2 = tl.constexpr(0x3C6EF372)
_IV3 = tl.constexpr(0xA54FF53A)
_IV4 = tl.constexpr(0x510E527F)
_IV5 = tl.constexpr(0x9B05688C)
_IV6 = tl.constexpr(0x1F83D9AB)
_IV7 = tl.constexpr(0x5BE0CD19)


@triton.jit
def _rotated(x, BITS: tl.constexpr):
    return (x >> BITS) | (x << (32 - BITS))


@triton.jit
def _mixed(a, b, c, d, x, y):
    """The quarter round G. Sums are to wrap, so no one is to look for an overflow."""
    a = tl.add(tl.add(a, b, False), x, False)
    d = _rotated(d ^ a, 16)
    c = tl.add(c, d, False)
    b = _rotated(b ^ c, 12)
    a = tl.add(tl.add(a, b, False), y, False)
    d = _rotated(d ^ a, 8)
    c = tl.add(c, d, False)
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _compressed(
    h0, h1, h2, h3, h4, h5, h6, h7,
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15,
    counter_low, counter_high, length, flags,
):  # fmt: skip
    """The new chaining value. counter, length in bytes and flags: a word a lane."""
    v0, v1, v2, v3, v4, v5, v6, v7 = h0, h1, h2, h3, h4, h5, h6, h7
    zero = h0 ^ h0
    v8, v9, v10, v11 = zero + _IV0, zero + _IV1, zero + _IV2, zero + _IV3
    v12, v13, v14, v15 = counter_low, counter_high, length, flags
    for _ in tl.static_range(7):
        v0, v4, v8, v12 = _mixed(v0, v4, v8, v12, m0, m1)
        v1, v5, v9, v13 = _mixed(v1, v5, v9, v13, m2, m3)
        v2, v6, v10, v14 = _mixed(v2, v6, v10, v14, m4, m5)
        v3, v7, v11, v15 = _mixed(v3, v7, v11, v15, m6, m7)
        v0, v5, v10, v15 = _mixed(v0, v5, v10, v15, m8, m9)
        v1, v6, v11, v12 = _mixed(v1, v6, v11, v12, m10, m11)
        v2, v7, v8, v13 = _mixed(v2, v7, v8, v13, m12, m13)
        v3, v4, v9, v14 = _mixed(v3, v4, v9, v14, m14, m15)
        m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15 = (
            m2, m6, m3, m10, m7, m0, m4, m13, m1, m11, m12, m5, m9, m14, m15, m8
        )  # fmt: skip
    return v0 ^ v8, v1 ^ v9, v2 ^ v10, v3 ^ v11, v4 ^ v12, v5 ^ v13, v6 ^ v14, v7 ^ v15


@triton.jit
def _store(values, stride, place, held, h0, h1, h2, h3, h4, h5, h6, h7):
    """A chaining value a lane into values [8, stride], column `place` (64 bits)."""
    tl.store(values + place, h0.to(tl.int32, bitcast=True), mask=held)
    tl.store(values + stride + place, h1.to(tl.int32, bitcast=True), mask=held)
    tl.store(values + 2 * stride + place, h2.to(tl.int32, bitcast=True), mask=held)
    tl.store(values + 3 * stride + place, h3.to(tl.int32, bitcast=True), mask=held)
    tl.store(values + 4 * stride + place, h4.to(tl.int32, bitcast=True), mask=held)
    tl.store(values + 5 * stride + place, h5.to(tl.int32, bitcast=True), mask=held)
    tl.store(values + 6 * stride + place, h6.to(tl.int32, bitcast=True), mask=held)
    tl.store(values + 7 * stride + place, h7.to(tl.int32, bitcast=True), mask=held)


@triton.jit
def _loaded(place, stride, held):
    """A chaining value a lane, at `place` in each of eight rows."""
    return (
        tl.load(place, mask=held, other=0).to(tl.uint32, bitcast=True),
        tl.load(place + stride, mask=held, other=0).to(tl.uint32, bitcast=True),
        tl.load(place + 2 * stride, mask=held, other=0).to(tl.uint32, bitcast=True),
        tl.load(place + 3 * stride, mask=held, other=0).to(tl.uint32, bitcast=True),
        tl.load(place + 4 * stride, mask=held, other=0).to(tl.uint32, bitcast=True),
        tl.load(place + 5 * stride, mask=held, other=0).to(tl.uint32, bitcast=True),
        tl.load(place + 6 * stride, mask=held, other=0).to(tl.uint32, bitcast=True),
        tl.load(place + 7 * stride, mask=held, other=0).to(tl.uint32, bitcast=True),
    )


@triton.jit
def _of_data(data, place, last, there):
    """The data's word at `place`; 0 before and behind it."""
    return tl.load(data + place, mask=there & (place >= 0) & (place <= last), other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _shifted(before, word, split):
    """The message's word that begins `split` bits before a word of the data: of that word and the one before it."""
    return (((word.to(tl.uint64) << 32) | before.to(tl.uint64)) >> (32 - split)).to(tl.uint32)


@triton.jit
def _of_prefix(prefix, word, whole):
    return tl.load(prefix + word, mask=word <= whole, other=0).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["size", "chunks", "deepest", "whole", "split", "last"])
def _chunks_kernel(prefix, data, values, size, chunks, deepest, whole, split, last, ONLY: tl.constexpr,
                   LANES: tl.constexpr):
    """The chaining values [8, chunks] of a message of `size` bytes: a prefix, and data behind it.

    prefix, data: 32-bit words; the prefix fills `whole` of them and `split` bits of one more, whose others are 0. last:
    the data's last word. deepest: blocks of the longest chunk. ONLY: the message is one chunk, and this its root.
    """
    chunk = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64)
    held = chunk < chunks
    left = tl.minimum(tl.maximum(size - chunk * 1024, 0), 1024).to(tl.int32)
    blocks = tl.maximum((left + 63) // 64, 1)
    split = split.to(tl.uint64)
    counter_low = chunk.to(tl.uint32)
    counter_high = (chunk >> 32).to(tl.uint32)
    zero = counter_low ^ counter_low
    h0, h1, h2, h3 = zero + _IV0, zero + _IV1, zero + _IV2, zero + _IV3
    h4, h5, h6, h7 = zero + _IV4, zero + _IV5, zero + _IV6, zero + _IV7
    for block in range(deepest):
        word = chunk * 256 + block * 16
        place = word - whole
        there = held & (block < blocks)
        before = _of_data(data, place - 1, last, there)
        d0 = _of_data(data, place + 0, last, there)
        d1 = _of_data(data, place + 1, last, there)
        d2 = _of_data(data, place + 2, last, there)
        d3 = _of_data(data, place + 3, last, there)
        d4 = _of_data(data, place + 4, last, there)
        d5 = _of_data(data, place + 5, last, there)
        d6 = _of_data(data, place + 6, last, there)
        d7 = _of_data(data, place + 7, last, there)
        d8 = _of_data(data, place + 8, last, there)
        d9 = _of_data(data, place + 9, last, there)
        d10 = _of_data(data, place + 10, last, there)
        d11 = _of_data(data, place + 11, last, there)
        d12 = _of_data(data, place + 12, last, there)
        d13 = _of_data(data, place + 13, last, there)
        d14 = _of_data(data, place + 14, last, there)
        d15 = _of_data(data, place + 15, last, there)
        m0 = _shifted(before, d0, split)
        m1 = _shifted(d0, d1, split)
        m2 = _shifted(d1, d2, split)
        m3 = _shifted(d2, d3, split)
        m4 = _shifted(d3, d4, split)
        m5 = _shifted(d4, d5, split)
        m6 = _shifted(d5, d6, split)
        m7 = _shifted(d6, d7, split)
        m8 = _shifted(d7, d8, split)
        m9 = _shifted(d8, d9, split)
        m10 = _shifted(d9, d10, split)
        m11 = _shifted(d10, d11, split)
        m12 = _shifted(d11, d12, split)
        m13 = _shifted(d12, d13, split)
        m14 = _shifted(d13, d14, split)
        m15 = _shifted(d14, d15, split)
        if tl.program_id(0) * LANES * 256 + block * 16 <= whole:
            m0 = m0 | _of_prefix(prefix, word + 0, whole)
            m1 = m1 | _of_prefix(prefix, word + 1, whole)
            m2 = m2 | _of_prefix(prefix, word + 2, whole)
            m3 = m3 | _of_prefix(prefix, word + 3, whole)
            m4 = m4 | _of_prefix(prefix, word + 4, whole)
            m5 = m5 | _of_prefix(prefix, word + 5, whole)
            m6 = m6 | _of_prefix(prefix, word + 6, whole)
            m7 = m7 | _of_prefix(prefix, word + 7, whole)
            m8 = m8 | _of_prefix(prefix, word + 8, whole)
            m9 = m9 | _of_prefix(prefix, word + 9, whole)
            m10 = m10 | _of_prefix(prefix, word + 10, whole)
            m11 = m11 | _of_prefix(prefix, word + 11, whole)
            m12 = m12 | _of_prefix(prefix, word + 12, whole)
            m13 = m13 | _of_prefix(prefix, word + 13, whole)
            m14 = m14 | _of_prefix(prefix, word + 14, whole)
            m15 = m15 | _of_prefix(prefix, word + 15, whole)
        ends = block == blocks - 1
        flags = tl.where(ends, _CHUNK_END, 0)
        if block == 0:
            flags = flags | _CHUNK_START
        if ONLY:
            flags = tl.where(ends, flags | _ROOT, flags)
        length = tl.minimum(tl.maximum(left - block * 64, 0), 64)
        n0, n1, n2, n3, n4, n5, n6, n7 = _compressed(
            h0, h1, h2, h3, h4, h5, h6, h7,
            m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15,
            counter_low, counter_high, length.to(tl.uint32), flags.to(tl.uint32),
        )  # fmt: skip
        on = block < blocks
        h0, h1, h2, h3 = tl.where(on, n0, h0), tl.where(on, n1, h1), tl.where(on, n2, h2), tl.where(on, n3, h3)
        h4, h5, h6, h7 = tl.where(on, n4, h4), tl.where(on, n5, h5), tl.where(on, n6, h6), tl.where(on, n7, h7)
    _store(values, chunks, chunk, held, h0, h1, h2, h3, h4, h5, h6, h7)


@triton.jit(do_not_specialize=["count", "stride", "trees", "levels"])
def _trees_kernel(values, roots, count, stride, trees, levels, SUBTREE: tl.constexpr):
    """Columns of values [8, stride], of which `count` are there, SUBTREE at a time, to one each: roots [8, trees].

    levels: as many as the largest of these trees has. values is overwritten. A column without a neighbour goes up as it
    is: the left side of every pair is a whole tree.
    """
    tree = tl.program_id(0)
    begin = tree.to(tl.int64) * SUBTREE
    left = tl.minimum(count - tree * SUBTREE, SUBTREE)
    lane = tl.arange(0, SUBTREE // 2)
    columns = values + begin + lane * 0
    for _ in range(levels):
        paired = lane * 2 + 1 < left
        there = lane * 2 < left
        a0, a1, a2, a3, a4, a5, a6, a7 = _loaded(columns + lane * 2, stride, there)
        b0, b1, b2, b3, b4, b5, b6, b7 = _loaded(columns + lane * 2 + 1, stride, paired)
        zero = a0 ^ a0
        flags = zero + _PARENT
        if (left == 2) & (trees == 1):
            flags = zero + (_PARENT | _ROOT)
        n0, n1, n2, n3, n4, n5, n6, n7 = _compressed(
            zero + _IV0, zero + _IV1, zero + _IV2, zero + _IV3, zero + _IV4, zero + _IV5, zero + _IV6, zero + _IV7,
            a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7, zero, zero, zero + 64, flags,
        )  # fmt: skip
        tl.debug_barrier()  # all are read before any is overwritten
        _store(
            values, stride, begin + lane, there,
            tl.where(paired, n0, a0), tl.where(paired, n1, a1), tl.where(paired, n2, a2), tl.where(paired, n3, a3),
            tl.where(paired, n4, a4), tl.where(paired, n5, a5), tl.where(paired, n6, a6), tl.where(paired, n7, a7),
        )  # fmt: skip
        tl.debug_barrier()
        left = (left + 1) // 2
    r0, r1, r2, r3, r4, r5, r6, r7 = _loaded(columns, stride, lane == 0)
    _store(roots, trees, tree + lane.to(tl.int64), lane == 0, r0, r1, r2, r3, r4, r5, r6, r7)


def chunks(prefix: torch.Tensor, data: torch.Tensor, prefix_size: int, size: int) -> torch.Tensor:
    """Chaining values, int32 [8, C], of all chunks of a message of `size` bytes, the first prefix_size those of prefix.

    prefix: int32, one word more than prefix_size fills, zeros behind them. data: int32 [n], contiguous, zeros behind
    the message's end.
    """
    values = torch.empty(8, max(1, triton.cdiv(size, CHUNK_BYTES)), dtype=torch.int32, device=data.device)
    count = values.shape[1]
    deepest = triton.cdiv(min(max(size, 1), CHUNK_BYTES), 64)
    whole, rest = divmod(prefix_size, 4)
    with on_device_of(values):
        _chunks_kernel[(triton.cdiv(count, LANES),)](
            prefix, data, values, size, count, deepest, whole, rest * 8, len(data) - 1,
            ONLY=count == 1, LANES=LANES, num_warps=4,
        )  # fmt: skip
    return values


def root(values: torch.Tensor) -> torch.Tensor:
    """The message's digest, int32 [8], from all its chunks' chaining values, int32 [8, C], which are overwritten."""
    while (count := values.shape[1]) > 1:
        trees = triton.cdiv(count, SUBTREE)
        roots = values.new_empty(8, trees)
        with on_device_of(values):
            _trees_kernel[(trees,)](
                values, roots, count, count, trees, (min(count, SUBTREE) - 1).bit_length(), SUBTREE=SUBTREE,
                num_warps=max(1, SUBTREE // 64),
            )
        values = roots
    return values[:, 0]
