"""The head in one with the selected logprob: against float64, in bits, and at its edges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tolerances import (
    BFLOAT16_GRADIENT_RELATIVE,
    HEAD_ENTROPY_NATS,
    HEAD_LOGPROB_NATS,
    LARGE_LOGIT_LOGPROB_NATS,
    LIKELY_LOGPROB_RELATIVE,
)
from xdkernels import linear_logprob
from xdkernels.jit import head as kernels
from xdkernels.linear_logprob import linear_selected_logprob

N, H, V = 9, 72, 700


def problem(device, seed=0, rows=N, width=H, columns=V, scale=0.3):
    """bfloat16 hidden [rows, width] and weight [columns, width], ids within the columns."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator).bfloat16().to(device)
    weight = (torch.randn(columns, width, generator=generator) * scale).bfloat16().to(device)
    return hidden, weight, torch.randint(0, columns, (rows,), generator=generator).to(device)


def exact(hidden, weight, ids, bias=None, temperature=1.0, softcap=None, vocab=None):
    """float64 logprobs and entropies of the same operands, with a graph."""
    logits = hidden @ weight.mT
    if bias is not None:
        logits = logits + bias.double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = torch.log_softmax((logits / temperature)[:, :vocab], dim=-1)
    weighted = logprobs.exp() * logprobs.clamp(min=-1e4)  # 0 where a column cannot be, and so is its derivative
    return logprobs.gather(1, ids[:, None].long()).squeeze(1), -weighted.sum(dim=1)


def doubles(*tensors):
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def relative(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


CASES = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 4.0},
    "padded vocabulary": {"vocab": 650},
    "all": {"temperature": 1.3, "softcap": 6.0, "vocab": 651},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
def test_agrees_with_float64_forward_and_backward_for_a_frozen_head(device, options, with_bias):
    hidden, weight, ids = problem(device)
    ids = ids % options.get("vocab", V)
    bias = torch.randn(V, generator=torch.Generator().manual_seed(1)).to(device) if with_bias else None
    upstream = torch.randn(N, generator=torch.Generator().manual_seed(2)).to(device)
    (h64,) = doubles(hidden)
    wanted, wanted_entropy = exact(h64, weight.double(), ids, bias, **options)
    (wanted_gradient,) = torch.autograd.grad((wanted * upstream).sum(), h64)

    hidden.requires_grad_()
    logprobs, entropy = linear_selected_logprob(hidden, weight, ids, bias, **options, entropy=True)
    (gradient,) = torch.autograd.grad((logprobs * upstream).sum(), hidden)
    assert logprobs.dtype == entropy.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    torch.testing.assert_close(logprobs.double(), wanted, rtol=0, atol=HEAD_LOGPROB_NATS)
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=0, atol=HEAD_ENTROPY_NATS)
    assert relative(gradient, wanted_gradient) < BFLOAT16_GRADIENT_RELATIVE


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_trained_head_gets_its_gradient_too(device, options, monkeypatch):
    monkeypatch.setattr(linear_logprob, "GRADIENT_COLUMNS", 512)  # two slices of the vocabulary
    monkeypatch.setattr(linear_logprob, "GRADIENT_ROWS", 5)
    hidden, weight, ids = problem(device)
    ids = ids % options.get("vocab", V)
    bias = torch.randn(V, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    pull, entropy_pull = torch.randn(2, N, generator=torch.Generator().manual_seed(2)).to(device)
    h64, w64, b64 = doubles(hidden, weight, bias)
    wanted, wanted_entropy = exact(h64, w64, ids, b64, **options)
    wanted_gradients = torch.autograd.grad((wanted * pull + wanted_entropy * entropy_pull).sum(), (h64, w64, b64))

    hidden.requires_grad_(), weight.requires_grad_()
    logprobs, entropy = linear_selected_logprob(hidden, weight, ids, bias, **options, entropy=True)
    gradients = torch.autograd.grad((logprobs * pull + entropy * entropy_pull).sum(), (hidden, weight, bias))
    for found, want in zip(gradients, wanted_gradients, strict=True):
        assert relative(found, want) < BFLOAT16_GRADIENT_RELATIVE
    vocab = options.get("vocab", V)
    assert not gradients[1][vocab:].any()


def test_a_gradient_through_the_entropy_of_a_frozen_head(device):
    hidden, weight, ids = problem(device)
    (h64,) = doubles(hidden)
    wanted, wanted_entropy = exact(h64, weight.double(), ids)
    (wanted_gradient,) = torch.autograd.grad((wanted - 0.5 * wanted_entropy).sum(), h64)
    hidden.requires_grad_()
    logprobs, entropy = linear_selected_logprob(hidden, weight, ids, entropy=True)
    (gradient,) = torch.autograd.grad((logprobs - 0.5 * entropy).sum(), hidden)
    assert relative(gradient, wanted_gradient) < BFLOAT16_GRADIENT_RELATIVE


def test_backward_twice_gives_the_same_and_scales_with_the_upstream(device):
    hidden, weight, ids = problem(device)
    hidden.requires_grad_()
    logprobs = linear_selected_logprob(hidden, weight, ids)
    first = torch.autograd.grad(logprobs.sum(), hidden, retain_graph=True)[0]
    again = torch.autograd.grad(logprobs.sum(), hidden, retain_graph=True)[0]
    doubled = torch.autograd.grad(2 * logprobs.sum(), hidden)[0]
    assert torch.equal(first, again) and torch.equal(2 * first, doubled)


def test_a_second_derivative_is_refused(device):
    hidden, weight, ids = problem(device)
    hidden.requires_grad_()
    (gradient,) = torch.autograd.grad(linear_selected_logprob(hidden, weight, ids).sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(gradient.sum(), hidden)


def test_bits_do_not_depend_on_the_other_rows(device):
    """Alone, among others, permuted, in chunks of another place; with and without a gradient; entropy as well."""
    hidden, weight, ids = problem(device, rows=133)
    whole, whole_entropy = linear_selected_logprob(hidden, weight, ids, entropy=True)
    order = torch.randperm(133, generator=torch.Generator().manual_seed(3)).to(device)
    permuted, permuted_entropy = linear_selected_logprob(hidden[order], weight, ids[order], entropy=True)
    assert torch.equal(permuted, whole[order]) and torch.equal(permuted_entropy, whole_entropy[order])
    for count in (1, 7, 64):
        assert torch.equal(linear_selected_logprob(hidden[:count], weight, ids[:count]), whole[:count])
    with_gradient = hidden.clone().requires_grad_()
    assert torch.equal(linear_selected_logprob(with_gradient, weight, ids), whole)


def test_the_gradients_bits_do_not_depend_on_the_other_rows(device):
    hidden, weight, ids = problem(device, rows=37)

    def gradient(rows, chunk_tokens=16):
        h = hidden[rows].clone().requires_grad_()
        return torch.autograd.grad(
            linear_selected_logprob(h, weight, ids[rows], chunk_tokens=chunk_tokens).sum(), h
        )[0]

    whole = gradient(slice(None))
    order = torch.randperm(37, generator=torch.Generator().manual_seed(4)).to(device)
    assert torch.equal(gradient(order), whole[order])
    assert torch.equal(gradient(slice(20, 21)), whole[20:21])
    hidden[20, 3] *= 1 + 2**-7  # negative control: one element, by one bit
    assert not torch.equal(gradient(slice(20, 21)), whole[20:21])


def test_negative_control_another_tile_gives_other_bits(device):
    """The equalities above can fail: the order of sums is what they hold."""
    hidden, weight, ids = problem(device, rows=133)
    head = kernels.Head(weight, None, 1.0, None, V)
    found = {}
    for block_n in (256, 128):
        tiled = replace(head, tiling=replace(kernels.TILING, block_n=block_n))
        into = kernels.Swept.empty(hidden, entropy=True, direction=False)
        kernels.sweep(hidden, tiled, ids, into, product_rows=133)
        found[block_n] = into
    for name in ("logprobs", "logsumexp", "entropies"):
        assert not torch.equal(*(getattr(into, name) for into in found.values()))
    torch.testing.assert_close(found[256].logprobs, found[128].logprobs, rtol=0, atol=HEAD_LOGPROB_NATS)


def test_the_product_back_is_always_of_as_many_rows(device, monkeypatch):
    """The library may choose its kernel by the number of rows, so a row's gradient is never multiplied among fewer."""
    hidden, weight, ids = problem(device, rows=37)
    shapes = []
    product = kernels.product

    def watched(left, right):
        shapes.append(left.shape[0])
        return product(left, right)

    monkeypatch.setattr(kernels, "product", watched)
    for rows in (1, 16, 37):
        h = hidden[:rows].clone().requires_grad_()
        linear_selected_logprob(h, weight, ids[:rows], chunk_tokens=16).sum().backward()
    assert shapes == [16] * 5


def test_ids_and_bias_of_any_stride(device):
    hidden, weight, ids = problem(device)
    bias = torch.randn(V, generator=torch.Generator().manual_seed(1)).to(device)
    wanted = linear_selected_logprob(hidden, weight, ids, bias)
    wide = torch.stack((ids, ids.flip(0)), dim=1)[:, 0], torch.stack((bias, -bias), dim=1)[:, 0]
    assert not wide[0].is_contiguous() and not wide[1].is_contiguous()
    assert torch.equal(linear_selected_logprob(hidden, weight, *wide), wanted)
    one = torch.full((1,), 5, device=device)
    assert torch.equal(
        linear_selected_logprob(hidden, weight, one.expand(N)), linear_selected_logprob(hidden, weight, one.repeat(N))
    )
    (h64,) = doubles(hidden)
    hidden.requires_grad_()
    logprobs, entropy = linear_selected_logprob(hidden, weight, *wide, entropy=True)
    (found,) = torch.autograd.grad(entropy.sum() + logprobs.sum(), hidden)  # upstreams expanded from one number
    wanted, wanted_entropy = exact(h64, weight.double(), ids, bias)
    assert relative(found, torch.autograd.grad((wanted + wanted_entropy).sum(), h64)[0]) < BFLOAT16_GRADIENT_RELATIVE


@pytest.mark.parametrize("trained", [False, True], ids=["frozen head", "trained head"])
def test_columns_that_cannot_be(device, trained):
    """A third of the vocabulary at -inf: no probability, no part in the entropy or in a gradient."""
    hidden, weight, ids = problem(device)
    bias = torch.zeros(V, device=device)
    bias[::3] = -torch.inf
    ids = ids // 3 * 3 + 1
    hidden.requires_grad_(), weight.requires_grad_(trained)
    h64, w64 = doubles(hidden, weight)
    wanted, wanted_entropy = exact(h64, w64, ids, bias)
    logprobs, entropy = linear_selected_logprob(hidden, weight, ids, bias, entropy=True)
    torch.testing.assert_close(logprobs.double(), wanted, rtol=0, atol=HEAD_LOGPROB_NATS)
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=0, atol=HEAD_ENTROPY_NATS)
    leaves, exactly = ((hidden, weight), (h64, w64)) if trained else ((hidden,), (h64,))
    for way, want in ((logprobs, wanted), (entropy, wanted_entropy)):
        found = torch.autograd.grad(way.sum(), leaves, retain_graph=True)
        for ours, theirs in zip(found, torch.autograd.grad(want.sum(), exactly, retain_graph=True), strict=True):
            assert relative(ours, theirs) < BFLOAT16_GRADIENT_RELATIVE


@pytest.mark.parametrize("trained", [False, True], ids=["frozen head", "trained head"])
def test_padding_may_hold_anything(device, trained):
    hidden, weight, ids = problem(device)
    vocab = 650
    ids = ids % vocab
    broken = weight.clone()
    broken[vocab:] = torch.nan
    found = []
    for w in (weight, broken):
        h, w = hidden.clone().requires_grad_(), w.clone().requires_grad_(trained)
        logprobs, entropy = linear_selected_logprob(h, w, ids, vocab=vocab, entropy=True)
        gradients = torch.autograd.grad(logprobs.sum() + trained * entropy.sum(), (h, w) if trained else (h,))
        found.append((logprobs.detach(), entropy.detach(), *gradients))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(each.isfinite().all() for each in found[1])


def test_autocast_changes_no_bit(device):
    hidden, weight, ids = problem(device)
    wanted = None
    for enabled in (False, True):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast(device, torch.float16, enabled=enabled):
            logprobs = linear_selected_logprob(h, w, ids)
        found = logprobs.detach(), *torch.autograd.grad(logprobs.sum(), (h, w))
        wanted = wanted or found
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_the_results_are_the_callers_to_change(device):
    hidden, weight, ids = problem(device)
    hidden.requires_grad_()
    logprobs, entropy = linear_selected_logprob(hidden, weight, ids, entropy=True)
    wanted = torch.autograd.grad((2 * logprobs).sum(), hidden, retain_graph=True)[0]
    logprobs.mul_(2), entropy.mul_(2)
    assert torch.equal(torch.autograd.grad(logprobs.sum(), hidden)[0], wanted)


@pytest.mark.parametrize("id", [-1, V, V + 2**32])
def test_an_unchecked_id_outside_is_impossible_and_reads_nothing(device, id):
    hidden, weight, ids = problem(device)
    wanted = linear_selected_logprob(hidden, weight, ids)
    ids[4] = id
    hidden.requires_grad_()
    found = linear_selected_logprob(hidden, weight, ids, check=False)
    others = torch.arange(N, device=device) != 4
    assert found[4] == -torch.inf and torch.equal(found[others], wanted[others])


@pytest.mark.parametrize("far", ["hidden", "weight"])
def test_operands_beyond_2_to_the_31(device, beyond, far):
    """Offsets of rows are 64-bit: two rows of a stride of 2^30 lie within 31 bits, the third does not."""
    hidden, weight, ids = problem(device, rows=3, columns=3)
    plain = {"hidden": hidden, "weight": weight}
    away = beyond.as_strided((3, H), (2**30 + 8, 1))
    away.copy_(plain[far])
    found = []
    for h, w in ((hidden, weight), (away, weight) if far == "hidden" else (hidden, away)):
        h = h.detach().requires_grad_()
        logprobs = linear_selected_logprob(h, w, ids)
        found.append((logprobs.detach(), torch.autograd.grad(logprobs.sum(), h)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("shift", [-1000.0, 1000.0])
def test_logits_far_from_zero(device, shift):
    """exp of them is nothing, or no float32: only their distances count."""
    hidden, weight, ids = problem(device)
    bias = torch.full((V,), shift, device=device)
    hidden.requires_grad_()
    logprobs = linear_selected_logprob(hidden, weight, ids, bias)
    (h64,) = doubles(hidden)
    wanted, _ = exact(h64, weight.double(), ids, bias)
    torch.testing.assert_close(logprobs.double(), wanted, rtol=0, atol=LARGE_LOGIT_LOGPROB_NATS)
    found = torch.autograd.grad(logprobs.sum(), hidden)[0]
    assert relative(found, torch.autograd.grad(wanted.sum(), h64)[0]) < BFLOAT16_GRADIENT_RELATIVE


@pytest.mark.parametrize("selected", ["peak", "other"])
def test_peaked_rows_and_tiles_with_a_reference_of_their_own(device, selected):
    """A token 150 nats above the rest, selected or not: most tiles then leave the selected token's reference."""
    hidden, weight, ids = problem(device)
    bias = torch.zeros(V, device=device)
    bias[300] = 150.0
    ids = torch.full_like(ids, 300) if selected == "peak" else ids % 256
    hidden.requires_grad_()
    logprobs, entropy = linear_selected_logprob(hidden, weight, ids, bias, entropy=True)
    (h64,) = doubles(hidden)
    wanted, wanted_entropy = exact(h64, weight.double(), ids, bias)
    torch.testing.assert_close(logprobs.double(), wanted, rtol=0, atol=HEAD_LOGPROB_NATS)
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=0, atol=HEAD_ENTROPY_NATS)
    assert (logprobs <= 0).all()
    found = torch.autograd.grad(logprobs.sum(), hidden)[0]
    want = torch.autograd.grad(wanted.sum(), h64)[0]
    if selected == "other":
        assert relative(found, want) < BFLOAT16_GRADIENT_RELATIVE
    else:  # e^-150 is left to the others
        assert not found.any()


@pytest.mark.parametrize("lead", [5.0, 12.0, 20.0])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen head", "trained head"])
def test_a_likely_token_keeps_its_digits(device, lead, trained):
    """1 - p is a sum of small things: logprob and gradient are exact relative to themselves, not to 1."""
    hidden, weight, ids = problem(device, scale=0.05)
    bias = torch.zeros(V, device=device)
    bias[300] = lead + torch.tensor(float(V)).log()
    ids = torch.full_like(ids, 300)
    hidden.requires_grad_(), weight.requires_grad_(trained)
    logprobs = linear_selected_logprob(hidden, weight, ids, bias)
    h64, w64 = doubles(hidden, weight)
    wanted, _ = exact(h64, w64, ids, bias)
    torch.testing.assert_close(logprobs.double(), wanted, rtol=LIKELY_LOGPROB_RELATIVE, atol=0)
    found = torch.autograd.grad(logprobs.sum(), (hidden, weight) if trained else (hidden,))
    want = torch.autograd.grad(wanted.sum(), (h64, w64) if trained else (h64,))
    for ours, exactly in zip(found, want, strict=True):
        assert relative(ours, exactly) < BFLOAT16_GRADIENT_RELATIVE


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_row_that_is_no_number_stays_alone(device, wrong):
    hidden, weight, ids = problem(device)
    sound = hidden.clone().requires_grad_()
    broken = hidden.clone()
    broken[3, 5] = wrong
    broken.requires_grad_()
    want, found = (linear_selected_logprob(h, weight, ids) for h in (sound, broken))
    others = torch.arange(N, device=device) != 3
    assert found[3].isnan() and torch.equal(found[others], want[others])
    by_sound, by_broken = (
        torch.autograd.grad(logprobs[others].sum(), h)[0] for logprobs, h in ((want, sound), (found, broken))
    )
    assert torch.equal(by_sound[others], by_broken[others])


@pytest.mark.parametrize("columns, width", [(1, 8), (256, 64), (257, 65), (513, 3)])
def test_ragged_sizes_and_strides(device, columns, width):
    """Widths that the copy engine does not read, a transposed weight, every second row of a wider hidden."""
    hidden, weight, ids = problem(device, rows=6, width=width, columns=columns)
    wanted, _ = exact(hidden.double(), weight.double(), ids)
    wide = torch.zeros(12, width + 5, dtype=torch.bfloat16, device=device)
    strided = wide[::2, 2 : 2 + width]
    strided.copy_(hidden)
    transposed = weight.mT.contiguous().mT
    plain = linear_selected_logprob(hidden, weight, ids)
    torch.testing.assert_close(plain.double(), wanted, rtol=0, atol=HEAD_LOGPROB_NATS)
    assert torch.equal(linear_selected_logprob(strided, transposed, ids), plain)
    h = strided.detach().requires_grad_()
    gradient = torch.autograd.grad(linear_selected_logprob(h, transposed, ids).sum(), h)[0]
    (h64,) = doubles(hidden)
    want = torch.autograd.grad(exact(h64, weight.double(), ids)[0].sum(), h64)[0]
    if columns > 1:
        assert relative(gradient, want) < BFLOAT16_GRADIENT_RELATIVE
    else:
        assert not gradient.any()


def test_no_rows(device):
    hidden, weight, ids = problem(device, rows=0)
    hidden.requires_grad_()
    logprobs, entropy = linear_selected_logprob(hidden, weight, ids, entropy=True)
    assert logprobs.shape == entropy.shape == (0,)
    assert torch.autograd.grad(logprobs.sum(), hidden)[0].shape == (0, H)


def test_integers_of_any_width_select(device):
    hidden, weight, ids = problem(device)
    want = linear_selected_logprob(hidden, weight, ids)
    for dtype in (torch.int32, torch.int16):
        assert torch.equal(linear_selected_logprob(hidden, weight, ids.to(dtype)), want)


BAD = {
    "hidden is no matrix": lambda h, w, i: ((h[0], w, i), {}),
    "widths differ": lambda h, w, i: ((h, w[:, :-8], i), {}),
    "one id too few": lambda h, w, i: ((h, w, i[1:]), {}),
    "an id beyond the vocabulary": lambda h, w, i: ((h, w, i.fill_(V)), {}),
    "an id in the padding": lambda h, w, i: ((h, w, i.fill_(V - 1)), {"vocab": V - 1}),
    "a negative id": lambda h, w, i: ((h, w, i.fill_(-1)), {}),
    "ids are numbers with a point": lambda h, w, i: ((h, w, i.float()), {}),
    "dtypes differ": lambda h, w, i: ((h, w.float(), i), {}),
    "integers for hidden": lambda h, w, i: ((h.int(), w.int(), i), {}),
    "temperature 0": lambda h, w, i: ((h, w, i), {"temperature": 0.0}),
    "temperature NaN": lambda h, w, i: ((h, w, i), {"temperature": float("nan")}),
    "softcap 0": lambda h, w, i: ((h, w, i), {"softcap": 0.0}),
    "vocab beyond the weight": lambda h, w, i: ((h, w, i), {"vocab": V + 1}),
    "vocab 0": lambda h, w, i: ((h, w, i), {"vocab": 0}),
    "bias too short": lambda h, w, i: ((h, w, i, torch.zeros(V - 1, device=h.device)), {}),
    "chunks of nothing": lambda h, w, i: ((h, w, i), {"chunk_tokens": 0}),
    "chunks of two and a half": lambda h, w, i: ((h, w, i), {"chunk_tokens": 2.5}),
    "vocab a float": lambda h, w, i: ((h, w, i), {"vocab": 20.0}),
    "vocab true": lambda h, w, i: ((h, w, i), {"vocab": True}),
    "ids of unsigned 32 bits": lambda h, w, i: ((h, w, i.to(torch.uint32)), {}),
    "softcap beyond float32": lambda h, w, i: ((h, w, i), {"softcap": 1e39}),
    "a temperature a row": lambda h, w, i: ((h, w, i), {"temperature": h[:, 0].float()}),
    "no hidden size": lambda h, w, i: ((h[:, :0], w[:, :0], i), {}),
    "weight elsewhere": lambda h, w, i: ((h, w.to("meta"), i), {}),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_what_does_not_fit_is_refused_before_launch(device, spoil):
    operands, options = spoil(*problem(device))
    with pytest.raises(ValueError, match=r"."):
        linear_selected_logprob(*operands, **options)
