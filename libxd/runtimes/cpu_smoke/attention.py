"""Attention over the keys of one sequence: whole, by blocks, or a shard of positions at a time.

Legend: M queries, S keys, H query heads, G key/value heads (H a multiple of G), D head dimension.
query [M, H, D]; key, value [S, G, D]; visible bool [M, S]: which keys a query may see. Scores are scaled by D ** -0.5
and accumulated in float32. A query that sees no key of a shard has log-sum-exp -inf there and adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

#: keys a step of the running softmax
BLOCK_KEYS = 8


def eager(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Softmax written out, scores and probabilities rounded to the compute dtype: [M, H, D]."""
    out, _ = plain(query, key, value, visible)
    return out.to(query.dtype)


def sdpa(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """torch's scaled_dot_product_attention: [M, H, D]."""
    groups = query.shape[1] // key.shape[1]
    heads_first = (part.transpose(0, 1).unsqueeze(0).contiguous() for part in (
        query, key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    ))  # fmt: skip
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=visible)
    return out.squeeze(0).transpose(0, 1)


#: what `training.attention_backend` may name here
IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {"eager": eager, "sdpa": sdpa}


def plain(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over all keys, its scores and probabilities rounded: float32 [M, H, D] and log-sum-exp [M, H]."""
    scores = _scores(query, key, visible).to(query.dtype).float()
    lse = torch.logsumexp(scores, dim=-1)
    probabilities = torch.exp(scores - _finite(lse).unsqueeze(-1)).to(query.dtype)
    return _weigh(probabilities.float(), value), lse.transpose(0, 1)


def online(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """The running softmax of flash attention (Dao et al. 2022, algorithm 1), all in float32; results as in `plain`."""
    heads, rows = query.shape[1], query.shape[0]
    top = query.new_full((heads, rows), -math.inf, dtype=torch.float32)
    total = torch.zeros_like(top)
    out = query.new_zeros((rows, heads, query.shape[2]), dtype=torch.float32)
    for start in range(0, key.shape[0], BLOCK_KEYS):
        block = slice(start, start + BLOCK_KEYS)
        scores = _scores(query, key[block], visible[:, block])
        higher = torch.maximum(top, scores.amax(dim=-1))
        weights = torch.exp(scores - _finite(higher).unsqueeze(-1))
        shrink = torch.exp(top - _finite(higher))
        total = total * shrink + weights.sum(dim=-1)
        out = out * shrink.transpose(0, 1).unsqueeze(-1) + _weigh(weights, value[block])
        top = higher
    lse = top + torch.log(total)
    seen = torch.where(total > 0, total, torch.ones_like(total))
    return out / seen.transpose(0, 1).unsqueeze(-1), lse.transpose(0, 1)


def merge(partials: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Partial attentions over disjoint keys as one, in order: (float32 [M, H, D], log-sum-exp [M, H]) -> [M, H, D]."""
    top = torch.stack([lse for _, lse in partials]).amax(dim=0)
    weights = [torch.exp(lse - _finite(top)).unsqueeze(-1) for _, lse in partials]
    out, total = partials[0][0] * weights[0], weights[0]
    for (partial, _), weight in zip(partials[1:], weights[1:], strict=True):
        out, total = out + partial * weight, total + weight
    return out / total


def merge_log_sum_exp(parts: list[Tensor]) -> Tensor:
    """log(sum(exp(parts))) added in order, in float32."""
    top = torch.stack(parts).amax(dim=0)
    total = torch.exp(parts[0] - top)
    for part in parts[1:]:
        total = total + torch.exp(part - top)
    return top + torch.log(total)


def _scores(query: Tensor, key: Tensor, visible: Tensor) -> Tensor:
    """Scaled scores, -inf where a key is not visible: float32 [H, M, S]."""
    groups = query.shape[1] // key.shape[1]
    keys = key.float().repeat_interleave(groups, dim=1)
    products = (query.float().unsqueeze(1) * keys.unsqueeze(0)).sum(dim=-1)  # [M, S, H]
    scores = (products * query.shape[2] ** -0.5).permute(2, 0, 1)
    return scores.masked_fill(~visible, -math.inf)


def _weigh(weights: Tensor, value: Tensor) -> Tensor:
    """weights [H, M, S] over value [S, G, D]: float32 [M, H, D]."""
    groups = weights.shape[0] // value.shape[1]
    values = value.float().repeat_interleave(groups, dim=1).permute(1, 2, 0)  # [H, D, S]
    return (weights.unsqueeze(2) * values.unsqueeze(1)).sum(dim=-1).transpose(0, 1)


def _finite(x: Tensor) -> Tensor:
    """-inf replaced by 0, so that exp(-inf - x) is 0 and not NaN."""
    return torch.where(torch.isinf(x), torch.zeros_like(x), x)
