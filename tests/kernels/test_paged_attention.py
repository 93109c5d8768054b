"""Paged decode attention: against float64, and the same bits in whatever company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_fixtures import Paged, excess, paged
from xdkernels.jit.paged_attention import MERGE_BLOCK, launch
from xdkernels.jit.paged_items import FIND_BLOCK
from xdkernels.paged_attention import TILINGS, paged_decode_attention

SPLIT = 64
#: around the edges of pages, tiles and splits; none shares a block with another
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 130, 257]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, of finite values."""
    return bool(torch.isfinite(a).all()) and torch.equal(a, b)


def attend(case: Paged, split_tokens: int = SPLIT, **options) -> torch.Tensor:
    return paged_decode_attention(*case, split_tokens=split_tokens, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 64), (8, 2, 64), (8, 1, 96), (7, 1, 64)])
def test_matches_float64(device, dtype, heads, kv_heads, head_dim):
    case = paged(LENGTHS, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device)
    out = attend(case)
    assert out.dtype == dtype and out.shape == case.q.shape
    assert excess(out, case) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_large_heads_match_float64(device, dtype, head_dim):
    case = paged([5, 70, 129], head_dim=head_dim, dtype=dtype, device=device)
    assert excess(attend(case), case) <= 1


@pytest.mark.parametrize("page", [1, 8, 32, 64])
def test_pages_match_float64(device, page):
    case = paged([3, 64, 100], page=page, device=device)
    assert excess(attend(case), case) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 20},
        {"window": 64},
        {"window": 10**6},
        {"softcap": 2.0},
        {"softcap": 50.0},
        {"softcap": 1000.0},
        {"scale": 0.3},
        {"scale": 0.3, "softcap": 5.0, "window": 70},
    ],
)
def test_options_match_float64(device, dtype, options):
    case = paged([1, 64, 65, 150, 257], dtype=dtype, device=device)
    assert excess(attend(case, **options), case, **options) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_key_fewer_is_another_answer(device, dtype):
    """Negative control of the comparisons above."""
    case = paged([40], dtype=dtype, device=device)
    assert excess(attend(case, window=39), case) > 1


def test_more_splits_than_the_merge_takes_at_a_time(device):
    case = paged([SPLIT * (2 * MERGE_BLOCK + 1) + 5, SPLIT * MERGE_BLOCK], heads=2, kv_heads=1, device=device)
    assert excess(attend(case), case) <= 1


@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_logits_far_from_zero(device, shift):
    """Maxima start low enough, and no exponential overflows."""
    case = paged([1, 100, 200], dtype=torch.float32, device=device)
    direction = torch.zeros_like(case.q)
    direction[..., 0] = 8.0
    k_cache = case.k_cache.clone()
    k_cache[..., 0] = torch.where(k_cache[..., 0].isnan(), k_cache[..., 0], shift)
    case = replace(case, q=direction, k_cache=k_cache)  # every logit is 8 shift / 8
    wanted = torch.stack([case.tokens(row)[1].double().mean(0) for row in range(3)])
    assert excess(attend(case), case) <= 1
    assert torch.allclose(attend(case).double(), wanted.repeat_interleave(2, dim=1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_do_not_depend_on_company(device, dtype):
    case = paged([*LENGTHS, 600], kv_heads=1, dtype=dtype, device=device)  # the last: a neighbour of many splits
    out = attend(case)
    order = [4, 9, 0, 8, 2, 7, 1, 6, 3, 5]
    assert same(attend(case.rows(order)), out[order])
    for row in range(len(LENGTHS)):
        assert same(attend(case.rows(slice(row, row + 1))), out[row : row + 1])  # views: they begin anywhere
    assert same(attend(case.rows([7])), out[7:8])
    assert same(attend(case.rows(slice(3, 8))), out[3:8])
    assert same(attend(case.rows([3] * 17)), out[[3] * 17])


def test_bits_do_not_depend_on_company_with_window_and_softcap(device):
    case = paged([*LENGTHS, 600], kv_heads=1, device=device)
    options = {"window": 100, "softcap": 20.0}
    out = attend(case, **options)
    for row in range(len(out)):
        assert same(attend(case.rows([row]), **options), out[row : row + 1])


@pytest.mark.parametrize("window", [None, 70])
def test_more_sequences_than_a_program_looks_at_together(device, window):
    case = paged([1, 64, 65, 257], heads=2, kv_heads=1, dtype=torch.float32, device=device)
    out = attend(case, window=window)
    rows = [row % 4 for row in range(FIND_BLOCK + 3)]
    assert same(attend(case.rows(rows), window=window), out[rows])
    assert not torch.equal(out[0], out[1])  # negative control: a row in another's place would show


def test_another_split_is_another_order(device):
    """Negative control of the equalities above: they see the order of sums."""
    case = paged([257], dtype=torch.float32, device=device)
    assert not torch.equal(attend(case, SPLIT), attend(case, 2 * SPLIT))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_do_not_depend_on_where_blocks_lie(device, dtype):
    case = paged(LENGTHS, kv_heads=1, dtype=dtype, device=device)
    out = attend(case)
    blocks = len(case.k_cache)
    moved = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).to(device)
    k_cache, v_cache = torch.empty_like(case.k_cache), torch.empty_like(case.v_cache)
    k_cache[moved], v_cache[moved] = case.k_cache, case.v_cache
    used = (case.block_tables >= 0) & (case.block_tables < blocks)
    tables = torch.where(used, moved[case.block_tables.clamp(0, blocks - 1)].int(), case.block_tables)
    assert same(attend(replace(case, k_cache=k_cache, v_cache=v_cache, block_tables=tables)), out)
    assert not torch.equal(attend(replace(case, v_cache=v_cache, block_tables=tables), check=False), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_do_not_depend_on_strides(device, dtype):
    case = paged(LENGTHS, kv_heads=1, dtype=dtype, device=device)
    out = attend(case)
    both = torch.stack([case.k_cache, case.v_cache], dim=2)  # [blocks, page, 2, Hkv, D]
    assert same(attend(replace(case, k_cache=both[:, :, 0], v_cache=both[:, :, 1])), out)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (case.k_cache, case.v_cache)]
    assert same(attend(replace(case, k_cache=heads_first[0], v_cache=heads_first[1])), out)
    odd = [torch.nn.functional.pad(t, (1, 2))[..., 1:-2] for t in (case.k_cache, case.v_cache)]  # no 16-byte loads
    assert same(attend(replace(case, k_cache=odd[0], v_cache=odd[1])), out)
    wide = torch.nn.functional.pad(case.q, (1, 0))[..., 1:]
    tables = case.block_tables.mT.contiguous().mT
    assert same(attend(replace(case, q=wide, block_tables=tables, context_lens=case.context_lens.repeat(2)[:9])), out)
    assert same(attend(replace(case, block_tables=torch.nn.functional.pad(case.block_tables, (0, 37), value=-1))), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_do_not_depend_on_how_programs_share_the_work(device, dtype):
    case = paged(LENGTHS, kv_heads=1, dtype=dtype, device=device)
    tiling = TILINGS[dtype.itemsize, 64]
    options = {"split_tokens": SPLIT, "scale": 0.125, "softcap": None, "window": None}
    out = launch(*case, **options, tiling=tiling)
    assert same(attend(case), out)
    for change in ({"programs_per_sm": 1}, {"programs_per_sm": 7}, {"programs_per_sm": 10**4}, {"num_stages": 1}):
        assert same(launch(*case, **options, tiling=tiling._replace(**change)), out)
    if dtype == torch.float32:  # negative control; in 16 bits, the output's rounding may hide another order
        assert not torch.equal(launch(*case, **options, tiling=tiling._replace(block_n=16)), out)


def test_what_is_in_use_is_read(device):
    """Slots and entries not in use hold NaN and nonsense in every test here; a NaN in use does show."""
    case = paged([40, 40], device=device)
    k_cache = case.k_cache.clone()
    k_cache[case.block_tables[0, 2].long(), 7] = float("nan")  # token 39, the last
    out = attend(replace(case, k_cache=k_cache))
    assert out[0].isnan().all()
    assert torch.equal(out[1], attend(case)[1])


def test_before_the_window_nothing_is_read(device):
    """Blocks that have left the window may be given away: their entries may say anything."""
    case = paged([150], device=device)
    wanted = attend(case, window=40)  # tokens 110 to 149: from block 6 on
    tables, k_cache, v_cache = case.block_tables.clone(), case.k_cache.clone(), case.v_cache.clone()
    block = tables[0, 6].long()
    k_cache[block, : 110 % 16], v_cache[block, : 110 % 16] = float("nan"), float("nan")
    tables[0, :6] = 2**30
    assert same(attend(replace(case, k_cache=k_cache, v_cache=v_cache, block_tables=tables), window=40), wanted)
    with pytest.raises(ValueError, match=r"block_tables must be within 0 and 12 where in use: 1073741824 at .* 5$"):
        attend(replace(case, block_tables=tables), window=55)


def test_offsets_beyond_31_bits(device):
    """Blocks so far apart that their offsets pass 2**31 elements. The pages between are never touched."""
    case = paged([40, 20], kv_heads=1, heads=2, device=device, spare_blocks=3)
    assert len(case.k_cache) == 8
    apart = 2**31 // 7 // 16 * 16 + 16
    storage = torch.empty(7 * apart + 4 * 16 * 64, dtype=torch.bfloat16, device=device)
    k_cache, v_cache = (storage.as_strided((8, 16, 1, 64), (apart, 64, 64, 1), first) for first in (0, 2 * 16 * 64))
    k_cache.copy_(case.k_cache)
    v_cache.copy_(case.v_cache)
    assert 7 in case.block_tables and 7 * apart > 2**31
    assert same(attend(replace(case, k_cache=k_cache, v_cache=v_cache)), attend(case))


def test_positions_beyond_65536(device):
    """All of a long context on a GPU, its last tokens under the interpreter."""
    window = 200 if device == "cpu" else None
    case = paged([70_001, 65_536], heads=2, kv_heads=1, device=device)
    out = attend(case, 512, window=window)
    assert excess(out, case, window=window) <= 1
    assert same(attend(case.rows([1]), 512, window=window), out[1:])


def test_without_checks_the_same(device):
    case = paged(LENGTHS, device=device)
    assert same(attend(case, check=False), attend(case))


def test_no_sequences(device):
    case = paged([5], device=device).rows([])
    assert attend(case).shape == (0, 4, 64)


def test_bad_data_is_refused_before_launch(device):
    case = paged([5, 40], device=device)
    tables = case.block_tables.clone()
    tables[1, 2] = len(case.k_cache)
    with pytest.raises(ValueError, match=r"block_tables must be within 0 and 6 where in use: 7 at sequence 1, entry 2"):
        attend(replace(case, block_tables=tables))
    with pytest.raises(ValueError, match=r"context_lens must be within 1 and 80"):
        attend(replace(case, context_lens=case.context_lens - 5))
