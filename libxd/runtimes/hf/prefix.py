"""Prompt prefixes computed once: their keys and values, and the batch cache put together from them.

Shapes: a layer's keys and values [1, key-value heads, P, head_dim] of one prompt: of its P tokens, or of those that are
this rank's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
    """Prefixes by the digest of what was fed for them; each lives until the last sample of its submission took it.

    stored: how many were put here since the submission began. most: how many were held at once.
    """

    def __init__(self) -> None:
        self.expect(())

    def expect(self, keys: Iterable[str]) -> None:
        """A submission begins in which these prompts will be asked for, each as often as it stands here."""
        self._held: dict[str, Prefix] = {}
        self._awaited = Counter(keys)
        self.stored = self.most = 0

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, key: str, origin: int, cache: DynamicCache, row: int, length: int, hidden: Tensor) -> None:
        """Copy a row of a batch's cache, the last `length` columns held of it, and its last hidden state of [M, H].

        Copies, because a view would keep the whole batch. A sliding layer holds less than the prompt.
        """
        layers = [(_row(layer.keys, row, length), _row(layer.values, row, length)) for layer in cache.layers]
        self._held[key] = Prefix(origin, layers, hidden[row : row + 1].clone())
        self.stored += 1
        self.most = max(self.most, len(self._held))

    def take(self, key: str) -> Prefix:
        """A prefix for one sample; the last one takes it away."""
        self._awaited[key] -= 1
        return self._held[key] if self._awaited[key] > 0 else self._held.pop(key)

    def clear(self) -> None:
        """Give up what a submission that broke off left; what was counted stays."""
        self._held.clear()

    @staticmethod
    def batch(prefixes: Sequence[Prefix], width: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of a batch, a row a prefix, [M, key-value heads, width, head_dim], layer by layer.

        Padded on the left with zeros. Keys carry their rotary positions already, so that where a prefix lies in the
        cache changes nothing.
        """
        for index in range(len(prefixes[0].layers)):
            keys, values = (
                torch.cat([_padded(prefix.layers[index][part], width) for prefix in prefixes]) for part in (0, 1)
            )
            yield keys, values


def _row(states: Tensor, row: int, length: int) -> Tensor:
    return states[row : row + 1, :, max(0, states.shape[2] - length) :].clone()


def _padded(states: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(states, (0, 0, width - states.shape[2], 0))
