"""Partial log-sum-exps: shards of a vocabulary, merged in the order of its blocks, give the bits of one shard."""

from __future__ import annotations

import pytest
import torch
from tolerances import ENTROPY_FLOAT32_NATS, LOGPROB_FLOAT32_NATS
from xdkernels.jit import logsumexp as kernels
from xdkernels.logprob import selected_logprob, selected_logprob_partials
from xdkernels.logsumexp import Partials, default_vocab_block, logprob_of_partials, merge_logsumexp

#: a sixteenth of it is as ragged as one of 151936 = 2^7 * 1187
V = 16 * 1187
N = 6  # enough for the negative control: most rows end in the same bits by chance
INF, NAN = float("inf"), float("nan")


@pytest.fixture
def logits_and_ids(device):
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(N, V, generator=generator) * 4).bfloat16()
    return logits.to(device), torch.tensor([V - 5, 1187, 0, 7, 9999, 1186], device=device)


def sharded(logits, ids, shards, *, vocab=V, vocab_block=None, **options):
    """Partials and selected logits of equal shards, each a tensor of its own."""
    width = logits.shape[1] // shards
    block = default_vocab_block(logits.shape[1]) if vocab_block is None else vocab_block
    parts = [
        selected_logprob_partials(
            logits[:, first : first + width].contiguous(), ids,
            vocab=vocab, first=first, vocab_block=block, entropy=True, **options,
        )
        for first in range(0, logits.shape[1], width)
    ]  # fmt: skip
    return tuple(zip(*parts, strict=True))


def same(a, b) -> bool:
    """Equal bits of finite values."""
    return all(torch.equal(x, y) and bool(x.isfinite().all()) for x, y in zip(a, b, strict=True))


def test_any_number_of_shards_gives_the_bits_of_one(logits_and_ids):
    whole = selected_logprob(*logits_and_ids, 0.8, entropy=True)
    for shards in (1, 2, 4, 16):
        assert same(logprob_of_partials(*sharded(*logits_and_ids, shards, temperature=0.8)), whole)
    other = logprob_of_partials(*sharded(*logits_and_ids, 2, temperature=0.8, vocab_block=1187 * 8))
    assert not same(other, whole)  # negative control: blocks that follow the shards


def test_padding_in_the_last_shards(logits_and_ids):
    logits, ids = logits_and_ids
    vocab = 9 * 1187 + 100
    ids = ids % vocab
    logits[:, vocab:] = NAN
    whole = selected_logprob(logits, ids, vocab=vocab, entropy=True)
    for shards in (2, 4):  # one of four holds nothing but padding
        assert same(logprob_of_partials(*sharded(logits, ids, shards, vocab=vocab)), whole)


def test_a_selected_token_of_no_probability(logits_and_ids):
    logits, ids = logits_and_ids
    logits[0, ids[0]] = -INF
    logprobs, _ = logprob_of_partials(*sharded(logits, ids, 2))
    assert logprobs[0].item() == -INF and bool(logprobs[1].isfinite())


def test_poison_of_one_shard_reaches_the_result(logits_and_ids):
    logits, ids = logits_and_ids
    logits[0, 3] = NAN
    logprobs, entropy = logprob_of_partials(*sharded(logits, ids, 4))
    assert bool(logprobs[0].isnan()) and bool(entropy[0].isnan())
    assert bool(logprobs[1].isfinite()) and bool(entropy[1].isfinite())


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 16, 33])
def test_the_merge_matches_float64(device, blocks):
    generator = torch.Generator().manual_seed(blocks)
    x = (torch.randn(7, blocks, 40, generator=generator) * 5 - 300).double().to(device)
    x[3, -1] = -INF  # an empty block
    x[3, 0, 0] = -300.0
    maximum = x.amax(-1).clamp(min=torch.finfo(torch.float32).min)
    weight = (x - maximum.unsqueeze(-1)).exp()
    total = weight.sum(-1)
    weighted = torch.where(weight > 0, weight * (x - maximum.unsqueeze(-1)), 0.0).sum(-1)
    merged = merge_logsumexp(Partials(maximum.float(), total.float(), weighted.float()))
    wanted = x.flatten(1).logsumexp(-1)
    scale = wanted.abs().clamp(min=1)
    assert bool((((merged.maximum.double() + merged.log_total) - wanted).abs() < LOGPROB_FLOAT32_NATS * scale).all())
    logprobs = x.flatten(1) - wanted.unsqueeze(1)
    entropy = -torch.where(logprobs > -1e9, logprobs.exp() * logprobs, 0.0).sum(-1)
    assert float((merged.entropy - entropy).abs().max()) < 4 * ENTROPY_FLOAT32_NATS  # maxima rounded at 300
    assert merge_logsumexp(Partials(maximum.float(), total.float(), None)).entropy is None


def test_how_the_rows_are_spread_does_not_change_a_bit(device):
    generator = torch.Generator().manual_seed(1)
    sums = [torch.rand(37, 16, generator=generator).to(device) for _ in range(3)]
    wanted = kernels.merge(*sums, sums[0][:, 0].contiguous())
    for launch in (kernels.MergeLaunch(rows=1, warps=1), kernels.MergeLaunch(rows=64, warps=4)):
        assert same(kernels.merge(*sums, sums[0][:, 0].contiguous(), launch), wanted)
    alone = kernels.merge(*(each[5:6].contiguous() for each in sums), sums[0][5:6, 0].contiguous())
    assert same(alone, [each[5:6] for each in wanted])
    order = torch.randperm(16, generator=generator).to(device)
    shuffled = kernels.merge(*(each[:, order].contiguous() for each in sums))
    assert not same(shuffled[1:2], wanted[1:2])  # negative control: the order of the blocks shows


def test_no_rows(device):
    nothing = torch.empty(0, 4, device=device)
    merged = merge_logsumexp(Partials(nothing, nothing, None))
    assert merged.maximum.shape == merged.log_total.shape == (0,)


def test_nothing_of_it_is_differentiable(logits_and_ids):
    logits, ids = logits_and_ids
    parts = sharded(logits.clone().requires_grad_(), ids, 2)
    assert not any(each.requires_grad for part in parts[0] for each in part[:3])
    assert not logprob_of_partials(*parts)[0].requires_grad
