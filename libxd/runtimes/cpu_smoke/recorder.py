"""What really went into the model, token by token: seen by a hook on its forward, not told by the scheduler."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from libxd.runtimes.protocol import ObservedInputs


class Recorder:
    """Fills arrays over the T tokens of the flat batch. A token that reached no model keeps id and position -1."""

    def __init__(self, cu_seqlens: np.ndarray) -> None:
        total = int(cu_seqlens[-1])
        self._first = [int(first) for first in cu_seqlens[:-1]]
        self.token_ids = np.full(total, -1, np.int32)
        self.selected_ids = np.full(total, -1, np.int32)
        self.positions = np.full(total, -1, np.int32)
        self.attention_mask = np.zeros(total, np.bool_)
        self._shared: list[tuple[int, int]] = []

    def hook(self, module: Any, arguments: tuple[Any, ...]) -> None:
        """A forward pre-hook of the decoder: its own arguments say what it is given."""
        ids, positions, attention = arguments
        attended, row = attention.attended(), 0
        for piece in attention.pieces:
            first = self._first[piece.sequence] + piece.start
            cells, rows = slice(first, first + piece.count), slice(row, row + piece.count)
            self.token_ids[cells] = ids[rows].numpy()
            self.positions[cells] = positions[rows].numpy()
            self.attention_mask[cells] = attended[rows]
            row += piece.count

    def shared(self, cell: int, origin: int) -> None:
        """The keys of token `cell` are those that token `origin` filled: what was fed there counts."""
        self._shared.append((cell, origin))

    def selected(self, cells: list[int], ids: np.ndarray) -> None:
        """The ids whose logprobs were taken at these tokens."""
        self.selected_ids[cells] = ids

    def observed(self, cache: Literal["kv_cache", "none"]) -> ObservedInputs:
        for cell, origin in self._shared:
            for seen in (self.token_ids, self.positions, self.attention_mask):
                seen[cell] = seen[origin]
        unselected = self.selected_ids == -1
        selected = np.where(unselected, self.token_ids, self.selected_ids)
        return ObservedInputs(self.token_ids, selected, self.positions, self.attention_mask, cache)
