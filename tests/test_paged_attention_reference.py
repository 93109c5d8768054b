"""The plain-torch twin of paged decode attention against float64, and what every call refuses."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from attention_fixtures import excess, paged  # noqa: E402
from xdkernels.paged_attention import paged_decode_attention  # noqa: E402
from xdkernels.reference.attention import paged_decode_attention as twin  # noqa: E402

LENGTHS = [1, 15, 16, 17, 63, 130, 700]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (8, 1)])
def test_matches_float64(dtype, head_dim, heads, kv_heads):
    case = paged(LENGTHS, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    out = paged_decode_attention(*case)
    assert out.dtype == dtype and out.shape == case.q.shape
    assert excess(out, case) <= 1
    assert torch.equal(out, twin(*case))


@pytest.mark.parametrize(
    "options",
    [{"window": 1}, {"window": 100}, {"softcap": 2.0}, {"scale": 0.3}, {"scale": 0.3, "softcap": 5.0, "window": 70}],
)
def test_options_match_float64(options):
    case = paged(LENGTHS, dtype=torch.float32)
    out = paged_decode_attention(*case, **options)
    assert excess(out, case, **options) <= 1
    assert excess(out, case) > 1


def test_one_key_fewer_is_another_answer():
    """Negative control of the comparisons above."""
    case = paged([40])
    assert excess(paged_decode_attention(*case, window=39), case) > 1


def test_bits_do_not_depend_on_company():
    case = paged(LENGTHS, dtype=torch.float32)
    out = paged_decode_attention(*case)
    order = [4, 0, 6, 2, 5, 1, 3]
    assert torch.equal(paged_decode_attention(*case.rows(order)), out[order])
    for row in range(len(LENGTHS)):
        assert torch.equal(paged_decode_attention(*case.rows([row])), out[row : row + 1])


def test_no_sequences():
    assert paged_decode_attention(*paged([5]).rows([])).shape == (0, 4, 64)


def case() -> dict:
    """Arguments that fit, by name: B = 2, M = 5, 7 blocks."""
    fits = paged([5, 40])
    return {name: getattr(fits, name) for name in ("q", "k_cache", "v_cache", "block_tables", "context_lens")}


def changed(name: str, place: tuple[int, ...], value: int) -> dict:
    """One entry of an integer argument set to something else."""
    tensor = case()[name].clone()
    tensor[place] = value
    return {name: tensor}


def caches(**options) -> dict:
    """Both caches of the same sequences, made otherwise."""
    other = paged([5, 40], **options)
    return {"k_cache": other.k_cache, "v_cache": other.v_cache}


REFUSED = {
    "q of two dimensions": (lambda: {"q": case()["q"][0]}, "do not fit"),
    "caches that differ": (lambda: {"v_cache": case()["v_cache"][:-1]}, "do not fit"),
    "another head dimension in the cache": (lambda: caches(head_dim=96), "do not fit"),
    "a table of another batch": (lambda: {"block_tables": case()["block_tables"][:1]}, "B = 2"),
    "lengths of another batch": (lambda: {"context_lens": case()["context_lens"][:1]}, "B = 2"),
    "lengths of two dimensions": (lambda: {"context_lens": case()["context_lens"][:, None]}, "B = 2"),
    "a table without columns": (lambda: {"block_tables": case()["block_tables"][:, :0]}, "no blocks"),
    "a cache without blocks": (
        lambda: {"k_cache": case()["k_cache"][:0], "v_cache": case()["v_cache"][:0]},
        "no blocks",
    ),
    "mixed devices": (lambda: {"q": case()["q"].to("meta")}, "several devices: q on meta, k_cache on cpu"),
    "mixed dtypes": (lambda: {"q": case()["q"].float()}, "share one dtype"),
    "float64": (lambda: {k: v.double() for k, v in case().items() if v.is_floating_point()}, "share one dtype"),
    "int64 lengths": (lambda: {"context_lens": case()["context_lens"].long()}, "int32"),
    "int64 tables": (lambda: {"block_tables": case()["block_tables"].long()}, "int32"),
    "a head dimension of 80": (lambda: {"q": torch.zeros(2, 4, 80, dtype=torch.bfloat16), **caches(head_dim=80)}, "80"),
    "three query heads over two": (lambda: {"q": case()["q"][:, :3]}, "multiple of key-value heads: 3, 2"),
    "no query heads": (lambda: {"q": case()["q"][:, :0]}, "multiple of key-value heads: 0, 2"),
    "pages of 24": (lambda: {**caches(page=24), "split_tokens": 192}, "power of two: 24"),
    "a cache with a last stride of two": (
        lambda: {"k_cache": case()["k_cache"].repeat_interleave(2, dim=-1)[..., ::2]},
        "last stride",
    ),
    "a split that cuts a page": (lambda: {**caches(page=128), "split_tokens": 64}, "of the page, 128"),
    "a split that cuts a tile": (lambda: {"split_tokens": 96}, "of the tile, 64"),
    "a split of nothing": (lambda: {"split_tokens": 0}, "split_tokens"),
    "a softcap of zero": (lambda: {"softcap": 0.0}, "softcap must be positive"),
    "a softcap of NaN": (lambda: {"softcap": float("nan")}, "softcap must be positive"),
    "an infinite softcap": (lambda: {"softcap": float("inf")}, "softcap must be positive and finite"),
    "a scale of NaN": (lambda: {"scale": float("nan")}, "scale must be finite"),
    "a window of zero": (lambda: {"window": 0}, "window must be positive"),
    "a length of zero": (lambda: changed("context_lens", (1,), 0), "within 1 and 80.*: 0 at sequence 1"),
    "a negative length": (lambda: changed("context_lens", (0,), -1), "within 1 and 80.*: -1 at sequence 0"),
    "a length beyond its table": (lambda: changed("context_lens", (1,), 81), "within 1 and 80.*: 81 at sequence 1"),
    "a length beyond every integer": (lambda: changed("context_lens", (1,), 2**31 - 1), "within 1 and 80"),
    "a block beyond the cache": (lambda: changed("block_tables", (1, 2), 7), "0 and 6.*: 7 at sequence 1, entry 2"),
    "a negative block": (lambda: changed("block_tables", (0, 0), -1), "0 and 6.*: -1 at sequence 0, entry 0"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_bad_input_is_refused(change):
    arguments, message = REFUSED[change]
    with pytest.raises(ValueError, match=message):
        paged_decode_attention(**{**case(), **arguments()})


def test_what_the_refusals_start_from_is_accepted():
    assert torch.isfinite(paged_decode_attention(**case())).all()
    assert torch.isfinite(paged_decode_attention(**{**case(), **changed("block_tables", (1, 3), 7)})).all()
    assert torch.isfinite(paged_decode_attention(**{**case(), **changed("block_tables", (1, 0), -1)}, window=20)).all()
