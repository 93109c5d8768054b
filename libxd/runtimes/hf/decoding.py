"""A batch on its way through the KV cache: prompts prefilled together, then a token a row and step.

Scoring and sampling go this way alike. Shapes: M rows, P columns of the longest prompt (the others are padded on the
left, so that every row's next token comes at the same place), S columns of the cache so far, X of what a forward gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

#: ids [M, L], positions [M, L], mask [M, S], cache -> hidden states or logits [M, L or 1, X]; int64 on the CPU
Forward = Callable[[Tensor, Tensor, Tensor, DynamicCache], Tensor]


@dataclass(frozen=True)
class Prompt:
    """What is fed for a prompt of P tokens: integers [P] each."""

    ids: np.ndarray
    positions: np.ndarray
    mask: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


class Batch:
    """The cache of M rows, and which of its columns each row may look at."""

    def __init__(self, cache: DynamicCache, mask: Tensor) -> None:
        self.cache = cache
        self._mask = mask  # int64 [M, S]

    def step(self, forward: Forward, ids: np.ndarray, positions: np.ndarray, mask: np.ndarray) -> Tensor:
        """Feed each row one token, integers [M] each: [M, X]."""
        self._mask = torch.cat([self._mask, tensor(mask).unsqueeze(1)], dim=1)
        return forward(tensor(ids).unsqueeze(1), tensor(positions).unsqueeze(1), self._mask, self.cache)[:, -1]

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these."""
        self.cache.batch_select_indices(torch.tensor(rows, device=self.cache.layers[0].keys.device))
        self._mask = self._mask[rows]


def prefill(forward: Forward, prompts: Sequence[Prompt], width: int, cache: DynamicCache) -> Tensor:
    """Fill the cache with these prompts, padded on the left to `width` columns; what comes out at their ends [M, X].

    A copy, so that no other column of what the forward gave stays.
    """
    ids, positions = padded([p.ids for p in prompts], width), padded([p.positions for p in prompts], width)
    return forward(ids, positions, padded([p.mask for p in prompts], width), cache)[:, -1].clone()


def padded(rows: Sequence[np.ndarray], width: int) -> Tensor:
    """int64 [M, width] of integers [P], zeros on the left. Which id pads is all the same: the mask hides it."""
    filled = torch.zeros((len(rows), width), dtype=torch.long)
    for row, values in enumerate(rows):
        filled[row, width - len(values) :] = tensor(values)
    return filled


def tensor(array: np.ndarray) -> Tensor:
    """An int64 tensor of ids, positions or masks."""
    return torch.from_numpy(array.astype(np.int64))
