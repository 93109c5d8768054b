"""The selected logprob's kernels: against float64, at the edges of float32, and the same bits in whatever company."""

from __future__ import annotations

import pytest
import torch
from tolerances import ENTROPY_FLOAT32_NATS, GRADIENT_ROUNDING, LOGPROB_FLOAT32_NATS, LOGPROB_GRADIENT_FLOAT32
from xdkernels import logprob
from xdkernels.jit import logprob as kernels
from xdkernels.logprob import selected_logprob
from xdkernels.reference import logprob as reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INF, NAN = float("inf"), float("nan")
TILE = kernels.PARTIALS.lanes * kernels.PARTIALS.depth


def draw(n: int, v: int, device: str, dtype: torch.dtype = torch.float32, scale: float = 4.0, seed: int = 7):
    """Logits [n, v] and ids [n]."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, v, generator=generator) * scale).to(dtype)
    return logits.to(device), torch.randint(v, (n,), generator=generator).to(device)


def oracle(logits, ids, temperature=1.0, vocab=None):
    """Logprob and entropy in float64, differentiable; 0 log 0 is 0. The divisor is float32, as the kernels' is."""
    divisor = torch.tensor(temperature, dtype=torch.float32).item()
    logprobs = torch.log_softmax(logits[:, :vocab].double() / divisor, dim=-1)
    entropy = -(logprobs.exp() * logprobs.clamp(min=-1e9)).sum(dim=-1)
    return logprobs.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1), entropy


def greatest(a, b) -> float:
    return float((a.double() - b.double()).abs().max())


def same(a, b) -> bool:
    """Equal bits, NaN equal to NaN."""
    return torch.equal(torch.nan_to_num(a, nan=12345.0), torch.nan_to_num(b, nan=12345.0)) and a.dtype == b.dtype


def gradients(logits, ids, upstream, entropy_upstream, function=selected_logprob, **options):
    """d / d logits of a weighted sum of logprobs and entropies."""
    leaf = logits.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    logprobs, entropy = function(leaf, ids, entropy=True, **options)
    return torch.autograd.grad((logprobs * upstream + entropy * entropy_upstream).sum(), leaf)[0]


def upstreams(n: int, device: str):
    generator = torch.Generator().manual_seed(11)
    return (torch.randn(n, generator=generator).to(device) for _ in range(2))


# -- against float64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3])
def test_logprob_and_entropy_match_float64(device, dtype, temperature):
    logits, ids = draw(5, 2600, device, dtype)
    logprobs, entropy = selected_logprob(logits, ids, temperature, entropy=True)
    wanted, wanted_entropy = oracle(logits, ids, temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32 and logprobs.shape == entropy.shape == (5,)
    assert greatest(logprobs, wanted) < LOGPROB_FLOAT32_NATS
    assert greatest(entropy, wanted_entropy) < ENTROPY_FLOAT32_NATS
    assert torch.equal(selected_logprob(logits, ids, temperature), logprobs)  # asking for the entropy changes nothing
    assert greatest(logprobs, oracle(logits, ids, temperature * 1.01)[0]) > LOGPROB_FLOAT32_NATS  # negative control


@pytest.mark.parametrize("v", [1, 2, 3, 7, 31, 255, 1000, TILE - 1, TILE, TILE + 1, 2 * TILE + 300])
def test_any_width_matches_float64(device, v):
    logits, ids = draw(3, v, device)
    for block in (v, max(v // 3, 1)):
        logprobs, entropy = selected_logprob(logits, ids, entropy=True, vocab_block=block)
        wanted, wanted_entropy = oracle(logits, ids)
        assert greatest(logprobs, wanted) < LOGPROB_FLOAT32_NATS
        assert greatest(entropy, wanted_entropy) < ENTROPY_FLOAT32_NATS
    grad = gradients(logits, ids, 1.0, 1.0)
    assert greatest(grad, gradients(logits.double(), ids, 1.0, 1.0, oracle_of())) < LOGPROB_GRADIENT_FLOAT32


def oracle_of():
    def function(logits, ids, temperature=1.0, vocab=None, *, entropy):
        return oracle(logits, ids, temperature, vocab)

    return function


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"vocab": 1900}])
def test_gradient_matches_float64_autograd(device, dtype, options):
    logits, ids = draw(4, 2100, device, dtype)
    ids = ids % 1900
    upstream, entropy_upstream = upstreams(4, device)
    found = gradients(logits, ids, upstream, entropy_upstream, **options)
    wanted = gradients(logits.double(), ids, upstream.double(), entropy_upstream.double(), oracle_of(), **options)
    assert found.dtype == dtype
    allowed = LOGPROB_GRADIENT_FLOAT32 + GRADIENT_ROUNDING[str(dtype).removeprefix("torch.")] * wanted.abs()
    assert bool(((found.double() - wanted).abs() <= allowed).all())
    twin = gradients(logits, ids, upstream, entropy_upstream, reference.selected_logprob, **options)
    assert bool(((twin.double() - wanted).abs() <= 2 * allowed).all())
    flipped = gradients(logits, ids, -upstream, entropy_upstream, **options)
    assert not bool(((flipped.double() - wanted).abs() <= allowed).all())  # negative control


def test_gradient_of_either_result_alone(device):
    logits, ids = draw(3, 700, device)
    for ask in (0, 1):
        leaf, double = logits.clone().requires_grad_(), logits.double().requires_grad_()
        selected_logprob(leaf, ids, entropy=True)[ask].sum().backward()
        oracle(double, ids)[ask].sum().backward()
        assert greatest(leaf.grad, double.grad) < LOGPROB_GRADIENT_FLOAT32
    leaf = logits.clone().requires_grad_()
    selected_logprob(leaf, ids).sum().backward()
    assert greatest(leaf.grad, gradients(logits.double(), ids, 1.0, 0.0, oracle_of())) < LOGPROB_GRADIENT_FLOAT32


def test_backward_twice_over_one_graph(device):
    logits, ids = draw(3, 700, device)
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = selected_logprob(leaf, ids, entropy=True)
    loss = (logprobs * 2 + entropy).sum()
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(first, second) and bool(first.abs().max() > 0)


def test_a_second_derivative_is_refused_not_wrong(device):
    logits, ids = draw(2, 50, device)
    leaf = logits.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(selected_logprob(leaf, ids).sum(), leaf, create_graph=True)


# -- edges of float32


def test_padding_columns_do_not_count(device):
    logits, ids = draw(3, 1500, device)
    ids = ids % 1400
    padded = logits.clone()
    padded[:, 1400:] = torch.tensor([INF, NAN, 99.0, -INF], device=device).repeat(25)
    whole = selected_logprob(logits, ids, vocab=1400, entropy=True)
    found = selected_logprob(padded, ids, vocab=1400, entropy=True)
    assert all(same(a, b) for a, b in zip(found, whole, strict=True))
    wanted, wanted_entropy = oracle(logits, ids, vocab=1400)
    assert greatest(found[0], wanted) < LOGPROB_FLOAT32_NATS
    assert greatest(found[1], wanted_entropy) < ENTROPY_FLOAT32_NATS
    assert not same(selected_logprob(logits, ids), found[0])  # negative control: they would have counted
    grad = gradients(padded, ids, 1.0, 1.0, vocab=1400)
    assert bool((grad[:, 1400:] == 0).all()) and bool((grad[:, :1400] != 0).any())
    cut = gradients(logits[:, :1400].contiguous(), ids, 1.0, 1.0, vocab_block=94)
    assert greatest(grad[:, :1400], cut) < LOGPROB_GRADIENT_FLOAT32


def test_masked_columns_have_no_probability_and_no_part_in_the_entropy(device):
    logits, ids = draw(3, 1100, device)
    logits[:, ::2] = -INF
    logits[:, 200:400] = -INF  # whole blocks
    ids = torch.tensor([1, 3, 2], device=device)
    logprobs, entropy = selected_logprob(logits, ids, entropy=True, vocab_block=50)
    wanted, wanted_entropy = oracle(logits, ids)
    assert logprobs[2].item() == -INF
    assert greatest(logprobs[:2], wanted[:2]) < LOGPROB_FLOAT32_NATS
    assert greatest(entropy, wanted_entropy) < ENTROPY_FLOAT32_NATS
    for function in (selected_logprob, reference.selected_logprob):
        grad = gradients(logits[:2], ids[:2], 1.0, 3.0, function)
        assert bool((grad[:, ::2] == 0).all())
        wanted = gradients(logits[:2].double(), ids[:2], 1.0, 3.0, oracle_of())
        assert greatest(grad, wanted) < 3 * LOGPROB_GRADIENT_FLOAT32


@pytest.mark.parametrize("offset", [-1e4, -60000.0, 1e4, -1e30])
def test_logits_far_from_zero(device, offset):
    logits, ids = draw(3, 600, device)
    logits = (logits + offset).float()
    logprobs, entropy = selected_logprob(logits, ids, entropy=True)
    wanted, wanted_entropy = oracle(logits, ids)
    assert greatest(logprobs, wanted) < LOGPROB_FLOAT32_NATS
    assert greatest(entropy, wanted_entropy) < ENTROPY_FLOAT32_NATS
    grad = gradients(logits, ids, 1.0, 1.0)
    assert greatest(grad, gradients(logits.double(), ids, 1.0, 1.0, oracle_of())) < LOGPROB_GRADIENT_FLOAT32


def test_both_ends_of_float32_in_one_row(device):
    most = torch.finfo(torch.float32).max
    logits = torch.full((2, 300), -most, device=device)
    logits[0, 7] = most
    logprobs, entropy = selected_logprob(logits, torch.tensor([7, 0], device=device), entropy=True, vocab_block=100)
    assert logprobs[0].item() == 0 and entropy[0].item() == 0
    assert logprobs[1].item() == pytest.approx(-5.703782474656201, abs=LOGPROB_FLOAT32_NATS)
    assert entropy[1].item() == pytest.approx(5.703782474656201, abs=ENTROPY_FLOAT32_NATS)


def test_peaked_rows(device):
    logits, _ = draw(3, 1200, device)
    for row, gap in enumerate((20.0, 60.0, 1e4)):
        logits[row, 500 + row] = gap + float(logits[row].max())
    for ids in (torch.tensor([500, 501, 502], device=device), torch.tensor([3, 4, 5], device=device)):
        logprobs, entropy = selected_logprob(logits, ids, entropy=True)
        wanted, wanted_entropy = oracle(logits, ids)
        assert bool(((logprobs - wanted).abs() <= LOGPROB_FLOAT32_NATS + 2.0**-23 * wanted.abs()).all())
        assert greatest(entropy, wanted_entropy) < ENTROPY_FLOAT32_NATS
        wanted = gradients(logits.double(), ids, 1.0, 1.0, oracle_of())
        assert greatest(gradients(logits, ids, 1.0, 1.0), wanted) < LOGPROB_GRADIENT_FLOAT32


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("column", [0, 999, 1023, 1032])
def test_poison_stays_in_its_row(device, poison, column):
    logits, ids = draw(3, 1033, device)
    clean = selected_logprob(logits, ids, entropy=True)
    clean_grad = gradients(logits, ids, 1.0, 1.0)
    logits[1, column] = poison
    found = selected_logprob(logits, ids, entropy=True)
    grad = gradients(logits, ids, 1.0, 1.0)
    for a, b in (*zip(found, clean, strict=True), (grad, clean_grad)):
        assert bool(a[1].isnan().all())
        assert same(a[::2], b[::2]) and bool(a[::2].isfinite().all())


def test_a_row_without_any_probability_is_nan(device):
    logits, ids = draw(2, 64, device)
    logits[0] = -INF
    logprobs, entropy = selected_logprob(logits, ids, entropy=True)
    assert bool(logprobs[0].isnan()) and bool(entropy[0].isnan())
    assert bool(logprobs[1].isfinite()) and bool(entropy[1].isfinite())


def test_no_rows(device):
    logits = torch.empty(0, 5, device=device, requires_grad=True)
    logprobs, entropy = selected_logprob(logits, torch.empty(0, dtype=torch.int64, device=device), entropy=True)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert logits.grad.shape == (0, 5)


# -- the same bits


def layouts(logits):
    """The same numbers, laid out in other ways: some rows begin on no 16-byte boundary."""
    n, v = logits.shape
    wide = torch.full((n, v + 37), NAN, dtype=logits.dtype, device=logits.device)
    yield "odd row stride", wide[:, 3 : v + 3].copy_(logits)
    yield "transposed", logits.t().contiguous().t()
    spread = torch.full((n, 2 * v), NAN, dtype=logits.dtype, device=logits.device)
    yield "every second column", spread[:, ::2].copy_(logits)
    shifted = torch.full((n * v + 1,), NAN, dtype=logits.dtype, device=logits.device)
    yield "shifted by one", shifted[1:].view(n, v).copy_(logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_do_not_change_a_bit(device, dtype):
    logits, ids = draw(2, 2 * TILE + 137, device, dtype)  # an odd width: one block
    wanted = selected_logprob(logits, ids, 0.9, entropy=True)
    wanted_grad = gradients(logits, ids, 1.5, 0.5, temperature=0.9)
    for name, other in layouts(logits):
        found = selected_logprob(other, ids, 0.9, entropy=True)
        assert all(same(a, b) for a, b in zip(found, wanted, strict=True)), name
        leaf = other.detach().requires_grad_()
        logprobs, entropy = selected_logprob(leaf, ids, 0.9, entropy=True)
        (1.5 * logprobs + 0.5 * entropy).sum().backward()
        assert same(leaf.grad, wanted_grad), name
    one_row = logits[:1].expand(2, -1)  # rows that are one
    assert same(selected_logprob(one_row, ids[:1].expand(2), 0.9), wanted[0][:1].expand(2))


def test_company_does_not_change_a_bit(device):
    logits, ids = draw(5, 1187 * 2, device, torch.bfloat16)
    wanted = selected_logprob(logits, ids, entropy=True)
    wanted_grad = gradients(logits, ids, 1.0, 1.0)
    order = torch.tensor([4, 0, 2, 1, 3], device=device)
    groups = [order, order[:1], order[1:2], order[:3], order.repeat(2)]
    for rows in groups:
        found = selected_logprob(logits[rows], ids[rows], entropy=True)
        assert all(same(a, b[rows]) for a, b in zip(found, wanted, strict=True))
        assert same(gradients(logits[rows], ids[rows], 1.0, 1.0), wanted_grad[rows])


def test_how_the_work_is_spread_does_not_change_a_bit(device):
    logits, ids = draw(4, 4 * TILE, device)
    wanted = kernels.partials(logits, ids, 1.0, 4 * TILE, 0, 2 * TILE, True)
    for spread in ({"warps": 4}, {"stages": 3}, {"warps": 2, "stages": 2}):
        launch = kernels.PARTIALS._replace(**spread)
        found = kernels.partials(logits, ids, 1.0, 4 * TILE, 0, 2 * TILE, True, launch)
        assert all(same(a, b) for a, b in zip(found, wanted, strict=True))


def test_another_block_or_other_lanes_are_other_bits(device):
    """Negative control of the three above: an order of sums that does change is seen."""
    logits, ids = draw(10, 2000, device)
    wanted = selected_logprob(logits, ids, entropy=True, vocab_block=2000)
    found = selected_logprob(logits, ids, entropy=True, vocab_block=500)
    assert not all(same(a, b) for a, b in zip(found, wanted, strict=True))
    lanes = kernels.PARTIALS._replace(lanes=kernels.PARTIALS.lanes // 2)
    usual = kernels.partials(logits, ids, 1.0, 2000, 0, 2000, False)
    assert not same(kernels.partials(logits, ids, 1.0, 2000, 0, 2000, False, lanes)[1], usual[1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16])
def test_ids_of_any_integer_dtype_and_stride(device, dtype):
    logits, ids = draw(3, 201, device)
    wanted, wanted_grad = selected_logprob(logits, ids), gradients(logits, ids, 1.0, 0.0)
    other = torch.stack((ids, ids), dim=1).to(dtype)[:, 0]
    assert not other.is_contiguous()
    assert same(selected_logprob(logits, other), wanted)
    assert same(gradients(logits, other, 1.0, 0.0), wanted_grad)


# -- 64-bit offsets


@pytest.mark.parametrize("rows, stride", [(2, (2**31 + 8, 1)), (2, (1, 2**22)), (3, (2**30 + 8, 1))])
def test_rows_and_columns_beyond_2_to_the_31(device, beyond, rows, stride):
    """The last: of a stride that is a 32-bit number, as in [16384, 151936], the third row's offset is none."""
    v = 2**31 // 2**22 + 20 if stride[1] > 1 else 700
    logits, ids = draw(rows, v, device, torch.bfloat16)
    ids[1] = v - 1
    far = beyond.as_strided((rows, v), stride)
    far.copy_(logits)
    found = selected_logprob(far, ids, entropy=True)
    assert all(same(a, b) for a, b in zip(found, selected_logprob(logits, ids, entropy=True), strict=True))
    merged = tuple(torch.zeros(rows, device=device) for _ in range(3))
    assert same(
        kernels.gradient(far, ids, merged, merged[0] + 1, None, 1.0, v),
        kernels.gradient(logits, ids, merged, merged[0] + 1, None, 1.0, v),
    )


# -- what does not fit


LOGITS, IDS = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int32)
BAD = [
    (LOGITS[0], IDS, {}, "do not fit"),
    (LOGITS, IDS[:1], {}, "do not fit"),
    (LOGITS, IDS.unsqueeze(1), {}, "do not fit"),
    (LOGITS.int(), IDS, {}, "floating point"),
    (LOGITS.to(torch.float8_e5m2), IDS, {}, "floating point"),
    (LOGITS.to(torch.complex64), IDS, {}, "floating point"),
    (LOGITS, IDS.float(), {}, "integers"),
    (LOGITS, IDS.bool(), {}, "integers"),
    (LOGITS, IDS + 5, {}, "within 0 and 4"),
    (LOGITS, IDS - 1, {}, "within 0 and 4"),
    (LOGITS, IDS + 4, {"vocab": 4}, "within 0 and 3"),
    (LOGITS, IDS, {"vocab": 6}, "vocab"),
    (LOGITS, IDS, {"vocab": 0}, "vocab"),
    (LOGITS[:, :0], IDS, {}, "vocab"),
    (LOGITS, IDS, {"vocab_block": 0}, "vocab_block"),
    (LOGITS, IDS, {"vocab_block": 2.5}, "vocab_block"),
    (LOGITS.new_zeros(1, 70000), IDS[:1], {"vocab_block": 1}, "vocab_block"),
    (LOGITS, IDS, {"vocab": 4.0}, "vocab"),
    (LOGITS, IDS.to(torch.uint32), {}, "integers"),
    (LOGITS, IDS, {"temperature": 0.0}, "temperature"),
    (LOGITS, IDS, {"temperature": -1.0}, "temperature"),
    (LOGITS, IDS, {"temperature": NAN}, "temperature"),
    (LOGITS, IDS, {"temperature": INF}, "temperature"),
    (LOGITS, IDS, {"temperature": 1e-45}, "temperature"),
]


@pytest.mark.parametrize(("logits", "ids", "options", "what"), BAD)
def test_what_does_not_fit_is_refused_before_launch(device, monkeypatch, logits, ids, options, what):
    monkeypatch.setattr(logprob._SelectedLogprob, "apply", None)
    with pytest.raises(ValueError, match=what):
        selected_logprob(logits.to(device), ids.to(device), **options)


def test_mixed_devices_are_refused(device):
    with pytest.raises(ValueError, match="several devices"):
        selected_logprob(LOGITS.to(device), IDS.to("meta"))


def test_more_rows_than_one_launch_holds_are_refused(device):
    with pytest.raises(ValueError, match="too many rows"):
        kernels.partials(torch.empty(2**27, 16, device="meta"), None, 1.0, 16, 0, 1, False)


def test_unchecked_ids_read_nothing_foreign(device):
    logits, ids = draw(3, 100, device)
    wanted = selected_logprob(logits, ids)
    ids[0], ids[2] = 100, -1
    found = selected_logprob(logits, ids, check=False)
    assert found[[0, 2]].tolist() == [-INF, -INF]
    assert same(found[1], wanted[1])
