"""The selected logprob in Triton: partial log-sum-exps a vocabulary block, and the gradient of the logits.

One program owns a row's block and walks it in tiles of LANES x DEPTH columns, column = element * LANES + lane. Each
lane keeps a running maximum and the sums that belong to it; the lanes are joined at the end of the block. So the loop
has no reduction across threads, and one exp an element. Everything that decides a bit is LANES, DEPTH and the
vocabulary block; where a row lies, how it is strided and how many threads share it, is not.

Shape suffixes: L lanes, D elements of a lane in a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from xdkernels.jit.fold import FUSION, LOWEST, UNDERFLOW, divided, exp, fold_rows, fold_sum
from xdkernels.jit.launch import on_device_of

#: a program's offset within a launch is a 32-bit integer
MOST_PROGRAMS = 2**31 - 1


class TileLaunch(NamedTuple):
    """lanes and depth are arithmetic: other values, other bits. warps and stages only say how the work is spread."""

    lanes: int
    depth: int
    warps: int
    stages: int = 1


PARTIALS = TileLaunch(lanes=256, depth=4, warps=1)
GRADIENT = TileLaunch(lanes=1024, depth=2, warps=4)


@triton.jit
def _absorb(maximum_L, total_L, weighted_L, x_DL, LANES: tl.constexpr, DEPTH: tl.constexpr, ENTROPY: tl.constexpr):
    """The lanes' maximum, sum of exp(x - maximum), and sum of exp(x - maximum) (x - maximum), with a tile more."""
    higher_L = tl.maximum(maximum_L, tl.max(x_DL, axis=0))
    shift_L = tl.maximum(maximum_L - higher_L, UNDERFLOW)  # of a lane without a column yet, too
    scale_L = exp(shift_L)
    shifted_DL = x_DL - higher_L[None, :]
    weight_DL = exp(shifted_DL)
    if ENTROPY:
        term_DL = weight_DL * tl.maximum(shifted_DL, UNDERFLOW)
        before_L = tl.fma(total_L, shift_L, weighted_L)  # what the maximum's rise does to (x - maximum)
        weighted_L = tl.fma(before_L, scale_L, fold_rows(term_DL, DEPTH, LANES))
    total_L = tl.fma(total_L, scale_L, fold_rows(weight_DL, DEPTH, LANES))
    return higher_L, total_L, weighted_L


@triton.jit(do_not_specialize=["columns", "first"])
def _partials_kernel(
    logits, ids, maximum, total, weighted, selected,
    row_stride, column_stride, columns, first, blocks, temperature, reciprocal,
    BLOCK: tl.constexpr, ROW_MULTIPLE: tl.constexpr, SCALED: tl.constexpr, ENTROPY: tl.constexpr,
    LANES: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One (row, block) a program, blocks of a row side by side. columns: how many of the shard count.

    The block that holds the row's id stores its logit; where no block does, the first stores -inf.
    """
    program = tl.program_id(0)
    block = program % blocks
    begin = block.to(tl.int64) * BLOCK
    row = (program // blocks).to(tl.int64)
    logits += tl.multiple_of(row * row_stride, ROW_MULTIPLE)

    tile: tl.constexpr = LANES * DEPTH
    column_DL = (tl.arange(0, DEPTH) * LANES)[:, None] + tl.arange(0, LANES)[None, :]
    start = logits + begin * column_stride
    offset_DL = column_DL.to(tl.int64) * column_stride
    count = tl.maximum(tl.minimum(columns - begin, BLOCK), 0).to(tl.int32)
    maximum_L = tl.full((LANES,), LOWEST, tl.float32)
    total_L = tl.zeros((LANES,), tl.float32)
    weighted_L = tl.zeros((LANES,), tl.float32)
    for index in tl.range(0, count // tile, num_stages=STAGES):
        x_DL = tl.load(start + index * (tile * tl.cast(column_stride, tl.int64)) + offset_DL).to(tl.float32)
        if SCALED:
            x_DL = divided(x_DL, temperature, reciprocal)
        maximum_L, total_L, weighted_L = _absorb(maximum_L, total_L, weighted_L, x_DL, LANES, DEPTH, ENTROPY)
    done = count // tile * tile
    if done < count:
        tail = start + done.to(tl.int64) * column_stride + offset_DL
        x_DL = tl.load(tail, mask=column_DL < count - done, other=-float("inf")).to(tl.float32)
        if SCALED:
            x_DL = divided(x_DL, temperature, reciprocal)
        maximum_L, total_L, weighted_L = _absorb(maximum_L, total_L, weighted_L, x_DL, LANES, DEPTH, ENTROPY)

    highest = tl.max(maximum_L, axis=0)
    shift_L = tl.maximum(maximum_L - highest, UNDERFLOW)
    scale_L = exp(shift_L)
    one = tl.arange(0, 1)
    tl.store(maximum + program, highest)
    tl.store(total + program + one, fold_sum((total_L * scale_L)[None, :], 1, LANES))
    if ENTROPY:
        joined_L = tl.fma(total_L, shift_L, weighted_L) * scale_L
        tl.store(weighted + program + one, fold_sum(joined_L[None, :], 1, LANES))

    token = tl.load(ids + row).to(tl.int64) - first
    here = (token >= begin) & (token < begin + count)
    nowhere = (block == 0) & ((token < 0) | (token >= columns))
    logit = tl.load(logits + token * column_stride, mask=here, other=-float("inf")).to(tl.float32)
    if SCALED:
        logit = divided(logit, temperature, reciprocal)
    tl.store(selected + row, logit, mask=here | nowhere)


@triton.jit
def _slope(
    x_DL, selected_DL, maximum, log_total, entropy, g, h, temperature, reciprocal,
    SCALED: tl.constexpr, OF_LOGPROB: tl.constexpr, OF_ENTROPY: tl.constexpr,
):  # fmt: skip
    """(g [selected] - p (g + h (log p + entropy))) / temperature, float32."""
    if SCALED:
        x_DL = divided(x_DL, temperature, reciprocal)
    logprob_DL = (x_DL - maximum) - log_total
    slope_DL = -exp(logprob_DL)
    if OF_ENTROPY:
        slope_DL *= tl.fma(tl.maximum(logprob_DL, UNDERFLOW) + entropy, h, g)
    else:
        slope_DL *= g
    if OF_LOGPROB:
        slope_DL += tl.where(selected_DL, g, 0.0)
    return slope_DL * reciprocal if SCALED else slope_DL


@triton.jit(do_not_specialize=["columns", "vocab"])
def _gradient_kernel(
    logits, ids, maximum, log_total, entropy, of_logprob, of_entropy, gradient,
    row_stride, column_stride, gradient_row_stride, gradient_column_stride, columns, vocab, tiles,
    temperature, reciprocal,
    ROW_MULTIPLE: tl.constexpr, SCALED: tl.constexpr, OF_LOGPROB: tl.constexpr, OF_ENTROPY: tl.constexpr,
    LANES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of one row a program; columns from vocab on get 0."""
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    begin = (program % tiles) * (LANES * DEPTH)
    column_DL = (tl.arange(0, DEPTH) * LANES)[:, None] + tl.arange(0, LANES)[None, :]
    place_DL = begin.to(tl.int64) + column_DL
    logits += tl.multiple_of(row * row_stride, ROW_MULTIPLE)
    gradient += tl.multiple_of(row * gradient_row_stride, ROW_MULTIPLE)
    from_DL = logits + place_DL * column_stride
    to_DL = gradient + place_DL * gradient_column_stride

    token = tl.load(ids + row).to(tl.int64) - begin
    token = tl.where((token >= 0) & (token < LANES * DEPTH), token, -1).to(tl.int32)
    selected_DL = column_DL == token
    g = tl.load(of_logprob + row) if OF_LOGPROB else 0.0
    h = tl.load(of_entropy + row) if OF_ENTROPY else 0.0
    mean = tl.load(entropy + row) if OF_ENTROPY else 0.0
    highest = tl.load(maximum + row)
    log_sum = tl.load(log_total + row)
    if begin + LANES * DEPTH <= vocab:
        x_DL = tl.load(from_DL).to(tl.float32)
        slope_DL = _slope(
            x_DL, selected_DL, highest, log_sum, mean, g, h, temperature, reciprocal, SCALED, OF_LOGPROB, OF_ENTROPY
        )
        tl.store(to_DL, slope_DL.to(gradient.dtype.element_ty))
    else:
        counts_DL = column_DL < vocab - begin
        x_DL = tl.load(from_DL, mask=counts_DL, other=-float("inf")).to(tl.float32)
        slope_DL = _slope(
            x_DL, selected_DL, highest, log_sum, mean, g, h, temperature, reciprocal, SCALED, OF_LOGPROB, OF_ENTROPY
        )
        slope_DL = tl.where(counts_DL, slope_DL, 0.0)  # of a row with NaN, too
        tl.store(to_DL, slope_DL.to(gradient.dtype.element_ty), mask=column_DL < columns - begin)


def partials(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: float,
    columns: int,
    first: int,
    vocab_block: int,
    entropy: bool,
    launch: TileLaunch = PARTIALS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """maximum, total and weighted, float32 [N, K], and the selected logits over temperature, float32 [N].

    logits [N, V], any strides, of which `columns` columns count; ids [N] contiguous integers, counted like `first`, the
    place of the shard's first column; K = ceil(V / vocab_block). Nothing is checked here but the grid.
    """
    rows, width = logits.shape
    blocks = triton.cdiv(width, vocab_block)
    _require_grid(rows * blocks)
    sums = logits.new_empty((3 if entropy else 2, rows, blocks), dtype=torch.float32)
    selected = logits.new_empty(rows, dtype=torch.float32)
    if rows:
        row_stride, column_stride = logits.stride()
        with on_device_of(logits):
            _partials_kernel[(rows * blocks,)](
                logits, ids, sums[0], sums[1], sums[-1], selected,
                row_stride, column_stride, columns, first, blocks, *_scale(temperature),
                BLOCK=vocab_block, ROW_MULTIPLE=_multiple(row_stride), SCALED=temperature != 1, ENTROPY=entropy,
                LANES=launch.lanes, DEPTH=launch.depth, STAGES=launch.stages, num_warps=launch.warps, **FUSION,
            )  # fmt: skip
    return sums[0], sums[1], sums[2] if entropy else None, selected


def gradient(
    logits: torch.Tensor,
    ids: torch.Tensor,
    merged: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    of_logprob: torch.Tensor | None,
    of_entropy: torch.Tensor | None,
    temperature: float,
    vocab: int,
    launch: TileLaunch = GRADIENT,
) -> torch.Tensor:
    """d / d logits, in their dtype, [N, V]: one pass that reads and one that writes.

    merged: maximum, log of the total and (when of_entropy is given) entropy, float32 [N]. of_logprob, of_entropy: the
    upstream gradients, float32 [N]; none: zero.
    """
    rows, columns = logits.shape
    tiles = triton.cdiv(columns, launch.lanes * launch.depth)
    _require_grid(rows * tiles)
    found = torch.empty_like(logits)  # transposed logits get a transposed gradient, overlapping ones a plain one
    maximum, log_total, entropy = merged
    if rows:
        with on_device_of(logits):
            _gradient_kernel[(rows * tiles,)](
                logits, ids, maximum, log_total, maximum if entropy is None else entropy,
                maximum if of_logprob is None else of_logprob.contiguous(),
                maximum if of_entropy is None else of_entropy.contiguous(), found,
                *logits.stride(), *found.stride(), columns, vocab, tiles, *_scale(temperature),
                ROW_MULTIPLE=min(_multiple(logits.stride(0)), _multiple(found.stride(0))), SCALED=temperature != 1,
                OF_LOGPROB=of_logprob is not None, OF_ENTROPY=of_entropy is not None,
                LANES=launch.lanes, DEPTH=launch.depth, num_warps=launch.warps, **FUSION,
            )  # fmt: skip
    return found


def _scale(temperature: float) -> tuple[float, float]:
    """The divisor as float32 sees it, and its reciprocal."""
    divisor = torch.tensor(temperature, dtype=torch.float32).item()
    return divisor, 1 / divisor


def _multiple(stride: int) -> int:
    """What the compiler may know of a row's offset: 8 elements of two bytes are a 16-byte load."""
    return 8 if stride % 8 == 0 else 1


def _require_grid(programs: int) -> None:
    if programs > MOST_PROGRAMS:
        raise ValueError(f"too many rows for one launch: {programs} programs, at most {MOST_PROGRAMS}")
