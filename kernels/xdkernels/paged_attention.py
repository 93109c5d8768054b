"""Attention of one query a sequence over a paged key-value cache, in bits that no neighbour can change."""

from __future__ import annotations

from typing import NamedTuple

import torch

from xdkernels.arguments import require_float32, require_integer, require_one_device
from xdkernels.dispatch import use_kernels

HEAD_DIMS = (64, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tiling(NamedTuple):
    """How a split is walked. `block_n` is part of the arithmetic; the others decide speed alone."""

    #: keys of a tile: K and V of so many tokens move together
    block_n: int
    num_warps: int
    #: depth of the software pipeline: up to num_stages - 1 tiles are in flight
    num_stages: int
    #: programs a multiprocessor, at most; each strides over the splits. Many more than fit side by side even out what
    #: multiprocessors take in, and each one that finds nothing left costs a microsecond of its place
    programs_per_sm: int
    #: registers a thread, so that one more program fits; none: what the compiler takes
    max_registers: int | None = None


#: by bytes an element and head dimension. Tiles of K and V take 2 * block_n * D * bytes of shared memory a stage in
#: flight (16 KiB at D = 128); several programs a multiprocessor cover each other's waits, and 32 keys leave registers
#: for five of them where 64 leave them for two (docs/kernels.md). Five need 96 a thread, of which the compiler takes
#: some more if let: what it then keeps in memory is used once a split, not once a tile
TILINGS = {
    (2, 64): Tiling(block_n=64, num_warps=4, num_stages=4, programs_per_sm=32),
    (2, 96): Tiling(block_n=32, num_warps=4, num_stages=3, programs_per_sm=32),
    (2, 128): Tiling(block_n=32, num_warps=4, num_stages=3, programs_per_sm=48),
    (2, 256): Tiling(block_n=32, num_warps=4, num_stages=3, programs_per_sm=32),
    (4, 64): Tiling(block_n=32, num_warps=4, num_stages=3, programs_per_sm=32),
    (4, 96): Tiling(block_n=32, num_warps=4, num_stages=3, programs_per_sm=32),
    (4, 128): Tiling(block_n=32, num_warps=4, num_stages=3, programs_per_sm=32),
    (4, 256): Tiling(block_n=16, num_warps=4, num_stages=3, programs_per_sm=32),
}


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    split_tokens: int = 512,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    check: bool = True,
) -> torch.Tensor:
    """Each sequence's last token attends to the tokens of its sequence, through a block table.

    q: [B, Hq, D], bfloat16, float16 or float32, D one of 64, 96, 128, 256. k_cache, v_cache: q's dtype,
    [blocks, page, Hkv, D], any strides with a last one of 1 (multiples of 16 elements load 16 bytes at a time), page a
    power of two, Hq a multiple of Hkv. block_tables: int32 [B, M]; token t of a sequence lies in block
    block_tables[b, t // page], slot t % page. context_lens: int32 [B], tokens L of each sequence, the query's own
    included, which is the last. split_tokens: keys of a split, a multiple of page and of the tile (`TILINGS`).
    scale: of the logits, D**-0.5 if none. softcap: c, for c * tanh(scale * q.k / c). window: attend to the last so many
    tokens only. check: look at lengths and table entries, too, which waits for the device; without, the caller vouches
    for them, and the call can be captured into a graph. Work space follows M: slice the table to the columns in use.

    Returns q's dtype [B, Hq, D]: softmax over the keys, times V. Logits, exponentials, sums and outputs are float32,
    products accumulate in float32; float32 operands are multiplied as such, not as TF32. As in flash attention, the
    probabilities exp(x - m) of the second product are rounded to the cache's dtype, the sum that divides is not: each
    term is off by up to 2**-9 of itself in bfloat16 (2**-12 in float16, and more where it is below 2**-14 of the
    greatest), rounded independently, which is less than what rounding the output costs. Not differentiable.

    Bits: the keys are cut at multiples of split_tokens from the first token on, so that a row's splits are a function
    of its L and of window alone; within a split, and over the splits, the order of every sum is fixed. A row's result
    depends on its own query, keys and values, split_tokens and the tile: not on B, its neighbours, its place in
    the batch, or where its blocks lie. (Split-KV decoding: "Flash-Decoding for long-context inference", Dao et al.,
    2023; block tables: arXiv:2309.06180.)

    ValueError, before any launch: shapes, dtypes, devices or sizes that do not fit; under check, a length of 0 or less
    or beyond its table, or a block outside the cache among those in use. Other table entries are not looked at, and
    slots beyond L or before the window are never read. Without a GPU (and outside Triton's interpreter) the plain-torch
    twin `reference.paged_decode_attention` answers.
    """
    scale = _check_arguments(q, k_cache, v_cache, block_tables, context_lens, split_tokens, scale, softcap, window)
    if check:
        _check_lengths(context_lens, block_tables, k_cache)
        _check_blocks(context_lens, block_tables, k_cache, window)
    if use_kernels(q):
        from xdkernels.jit.paged_attention import launch

        tiling = TILINGS[q.element_size(), q.shape[2]]
        options = {"split_tokens": split_tokens, "tiling": tiling}
    else:
        from xdkernels.reference.attention import paged_decode_attention as launch

        options = {}
    return launch(
        q, k_cache, v_cache, block_tables, context_lens, scale=scale, softcap=softcap, window=window, **options
    )


def _check_arguments(q, k_cache, v_cache, block_tables, context_lens, split_tokens, scale, softcap, window) -> float:
    """What can be told without looking at data; the scale."""
    if q.ndim != 3 or k_cache.ndim != 4 or k_cache.shape != v_cache.shape or q.shape[2] != k_cache.shape[3]:
        raise ValueError(
            "q [B, Hq, D] and k_cache, v_cache [blocks, page, Hkv, D] do not fit: "
            f"{tuple(q.shape)}, {tuple(k_cache.shape)}, {tuple(v_cache.shape)}"
        )
    batch, heads, head_dim = q.shape
    _, page, kv_heads, _ = k_cache.shape
    if block_tables.ndim != 2 or context_lens.ndim != 1 or not batch == len(block_tables) == len(context_lens):
        raise ValueError(
            f"block_tables [B, M] and context_lens [B] do not fit q of B = {batch}: "
            f"{tuple(block_tables.shape)}, {tuple(context_lens.shape)}"
        )
    if batch and not (block_tables.shape[1] and k_cache.shape[0]):
        raise ValueError(f"no blocks: block_tables {tuple(block_tables.shape)}, k_cache {tuple(k_cache.shape)}")
    require_one_device(q=q, k_cache=k_cache, v_cache=v_cache, block_tables=block_tables, context_lens=context_lens)
    if q.dtype not in DTYPES or not q.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError(
            "q, k_cache and v_cache must share one dtype, bfloat16, float16 or float32: "
            f"{q.dtype}, {k_cache.dtype}, {v_cache.dtype}"
        )
    if not block_tables.dtype == context_lens.dtype == torch.int32:
        raise ValueError(f"block_tables and context_lens must be int32: {block_tables.dtype}, {context_lens.dtype}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head dimension must be one of {', '.join(map(str, HEAD_DIMS))}: {head_dim}")
    if not kv_heads or not heads or heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of key-value heads: {heads}, {kv_heads}")
    if page < 1 or page & (page - 1):
        raise ValueError(f"tokens of a page must be a power of two: {page}")
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError(f"the last stride of a cache must be 1: {k_cache.stride()}, {v_cache.stride()}")
    tile = TILINGS[q.element_size(), head_dim].block_n
    require_integer("split_tokens", split_tokens)
    if split_tokens % page or split_tokens % tile or split_tokens >= 2**31:
        raise ValueError(
            f"split_tokens must be a multiple of the page, {page}, and of the tile, {tile}: {split_tokens}"
        )
    if scale is not None:
        require_float32("scale", scale, positive=False)
    if softcap is not None:
        require_float32("softcap", softcap, positive=True)
    if window is not None:
        require_integer("window", window)
    return head_dim**-0.5 if scale is None else scale


def _check_lengths(context_lens: torch.Tensor, block_tables: torch.Tensor, k_cache: torch.Tensor) -> None:
    """Every length within its table."""
    room = block_tables.shape[1] * k_cache.shape[1]
    bad = (context_lens < 1) | (context_lens > room)
    if bool(bad.any()):
        sequence = int(bad.nonzero()[0])
        raise ValueError(
            f"context_lens must be within 1 and {room}, what the table has room for: "
            f"{int(context_lens[sequence])} at sequence {sequence}"
        )


def _check_blocks(
    context_lens: torch.Tensor, block_tables: torch.Tensor, k_cache: torch.Tensor, window: int | None
) -> None:
    """Every table entry in use within the cache."""
    blocks, page = k_cache.shape[:2]
    column = torch.arange(block_tables.shape[1], device=block_tables.device)
    used = column < -(-context_lens // page)[:, None]
    if window is not None:
        used &= column >= ((context_lens.to(torch.int64) - window).clamp(min=0) // page)[:, None]
    bad = used & ((block_tables < 0) | (block_tables >= blocks))
    if bool(bad.any()):
        sequence, entry = bad.nonzero()[0].tolist()
        raise ValueError(
            f"block_tables must be within 0 and {blocks - 1} where in use: "
            f"{int(block_tables[sequence, entry])} at sequence {sequence}, entry {entry}"
        )
