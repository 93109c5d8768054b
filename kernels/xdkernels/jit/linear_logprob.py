"""Language-model head and selected logprob in Triton: the logits live in registers, a tile at a time.

One persistent kernel multiplies [BLOCK_M, H] by [BLOCK_N, H] with float32 accumulation and reduces the tile to three
numbers a row; a second one merges a row's tiles. Nothing here is chosen by N: every batch runs the same tiles in the
same order of sums, so that a row's bits do not depend on how many rows there are or where it stands. Sums over a row
are folded by index (`jit.fold`), for the compiler's own order would follow its layout.

Exponentials are taken in base 2 against an integer reference, a row and a tile: 2^(x - r). A change of reference is
then a multiplication by a power of two, which is exact in bfloat16 as in float32. That is what makes two products
enough for a frozen head. The gradient of a row's logprob is

    (1 - p_id) weight[id] - sum over v != id of p_v weight[v]

and p_v must be known to the second product before the row's log-sum-exp is. So the tile stores 2^(x - r) in bfloat16,
rounded once; tiles whose reference is not the row's are scaled (exactly) to it; and 1 / total multiplies the second
product's result, in float32. The reference is the selected token's logit wherever the tile's maximum is within 2^REACH
of it: almost always, so that almost no tile needs scaling.

The selected token's logit comes from a float32 dot product ahead of the sweep. The tiles leave that token out; it joins
at the merge. Where it has nearly all of the probability, 1 - p is then a sum of small things and no difference of large
ones: neither its logprob nor its gradient loses digits.

`jit.head` launches them, with FUSION off, and multiply-adds are written as such: whether a tile is stored, or an
entropy summed beside it, does not change a bit of the logprob.

Shape suffixes: M rows (tokens) and N columns (vocabulary) of a tile, K its slice of the hidden size, T tiles of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xdkernels.jit.fold import LOG2_E, LOWEST, fold_sum
from xdkernels.jit.tanh import tanh

LN_2 = tl.constexpr(0.6931471805599453)
#: a tile takes the row's reference when its own is no further from it than this: 2^64 times 2^18 columns is far from
#: the end of float32 and bfloat16, and what 2^-64 of the selected token's weight adds to a sum is below its rounding
REACH = tl.constexpr(64.0)


@triton.jit
def _place(tile, row_blocks, column_blocks, GROUP_M: tl.constexpr):
    """Row block and column block of a tile: GROUP_M row blocks go down a column block before the next one begins."""
    per_group = GROUP_M * column_blocks
    first = tile // per_group * GROUP_M
    height = tl.minimum(row_blocks - first, GROUP_M)
    within = tile % per_group
    return first + within % height, within // height


@triton.jit
def _product(hidden, weight, row, column, H, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """hidden[row:, :] @ weight[column:, :].T of one tile, float32; what lies beyond either is zero."""
    acc_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, H, BLOCK_K):
        acc_MN = tl.dot(hidden.load([row, k]), weight.load([column, k]).T, acc_MN)
    return acc_MN


@triton.jit
def _finish_logits(
    acc_MN, columns_N, bias, vocab, softcap, temperature,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    """The logits from the products, and d capped / d uncapped, which is 1 where nothing caps."""
    slope_MN = 1.0
    if HAS_BIAS:
        acc_MN += tl.load(bias + columns_N, mask=columns_N < vocab, other=0.0).to(tl.float32)[None, :]
    if SOFTCAP:
        bent_MN = tanh(acc_MN / softcap)
        acc_MN = softcap * bent_MN
        slope_MN = tl.fma(-bent_MN, bent_MN, 1.0)
    if TEMPERED:
        acc_MN = acc_MN / temperature
    return acc_MN, slope_MN


@triton.jit
def selected_kernel(
    hidden, weight, bias, ids, selected, reference, hidden_stride, weight_stride, vocab, H, softcap, temperature,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The selected token's logit, by a float32 dot product; and in units of log 2, rounded up: the row's reference.

    The logit of a token outside the vocabulary is -inf.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids + row).to(tl.int64)
    known = (token >= 0) & (token < vocab)
    token = tl.where(known, token, 0)
    lanes = tl.arange(0, BLOCK)
    products = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, H, BLOCK):
        inside = k + lanes < H
        h = tl.load(hidden + row * hidden_stride + k + lanes, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + token * weight_stride + k + lanes, mask=inside, other=0.0).to(tl.float32)
        products = tl.fma(h, w, products)
    x = tl.sum(fold_sum(products[None, :], 1, BLOCK), axis=0)
    if HAS_BIAS:
        x += tl.load(bias + token).to(tl.float32)
    if SOFTCAP:
        x = softcap * tanh(x / softcap)
    if TEMPERED:
        x = x / temperature
    x = tl.where(known, x, float("-inf"))
    tl.store(selected + row, x)
    x = tl.ceil(x * LOG2_E)
    tl.store(reference + row, tl.where(tl.abs(x) < 1e30, x, 0.0))  # NaN and infinity are no reference


@triton.jit(do_not_specialize=["N", "row_blocks", "programs"])
def head_kernel(
    hidden, weight, exponentials, bias, ids, reference, references, totals, weighted,
    N, vocab, H, row_blocks, column_blocks, programs, softcap, temperature,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr, ENTROPY: tl.constexpr, STORE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Tiles of the head, each reduced to a row's (reference, sum 2^(x - r), sum 2^(x - r) (x - r)), at [tile, row].

    The selected token is left out, as padding is. STORE: also 2^(x - r) times the softcap's slope.
    """
    for tile in range(tl.program_id(0), row_blocks * column_blocks, programs):
        row_block, column_block = _place(tile, row_blocks, column_blocks, GROUP_M)
        row = row_block * BLOCK_M
        column = column_block * BLOCK_N
        acc_MN = _product(hidden, weight, row, column, H, BLOCK_M, BLOCK_N, BLOCK_K)

        rows_M = row + tl.arange(0, BLOCK_M)
        columns_N = column + tl.arange(0, BLOCK_N)
        live_M = rows_M < N
        x_MN, slope_MN = _finish_logits(
            acc_MN, columns_N, bias, vocab, softcap, temperature, HAS_BIAS, SOFTCAP, TEMPERED
        )
        token_M = tl.load(ids + rows_M, mask=live_M, other=-1).to(tl.int64)
        token_M = tl.where((token_M >= 0) & (token_M < vocab), token_M, -1).to(tl.int32)
        counts_MN = (columns_N[None, :] < vocab) & (columns_N[None, :] != token_M[:, None])
        x_MN = tl.where(counts_MN, x_MN, float("-inf"))
        reference_M = tl.load(reference + rows_M, mask=live_M, other=0.0)
        top_M = tl.ceil(tl.max(x_MN, axis=1) * LOG2_E)
        own_M = (tl.abs(top_M - reference_M) > REACH) & (top_M > LOWEST)
        reference_M = tl.where(own_M, top_M, reference_M)
        shifted_MN = tl.fma(x_MN, LOG2_E, -reference_M[:, None])
        e_MN = tl.exp2(shifted_MN)
        at = column_block.to(tl.int64) * N + rows_M
        tl.store(references + at, reference_M, mask=live_M)
        tl.store(totals + at, fold_sum(e_MN, BLOCK_M, BLOCK_N), mask=live_M)
        if ENTROPY:
            # 2^-256 is 0, and so is its product, where that of -inf would be NaN; what is NaN stays
            bounded_MN = tl.maximum(shifted_MN, -256.0, propagate_nan=tl.PropagateNan.ALL)
            tl.store(weighted + at, fold_sum(e_MN * bounded_MN, BLOCK_M, BLOCK_N), mask=live_M)
        if STORE:
            exponentials.store([row, column], (e_MN * slope_MN).to(tl.bfloat16))


@triton.jit
def _log1p(x):
    """log(1 + x) for x >= 0: the logarithm of what 1 + x was rounded to, corrected for the rounding."""
    above = 1.0 + x
    return tl.where(above == 1.0, x, tl.log(above) * (x / (above - 1.0)))


@triton.jit(do_not_specialize=["N"])
def merge_kernel(
    reference, references, totals, weighted, selected, logprobs, logsumexp, entropies,
    row_reference, row_total, row_rest, N, tiles,
    ENTROPY: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """A row's tiles in one, folded by their index, and the selected token with them.

    row_total: sum of 2^(x - row_reference); row_rest: the same without the selected token.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, PADDED)
    live = rows < N
    mask = live[:, None] & (lanes < tiles)[None, :]
    at = lanes.to(tl.int64)[None, :] * N + rows[:, None]
    own = tl.load(references + at, mask=mask, other=LOWEST)
    # the selected token's own reference too: its tile may have left it
    top = tl.maximum(tl.max(own, axis=1), tl.load(reference + rows, mask=live, other=0.0))
    x = tl.fma(tl.load(selected + rows, mask=live, other=0.0), LOG2_E, -top)  # from here on against the reference
    shift = own - top[:, None]
    scale = tl.exp2(shift)  # a power of two: exact
    tile_totals = tl.load(totals + at, mask=mask, other=0.0)
    rest = fold_sum(scale * tile_totals, ROWS, PADDED)
    of_selected = tl.exp2(x)
    total = rest + of_selected
    log2_total = tl.log2(total)
    # a likely token's logprob is as exact as what is left to the others; an unlikely one's as its logit
    logprob = tl.where(of_selected > rest, -_log1p(rest / of_selected), (x - log2_total) * LN_2)
    tl.store(logprobs + rows, logprob, mask=live)
    tl.store(logsumexp + rows, (top + log2_total) * LN_2, mask=live)
    tl.store(row_reference + rows, top, mask=live)
    tl.store(row_total + rows, total, mask=live)
    tl.store(row_rest + rows, rest, mask=live)
    if ENTROPY:
        moved = tl.load(weighted + at, mask=mask, other=0.0)
        moved += tl.where(scale == 0.0, 0.0, shift * tile_totals)
        weight = fold_sum(scale * moved, ROWS, PADDED)
        weight += tl.where(of_selected == 0.0, 0.0, of_selected * x)
        tl.store(entropies + rows, (log2_total - weight / total) * LN_2, mask=live)


@triton.jit(do_not_specialize=["N"])
def rescale_kernel(
    exponentials, references, row_reference, N, tiles, stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Tiles whose reference is not the row's are scaled to it, by a power of two; the others are not touched.

    A program looks at the references of BLOCK_M rows in STRIP tiles at once, and goes through the tiles only when one
    of them was left behind.
    """
    rows_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * STRIP
    strip_S = first + tl.arange(0, STRIP)
    live_M = rows_M < N
    row_M = tl.load(row_reference + rows_M, mask=live_M, other=0.0)
    mask_SM = (strip_S < tiles)[:, None] & live_M[None, :]
    own_SM = tl.load(references + strip_S.to(tl.int64)[:, None] * N + rows_M[None, :], mask=mask_SM, other=0.0)
    if tl.max((mask_SM & (own_SM != row_M[None, :])).to(tl.int32)) > 0:
        for tile in range(first, tl.minimum(first + STRIP, tiles)):
            shift_M = tl.load(references + tl.cast(tile, tl.int64) * N + rows_M, mask=live_M, other=0.0) - row_M
            moved_M = live_M & (shift_M != 0.0)
            if tl.max(moved_M.to(tl.int32)) > 0:
                columns_N = tile * BLOCK_N + tl.arange(0, BLOCK_N)
                at = exponentials + rows_M.to(tl.int64)[:, None] * stride + columns_N[None, :]
                e_MN = tl.load(at, mask=moved_M[:, None], other=0.0).to(tl.float32)
                scaled_MN = e_MN * tl.exp2(shift_M)[:, None]  # at most 1: the row's reference is the greatest
                tl.store(at, scaled_MN.to(tl.bfloat16), mask=moved_M[:, None])


@triton.jit(do_not_specialize=["size"])
def scale_rows_kernel(matrix, factor, out, size, width, BLOCK: tl.constexpr):
    """out = factor * matrix, a factor a row, both [N, width] in one piece; the product is float32, rounded once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(matrix + at, mask=mask, other=0.0).to(tl.float32) * tl.load(factor + at // width, mask=mask, other=0.0)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def direction_kernel(
    sums, weight, ids, selected, row_total, row_rest, direction, width, H, weight_stride, vocab, softcap, temperature,
    SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """d logprob / d hidden of a row: (rest / total weight[id] slope[id] - sums / total) / temperature.

    width: of the direction, which does not have the columns that fill H up.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids + row).to(tl.int64)
    token = tl.where((token >= 0) & (token < vocab), token, 0)  # of such a row the logprob is -inf already
    total = tl.load(row_total + row)
    missing = tl.load(row_rest + row) / total
    if SOFTCAP:
        capped = tl.load(selected + row)
        if TEMPERED:
            capped = capped * temperature
        bent = capped / softcap
        missing = missing * (1.0 - bent * bent)
    for k in range(0, width, BLOCK):
        lanes = k + tl.arange(0, BLOCK)
        inside = lanes < width
        w = tl.load(weight + token * weight_stride + lanes, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sums + row * H + lanes, mask=inside, other=0.0)
        d = w * missing - s / total
        if TEMPERED:
            d = d / temperature
        tl.store(direction + row * width + lanes, d.to(direction.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "row_blocks", "programs"])
def logit_gradient_kernel(
    hidden, weight, gradients, bias, ids, missing, logsumexp, entropy, upstream, entropy_upstream,
    N, first_column, vocab, H, row_blocks, column_blocks, programs, softcap, temperature,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr, ENTROPY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """The head once more over a slice of the vocabulary, now that the log-sum-exp is known: d loss / d product."""
    for tile in range(tl.program_id(0), row_blocks * column_blocks, programs):
        row_block, column_block = _place(tile, row_blocks, column_blocks, GROUP_M)
        row = row_block * BLOCK_M
        column = column_block * BLOCK_N
        acc_MN = _product(hidden, weight, row, column, H, BLOCK_M, BLOCK_N, BLOCK_K)

        rows_M = row + tl.arange(0, BLOCK_M)
        columns_N = first_column + column + tl.arange(0, BLOCK_N)
        live_M = rows_M < N
        x_MN, slope_MN = _finish_logits(
            acc_MN, columns_N, bias, vocab, softcap, temperature, HAS_BIAS, SOFTCAP, TEMPERED
        )
        token_M = tl.load(ids + rows_M, mask=live_M, other=-1)
        logsumexp_M = tl.load(logsumexp + rows_M, mask=live_M, other=0.0)
        upstream_M = tl.load(upstream + rows_M, mask=live_M, other=0.0)
        log_p_MN = x_MN - logsumexp_M[:, None]
        p_MN = tl.exp(log_p_MN)
        hit_MN = columns_N[None, :] == token_M[:, None]
        missing_M = tl.load(missing + rows_M, mask=live_M, other=0.0)
        gradient_MN = upstream_M[:, None] * tl.where(hit_MN, missing_M[:, None], -p_MN)
        if ENTROPY:
            # d entropy / d x_v = -p_v (log p_v + entropy)
            entropy_M = tl.load(entropy + rows_M, mask=live_M, other=0.0)
            pull_M = tl.load(entropy_upstream + rows_M, mask=live_M, other=0.0)
            surprise_MN = tl.where(p_MN == 0.0, 0.0, p_MN * (log_p_MN + entropy_M[:, None]))
            gradient_MN -= pull_M[:, None] * surprise_MN
        gradient_MN = gradient_MN * slope_MN
        if TEMPERED:
            gradient_MN = gradient_MN / temperature
        gradient_MN = tl.where(columns_N[None, :] < vocab, gradient_MN, 0.0)
        gradients.store([row, column], gradient_MN.to(tl.bfloat16))
