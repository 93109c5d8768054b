"""Partial log-sum-exps of vocabulary blocks, and their merge in the order of the blocks.

A vocabulary is cut into blocks at the same columns however many shards hold it. A block's three numbers depend on its
columns alone, and the merge takes the blocks in their order: so one shard, two or four give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from xdkernels import arguments
from xdkernels.dispatch import use_kernels

#: shards that the default blocks divide into equal parts of, where the vocabulary does
MOST_SHARDS = 16


class Partials(NamedTuple):
    """Of K vocabulary blocks of N rows, float32 [N, K]; x are the logits over temperature, in nats.

    maximum: max x. total: the sum of exp(x - maximum). weighted: that of exp(x - maximum) (x - maximum), or none, when
    no entropy is wanted. A block without a finite x has the lowest finite maximum and a total of 0.
    first, columns, vocab: the vocabulary's columns that they are of (columns of them from `first` on, of which those
    below vocab count), so that a shard that is missing is noticed; none: not known.
    """

    maximum: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor | None
    first: int | None = None
    columns: int | None = None
    vocab: int | None = None


class Merged(NamedTuple):
    """Of N rows, float32 [N]: their log-sum-exp is maximum + log_total, kept apart because the sum would round.

    entropy: that of the row's distribution, in nats, or none.
    """

    maximum: torch.Tensor
    log_total: torch.Tensor
    entropy: torch.Tensor | None


def default_vocab_block(vocabulary: int) -> int:
    """Columns of a block, from the whole vocabulary's size V alone (padding included).

    V / s for the largest power of two s, up to 16, that divides V: 1, 2, 4, 8 or 16 equal shards hold whole blocks
    wherever they hold whole columns. 151936 = 2^7 * 1187 gives 9496; an odd vocabulary is one block.
    """
    if vocabulary < 1:
        raise ValueError(f"a vocabulary must have columns: {vocabulary}")
    shards = MOST_SHARDS
    while vocabulary % shards:
        shards //= 2
    return vocabulary // shards


@torch.no_grad()
def merge_logsumexp(partials: Partials | Sequence[Partials]) -> Merged:
    """The rows' log-sum-exps and entropies, from the blocks of one shard or of several in vocabulary order.

    A row's bits depend on its blocks and their order alone. Not differentiable. ValueError: partials that do not fit,
    or that are not of adjacent columns, as far as they say.
    """
    return _merge(_joined(partials, whole=False), None)[0]


@torch.no_grad()
def logprob_of_partials(
    partials: Partials | Sequence[Partials], selected: torch.Tensor | Sequence[torch.Tensor]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The selected logprob of N rows, float32 [N], in nats; with weighted partials, and their entropy.

    partials: as for `merge_logsumexp`. selected: float32 [N], the selected logit over temperature; or one a shard, -inf
    where another shard holds the row's token. Not differentiable. ValueError: what does not fit, or a shard that is
    missing, as far as they say what they are of.
    """
    if not isinstance(selected, torch.Tensor):
        if len({tuple(each.shape) for each in selected}) != 1:
            raise ValueError(f"selected [N] of all shards must fit: {[tuple(each.shape) for each in selected]}")
        arguments.require_one_device(**{f"selected_{shard}": each for shard, each in enumerate(selected)})
        selected = torch.stack(tuple(selected)).amax(dim=0)
    merged, logprobs = _merge(_joined(partials, whole=True), selected)
    return logprobs if merged.entropy is None else (logprobs, merged.entropy)


def _joined(partials: Partials | Sequence[Partials], *, whole: bool) -> Partials:
    """Shards side by side: each behind the other, and from the first column to the last where the whole is wanted."""
    if isinstance(partials, Partials):
        partials = (partials,)
    if not partials:
        raise ValueError("no partials to merge")
    for shard in partials:
        arguments.require_partials(*shard[:3], selected=None)
    _require_adjacent(partials, whole)
    if len(partials) == 1:
        return partials[0]
    if len({shard.total.shape[0] for shard in partials}) > 1:
        raise ValueError(f"shards of other rows: {[tuple(shard.total.shape) for shard in partials]}")
    if len({shard.weighted is None for shard in partials}) > 1:
        raise ValueError("shards with and without weighted partials")
    arguments.require_one_device(**{f"shard_{index}": shard.total for index, shard in enumerate(partials)})
    maximum, total = (torch.cat([shard[field] for shard in partials], dim=1) for field in (0, 1))
    weighted = None if partials[0].weighted is None else torch.cat([shard.weighted for shard in partials], dim=1)
    return Partials(maximum, total, weighted)


def _require_adjacent(shards: Sequence[Partials], whole: bool) -> None:
    """ValueError where shards that say what they are of have others between, before or behind them."""
    if any(shard.first is None for shard in shards):
        return
    place = 0 if whole else shards[0].first
    for shard in shards:
        if shard.first != place:
            raise ValueError(f"a shard is missing: this one begins at column {shard.first}, expected is {place}")
        place += shard.columns
    vocabularies = sorted({shard.vocab for shard in shards})
    if len(vocabularies) > 1:
        raise ValueError(f"shards of several vocabularies: {vocabularies}")
    if whole and place < vocabularies[0]:
        raise ValueError(f"a shard is missing: they end at column {place} of a vocabulary of {vocabularies[0]}")


def _merge(partials: Partials, selected: torch.Tensor | None) -> tuple[Merged, torch.Tensor | None]:
    """The merge, and the logprob when a selected logit is there."""
    sums = partials[:3]
    arguments.require_partials(*sums, selected)
    if use_kernels(partials.total):
        from xdkernels.jit.logsumexp import merge

        *merged, logprobs = merge(
            *(None if each is None else each.contiguous() for each in (*sums, selected))
        )  # fmt: skip
        return Merged(*merged), logprobs
    from xdkernels.reference.logprob import merge_logsumexp

    merged = Merged(*merge_logsumexp(*sums))
    return merged, None if selected is None else (selected - merged.maximum) - merged.log_total
