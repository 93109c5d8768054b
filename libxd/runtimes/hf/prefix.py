"""Prompt prefixes computed once: their keys and values, and the batch cache put together from them.

Shapes: a layer's keys and values [1, key-value heads, P, head_dim] of one prompt of P tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


@dataclass(frozen=True)
class Prefix:
    """One prompt's cache, a layer a pair, its last hidden state [1, H], and the sequence it was computed for."""

    origin: int
    layers: list[tuple[Tensor, Tensor]]
    hidden: Tensor


class PrefixStore:
    """Prefixes by what was fed for them: ids, positions, mask; lives as long as one scoring."""

    def __init__(self) -> None:
        self._kept: dict[bytes, Prefix] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def __getitem__(self, key: bytes) -> Prefix:
        return self._kept[key]

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: bytes, origin: int, cache: DynamicCache, hidden: Tensor) -> None:
        self._kept[key] = Prefix(origin, [(layer.keys, layer.values) for layer in cache.layers], hidden)

    def clear(self) -> None:
        self._kept.clear()

    @staticmethod
    def batch(prefixes: Sequence[Prefix], width: int, config: Any) -> DynamicCache:
        """A cache of one row a prefix, [M, key-value heads, width, head_dim] a layer, padded on the left with zeros.

        Keys carry their rotary positions already, so that where a prefix lies in the cache changes nothing.
        """
        cache = DynamicCache(config=config)
        for index in range(len(prefixes[0].layers)):
            keys, values = (
                torch.cat([_padded(prefix.layers[index][part], width) for prefix in prefixes]) for part in (0, 1)
            )
            cache.update(keys, values, index)
        return cache


def _padded(states: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(states, (0, 0, width - states.shape[2], 0))
