"""The plain-torch twins against float64, and at the edges where a log-softmax goes wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tolerances import ENTROPY_FLOAT32_NATS, LINEAR_LOGPROB_FLOAT32_NATS, LOGPROB_FLOAT32_NATS

torch = pytest.importorskip("torch")

from xdkernels.reference.logprob import linear_selected_logprob, selected_logprob  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
N, V, H = 17, 1000, 64


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(7)


def oracle(logits, ids, temperature=1.0):
    """log-softmax and entropy in float64."""
    logprobs = torch.log_softmax(logits.double() / temperature, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1), entropy


def greatest(a, b):
    return float((a.double() - b.double()).abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_selected_logprob_and_entropy_match_float64(generator, dtype, temperature):
    logits = (torch.randn(N, V, generator=generator) * 4).to(dtype)
    ids = torch.randint(V, (N,), generator=generator)
    logprobs, entropy = selected_logprob(logits, ids, temperature, entropy=True)
    wanted, wanted_entropy = oracle(logits, ids, temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert logprobs.shape == entropy.shape == (N,)
    assert greatest(logprobs, wanted) < LOGPROB_FLOAT32_NATS
    assert greatest(entropy, wanted_entropy) < ENTROPY_FLOAT32_NATS
    assert torch.equal(selected_logprob(logits, ids, temperature), logprobs)


def test_another_temperature_is_another_answer(generator):
    """Negative control of the comparison above."""
    logits = torch.randn(N, V, generator=generator) * 4
    ids = torch.randint(V, (N,), generator=generator)
    assert greatest(selected_logprob(logits, ids, 0.7), oracle(logits, ids)[0]) > LOGPROB_FLOAT32_NATS


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_matches_float64(generator, dtype):
    hidden = torch.randn(N, H, generator=generator).to(dtype)
    weight = (torch.randn(V, H, generator=generator) / 4).to(dtype)
    ids = torch.randint(V, (N,), generator=generator)
    logprobs, entropy = linear_selected_logprob(hidden, weight, ids, temperature=0.7, entropy=True)
    wanted, wanted_entropy = oracle(hidden.double() @ weight.double().mT, ids, 0.7)
    assert logprobs.dtype == torch.float32
    assert greatest(logprobs, wanted) < LINEAR_LOGPROB_FLOAT32_NATS
    assert greatest(entropy, wanted_entropy) < LINEAR_LOGPROB_FLOAT32_NATS


def test_linear_keeps_what_a_bfloat16_head_rounds_away(generator):
    hidden = torch.randn(N, H, generator=generator).bfloat16()
    weight = torch.randn(V, H, generator=generator).bfloat16()
    ids = torch.randint(V, (N,), generator=generator)
    rounded = selected_logprob(hidden @ weight.mT, ids)
    wanted, _ = oracle(hidden.double() @ weight.double().mT, ids)
    assert greatest(linear_selected_logprob(hidden, weight, ids), wanted) < LINEAR_LOGPROB_FLOAT32_NATS
    assert greatest(rounded, wanted) > 100 * LINEAR_LOGPROB_FLOAT32_NATS


def test_padding_columns_do_not_count(generator):
    logits = torch.randn(N, V, generator=generator)
    ids = torch.randint(V - 8, (N,), generator=generator)
    padded = logits.clone()
    padded[:, V - 8 :] = 50.0
    wanted = selected_logprob(logits[:, : V - 8].contiguous(), ids)
    assert torch.equal(selected_logprob(padded, ids, vocab=V - 8), wanted)
    assert not torch.equal(selected_logprob(padded, ids), wanted)
    hidden, weight = torch.randn(N, H, generator=generator), torch.randn(V, H, generator=generator) / H
    cut = linear_selected_logprob(hidden, weight, ids, vocab=V - 8)
    whole = linear_selected_logprob(hidden, weight, ids)
    assert bool((cut > whole).all())  # mass was taken from the padding


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e30, -1e30, -1e30]])
    logprobs, entropy = selected_logprob(logits, torch.tensor([0, 2]), entropy=True)
    assert logprobs[0].item() == 0.0
    assert logprobs[1].item() == pytest.approx(-1.0986122886681098, abs=LOGPROB_FLOAT32_NATS)
    assert entropy[0].item() == 0.0
    assert entropy[1].item() == pytest.approx(1.0986122886681098, abs=ENTROPY_FLOAT32_NATS)


def test_masked_columns_have_no_probability_and_no_entropy():
    inf = float("inf")
    logits = torch.tensor([[0.0, 0.0, -inf], [0.0, 0.0, -inf]])
    logprobs, entropy = selected_logprob(logits, torch.tensor([1, 2]), entropy=True)
    assert logprobs[0].item() == pytest.approx(-0.6931471805599453, abs=LOGPROB_FLOAT32_NATS)
    assert logprobs[1].item() == -inf
    assert entropy.tolist() == pytest.approx([0.6931471805599453] * 2, abs=ENTROPY_FLOAT32_NATS)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poison_is_not_hidden(poison):
    logprobs = selected_logprob(torch.tensor([[0.0, poison], [0.0, 1.0]]), torch.tensor([0, 0]))
    assert not logprobs[0].isfinite()
    assert logprobs[1].isfinite()


def test_no_rows():
    assert selected_logprob(torch.empty(0, 5), torch.empty(0, dtype=torch.int64)).shape == (0,)


LOGITS, IDS = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("logits", "ids", "options", "what"),
    [
        (LOGITS[0], IDS, {}, "do not fit"),
        (LOGITS, IDS[:1], {}, "do not fit"),
        (LOGITS.int(), IDS, {}, "floating point"),
        (LOGITS, IDS.float(), {}, "integers"),
        (LOGITS, IDS.bool(), {}, "integers"),
        (LOGITS, IDS + 5, {}, "within 0 and 4"),
        (LOGITS, IDS - 1, {}, "within 0 and 4"),
        (LOGITS, IDS + 4, {"vocab": 4}, "within 0 and 3"),
        (LOGITS, IDS, {"vocab": 6}, "vocab"),
        (LOGITS, IDS, {"temperature": 0.0}, "temperature"),
    ],
)
def test_what_does_not_fit_is_refused(logits, ids, options, what):
    with pytest.raises(ValueError, match=what):
        selected_logprob(logits, ids, **options)


def test_operands_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        linear_selected_logprob(torch.zeros(2, 4), torch.zeros(5, 3), IDS)
    with pytest.raises(ValueError, match="floating point"):
        linear_selected_logprob(torch.zeros(2, 3), torch.zeros(5, 3, dtype=torch.int8), IDS)


def test_the_package_alone_loads_no_torch():
    code = "import sys, xdkernels; print('torch' in sys.modules, 'libxd' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
