"""Context parallelism while decoding: the cache sharded by position, partial attentions merged in rank order.

Weights are whole on every rank, and every rank computes queries, keys and values of every token; it keeps the keys and
values of its own positions alone. Of R ranks, rank r holds those whose distance to the end of the prompt is r modulo R:
counted from there, as prompts are padded on the left, so that a prefix lies on the same ranks in a wider batch, too.

Shapes: M rows, L columns fed, S columns of the cache, s of them on this rank, G key-value heads, Q query heads of each,
D head_dim.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from libxd.errors import Status, XdError
from libxd.runtimes.hf.attention import replaced_attention

NAME = "context_parallel"


class ContextParallel:
    """This rank's part in attention. `merged` counts calls by how many ranks' partial attentions they put together."""

    def __init__(self, group: Any, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._group = group
        self._boundary = 0
        self._cached = False
        self.merged: Counter[int] = Counter()

    def adopt(self, model: Any) -> None:
        """Have a model attend by this. XdError 69 for one that does not attend to all tokens before it, as they are."""
        config = model.config.get_text_config()
        odd = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers} - {"DynamicLayer"}
        odd |= {name for name in ("attn_logit_softcapping",) if getattr(config, name, None) is not None}
        if odd:
            raise XdError("attends in another way than to all tokens before, which context parallelism does not split",
                          status=Status.REFUSED, code="unsupported-model", where=type(model).__name__,
                          found=sorted(odd))  # fmt: skip
        model.config._attn_implementation = NAME

    @contextlib.contextmanager
    def attending(self) -> Iterator[None]:
        """Be what transformers finds by this name, meanwhile."""
        with replaced_attention(NAME, self._attend):
            yield

    @contextlib.contextmanager
    def one_pass(self) -> Iterator[None]:
        """Meanwhile nothing is cached: keys and values of all columns come, and this rank takes its own."""
        self._cached, self._boundary = False, 0
        try:
            yield
        finally:
            self._cached = True

    def cache(self, config: Any, width: int) -> DynamicCache:
        """An empty cache for prompts that are `width` columns wide."""
        self._boundary, self._cached = width, True
        made = DynamicCache(config=config)
        made.layers = [_OwnColumns(self) for _ in made.layers]
        return made

    def held(self, count: int) -> int:
        """How many of the last `count` columns before the end of the prompts are this rank's."""
        nearest = -self.rank % self.ranks or self.ranks
        return 0 if nearest > count else (count - nearest) // self.ranks + 1

    def own(self, first: int, end: int) -> slice:
        """This rank's columns among those from `first` to `end`, from `first` on."""
        return slice((self.rank + self._boundary - first) % self.ranks, end - first, self.ranks)

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **options: Any
    ) -> tuple[Tensor, None]:  # fmt: skip
        """query [M, G * Q, L, D]; key, value [M, G, s, D], or S without a cache; mask bool [M, 1, L, S].

        Returns [M, L, G * Q, D] in the query's dtype. Logits, exponentials, sums and partial outputs are float32.
        """
        own = self.own(0, mask.shape[-1])
        if not self._cached:
            key, value = key[:, :, own], value[:, :, own]
        out, log_total = _partial(query, key, value, mask[..., own], scaling)
        partial = torch.cat([out, log_total.unsqueeze(-1)], dim=-1)
        parts = [torch.empty_like(partial) for _ in range(self.ranks)]
        dist.all_gather(parts, partial, group=self._group)
        self.merged[len(parts)] += 1
        return merge(parts).to(query.dtype).flatten(1, 2).transpose(1, 2), None


def _partial(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention over this rank's keys, float32: outputs [M, G, Q, L, D], log-sum-exps [M, G, Q, L], -inf for none."""
    grouped = query.unflatten(1, (key.shape[1], -1)).float()
    logits = grouped @ key.float().unsqueeze(2).transpose(-1, -2) * scaling  # [M, G, Q, L, s]
    logits = logits.masked_fill(~mask.unsqueeze(2), -torch.inf)
    log_total = logits.logsumexp(-1)
    weights = (logits - log_total.where(log_total > -torch.inf, log_total.new_zeros(())).unsqueeze(-1)).exp()
    return weights @ value.float().unsqueeze(2), log_total


def merge(parts: list[Tensor]) -> Tensor:
    """Outputs [..., D] of partial ones [..., D + 1], the last column their log-sum-exps; added in the order given.

    exp(l_r - m) of each part's log-sum-exp l_r, with m the greatest, weighs its output. A row without any key is zero.
    """
    greatest = torch.stack([part[..., -1:] for part in parts]).amax(0)
    greatest = greatest.where(greatest > -torch.inf, greatest.new_zeros(()))
    out, total = torch.zeros_like(parts[0][..., :-1]), torch.zeros_like(greatest)
    for part in parts:
        weight = (part[..., -1:] - greatest).exp()
        out, total = out + weight * part[..., :-1], total + weight
    return out / total.where(total > 0, total.new_ones(()))


class _OwnColumns(DynamicLayer):
    """One layer's keys and values of this rank's columns, [M, G, s, D]; lengths are those of the whole cache."""

    def __init__(self, context: ContextParallel) -> None:
        super().__init__()
        self._context = context
        self._length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **options: Any) -> tuple[Tensor, Tensor]:
        own = self._context.own(self._length, self._length + key_states.shape[2])
        self._length += key_states.shape[2]
        return super().update(key_states[:, :, own], value_states[:, :, own])

    def fill(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Begin with this rank's columns of a cache of `length`."""
        super().update(keys, values)
        self._length = length

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0
