"""Paged decode attention in Triton: splits of the keys, then their merge. Fixed orders throughout, and no atomics.

Two kernels. The first attends to one split of one key-value head an item, and its programs find their items from the
lengths themselves (`jit.paged_items`). The second merges a row's splits. What decides a row's bits is written in the
source: splits and tiles of keys begin at multiples of their size counted from the first token, sums over keys are kept
a lane and folded by index at the end of the split, and the merge folds splits in order, MERGE_BLOCK at a time from the
first that the window reaches. How many programs stride over the items, and in which order items come, decides nothing.

Arguments whose value or alignment follows the batch (its size, the table's width, where a row begins) are kept out of
Triton's specialisation, so that one binary serves every batch. Strides and alignment of the cache do specialise:
16-byte loads need them, and a cache keeps its layout.

Shape suffixes: R query heads of one key-value head, padded to BLOCK_R rows; N the BLOCK_N keys of a tile; D head
dimension, padded to BLOCK_D; C the BLOCK_C splits that the merge loads at a time.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

from xdkernels.jit.fold import FUSION, LOWEST, fold_sum
from xdkernels.jit.launch import multiprocessors, on_device_of
from xdkernels.jit.paged_items import FIND_BLOCK, count_splits, find_split, first_split
from xdkernels.jit.tanh import tanh
from xdkernels.paged_attention import Tiling

#: splits that the merge loads at a time; part of the arithmetic, hence one constant
MERGE_BLOCK = 32
#: rows of a tile of 16-bit operands at least: the matrix instruction's. float32 needs none, and multiplies no padding
LEAST_ROWS = 16


@triton.jit(
    do_not_specialize=["table_stride", "batch", "splits", "window"],
    do_not_specialize_on_alignment=["q", "block_tables", "context_lens"],
)
def _split_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    context_lens,
    partial,
    maxima,
    totals,
    k_block_stride,
    k_token_stride,
    k_head_stride,
    v_block_stride,
    v_token_stride,
    v_head_stride,
    table_stride,
    batch,
    splits,
    window,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    FIND: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend to splits: unnormalised output, maximum and sum of exp(x - maximum) of each, float32.

    Items run over key-value heads first, so that heads of the same tokens, neighbours in memory, are read together.
    Split s of sequence b leaves its results in slot b * splits + s; of the slots, only those in use are written.
    """
    if OVERLAP:
        gdc_launch_dependents()  # once the last programs run, the merge's may come and wait for them
    rows = tl.arange(0, BLOCK_R)
    lanes = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    row_mask = rows < GROUP
    query_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    items = count_splits(context_lens, batch, window, SPLIT, FIND) * KV_HEADS
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        head = item % KV_HEADS
        sequence, nth = find_split(item // KV_HEADS, context_lens, batch, window, SPLIT, FIND)
        length = tl.load(context_lens + sequence)
        split = first_split(length, window, SPLIT) + nth
        slot = sequence * splits + split
        start = tl.maximum(length - window, 0)
        begin = tl.maximum(split * SPLIT, start // BLOCK_N * BLOCK_N)
        end = tl.minimum(split * SPLIT + SPLIT, length)
        table = block_tables + sequence.to(tl.int64) * table_stride
        query_rows = (sequence.to(tl.int64) * KV_HEADS + head) * GROUP + rows
        q_RD = tl.load(q + query_rows[:, None] * HEAD_DIM + dims[None, :], mask=query_mask, other=0.0)
        k_head = k_cache + head.to(tl.int64) * k_head_stride
        v_head = v_cache + head.to(tl.int64) * v_head_stride

        m_R = tl.full((BLOCK_R,), LOWEST, tl.float32)
        s_RN = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        acc_RD = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
        keys = begin + lanes
        pages = tl.load(table + keys // PAGE, mask=(keys >= start) & (keys < end), other=0)
        for first in range(begin, end, BLOCK_N):
            keys = first + lanes
            used = (keys >= start) & (keys < end)  # a slot not in use is never read: it may hold anything
            block = pages.to(tl.int64)
            token = (keys % PAGE).to(tl.int64)
            k_offsets = block * k_block_stride + token * k_token_stride
            v_offsets = block * v_block_stride + token * v_token_stride
            mask = used[:, None] if BLOCK_D == HEAD_DIM else used[:, None] & (dims < HEAD_DIM)[None, :]
            k_ND = tl.load(k_head + k_offsets[:, None] + dims[None, :], mask=mask, other=0.0)
            v_ND = tl.load(v_head + v_offsets[:, None] + dims[None, :], mask=mask, other=0.0)
            ahead = keys + BLOCK_N  # the next tile's pages, a turn early: its loads need not wait for the table
            pages = tl.load(table + ahead // PAGE, mask=(ahead >= start) & (ahead < end), other=0)

            x_RN = tl.dot(q_RD, tl.trans(k_ND), input_precision=PRECISION) * scale
            if SOFTCAP:
                x_RN = softcap * tanh(x_RN / softcap)
            x_RN = tl.where(used[None, :], x_RN, float("-inf"))
            new_R = tl.maximum(m_R, tl.max(x_RN, axis=1))
            alpha_R = tl.exp(m_R - new_R)
            p_RN = tl.exp(x_RN - new_R[:, None])
            s_RN = tl.fma(s_RN, alpha_R[:, None], p_RN)
            acc_RD = tl.dot(p_RN.to(v_ND.dtype), v_ND, acc_RD * alpha_R[:, None], input_precision=PRECISION)
            m_R = new_R

        out_rows = (slot.to(tl.int64) * KV_HEADS + head) * GROUP + rows
        tl.store(maxima + out_rows, m_R, mask=row_mask)
        tl.store(totals + out_rows, fold_sum(s_RN, BLOCK_R, BLOCK_N), mask=row_mask)
        tl.store(partial + out_rows[:, None] * HEAD_DIM + dims[None, :], acc_RD, mask=query_mask)


@triton.jit(do_not_specialize=["splits", "window"], do_not_specialize_on_alignment=["context_lens", "out"])
def _merge_kernel(
    partial,
    maxima,
    totals,
    context_lens,
    out,
    splits,
    window,
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merge the splits of one query head of one sequence: BLOCK_C at a time in order, folded by index within them."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_C)
    length = tl.load(context_lens + sequence)
    begin = sequence * splits + first_split(length, window, SPLIT)
    end = sequence * splits + tl.cdiv(length, SPLIT)
    m = LOWEST + 0.0
    s = 0.0
    acc_D = tl.zeros((BLOCK_D,), tl.float32)
    if OVERLAP:
        gdc_wait()  # until every split is written
    for first in range(begin, end, BLOCK_C):
        slots = first + lanes
        valid = slots < end
        rows = slots.to(tl.int64) * HEADS + head
        m_C = tl.load(maxima + rows, mask=valid, other=LOWEST)
        s_C = tl.load(totals + rows, mask=valid, other=0.0)
        mask = valid[None, :] & (dims < HEAD_DIM)[:, None]
        o_DC = tl.load(partial + rows[None, :] * HEAD_DIM + dims[:, None], mask=mask, other=0.0)
        new = tl.maximum(m, tl.max(m_C))
        alpha = tl.exp(m - new)
        weight_C = tl.exp(m_C - new)
        s = s * alpha + tl.sum(fold_sum((weight_C * s_C)[None, :], 1, BLOCK_C))
        acc_D = acc_D * alpha + fold_sum(weight_C[None, :] * o_DC, BLOCK_D, BLOCK_C)
        m = new
    row = sequence.to(tl.int64) * HEADS + head
    tl.store(out + row * HEAD_DIM + dims, acc_D / s, mask=dims < HEAD_DIM)


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Whether the device, the current one, launches a kernel's programs while those of the one before it end.

    Programmatic dependent launch: Hopper and later.
    """
    if triton.knobs.runtime.interpret:
        return False
    target = driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    split_tokens: int,
    scale: float,
    softcap: float | None,
    window: int | None,
    tiling: Tiling,
) -> torch.Tensor:
    """`paged_decode_attention` on arguments that have been checked, under a `Tiling`. No host synchronisation."""
    batch, heads, head_dim = q.shape
    _, page, kv_heads, _ = k_cache.shape
    group = heads // kv_heads
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if batch == 0:
        return out
    q, context_lens = q.contiguous(), context_lens.contiguous()
    if block_tables.stride(-1) != 1:
        block_tables = block_tables.contiguous()
    reach = torch.iinfo(torch.int32).max if window is None else min(window, torch.iinfo(torch.int32).max)
    splits = triton.cdiv(block_tables.shape[1] * page, split_tokens)  # at most: the lengths stay on the device
    slots = batch * splits

    def work(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    maxima, totals, partial = work(slots, heads), work(slots, heads), work(slots, heads, head_dim)
    block_d = triton.next_power_of_2(head_dim)
    strict = q.dtype == torch.float32
    with on_device_of(q):
        overlap = _overlaps(q.device)
        _split_kernel[(min(slots * kv_heads, tiling.programs_per_sm * multiprocessors(q.device)),)](
            q,
            k_cache,
            v_cache,
            block_tables,
            context_lens,
            partial,
            maxima,
            totals,
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            block_tables.stride(0),
            batch,
            splits,
            reach,
            float(scale),  # an integer would be specialised on
            1.0 if softcap is None else float(softcap),
            KV_HEADS=kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            PAGE=page,
            SPLIT=split_tokens,
            BLOCK_R=max(1 if strict else LEAST_ROWS, triton.next_power_of_2(group)),
            BLOCK_N=tiling.block_n,
            BLOCK_D=block_d,
            SOFTCAP=softcap is not None,
            PRECISION="ieee" if strict else "tf32",  # which says nothing to 16-bit operands
            FIND=FIND_BLOCK,
            OVERLAP=overlap,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            maxnreg=tiling.max_registers,
            **FUSION,
        )
        _merge_kernel[(batch, heads)](
            partial,
            maxima,
            totals,
            context_lens,
            out,
            splits,
            reach,
            SPLIT=split_tokens,
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_C=MERGE_BLOCK,
            OVERLAP=overlap,
            num_warps=max(4, block_d // 32),
            **({"launch_pdl": True} if overlap else {}),  # the interpreter knows no such option
            **FUSION,
        )
    return out
