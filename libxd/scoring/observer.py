"""What really went into a model: ids, positions and masks, seen by a hook on its forward and told by nobody.

Shapes: M rows of a batch, L columns fed at once, S columns of the cache so far (S >= L), T tokens of all sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from libxd.runtimes.protocol import ObservedInputs


@dataclass(frozen=True)
class Row:
    """Where the tokens of a batch row belong: `count` tokens of `sequence` from its token `start` on, in the columns
    from `offset` on of what is fed now. A row of padding alone has no Row."""

    row: int
    sequence: int
    start: int
    count: int
    offset: int = 0


class Observer:
    """Fills a cell a token of the flat batch; a token that reached no model keeps id and position -1.

    A token counts as attended when the mask lets it see itself, and of the columns before it none that is padding and
    just those of its own sequence that counted as attended themselves. A row's tokens lie side by side in the cache.
    """

    def __init__(self, cu_seqlens: np.ndarray) -> None:
        total = int(cu_seqlens[-1])
        self._first = cu_seqlens
        self._rows: Sequence[Row] = ()
        self.token_ids = np.full(total, -1, np.int32)
        self.selected_ids = np.full(total, -1, np.int32)
        self.positions = np.full(total, -1, np.int32)
        self.attention_mask = np.zeros(total, np.bool_)
        self.forwards = 0

    @contextlib.contextmanager
    def on(self, module: Any, rows: Sequence[Row]) -> Iterator[None]:
        """Watch one forward of a torch module that is called with input_ids, position_ids, attention_mask."""
        self._rows = rows
        handle = module.register_forward_pre_hook(self._hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _hook(self, _module: Any, _arguments: tuple[Any, ...], given: dict[str, Any]) -> None:
        self.forwards += 1
        ids = given["input_ids"].cpu().numpy()  # [M, L]
        positions = given["position_ids"].cpu().numpy()  # [M, L]
        mask = given["attention_mask"].cpu().numpy().astype(bool)  # [M, S]
        past = mask.shape[1] - ids.shape[1]
        for row in self._rows:
            columns = slice(row.offset, row.offset + row.count)
            cells = self.cells(row)
            self.token_ids[cells] = ids[row.row, columns]
            self.positions[cells] = positions[row.row, columns]
            begin = past + row.offset - row.start  # the column of the sequence's first token
            if begin < 0:
                continue  # the cache has lost tokens of the sequence: none counts as attended
            before = slice(cells.start - row.start, cells.start)
            foreign = mask[row.row, :begin].any()
            kept = np.array_equal(mask[row.row, begin : begin + row.start], self.attention_mask[before])
            # causal: what is fed now and comes later in the row is not seen
            own = mask[row.row, begin + row.start : begin + row.start + row.count]
            self.attention_mask[cells] = own & (kept and not foreign)

    def cells(self, row: Row) -> slice:
        """Where a row's tokens stand in the flat batch."""
        first = int(self._first[row.sequence]) + row.start
        return slice(first, first + row.count)

    def shared(self, sequence: int, origin: int, count: int) -> None:
        """The first `count` keys of `sequence` are those that `origin` filled: what was fed there counts here."""
        to, of = int(self._first[sequence]), int(self._first[origin])
        for seen in (self.token_ids, self.positions, self.attention_mask):
            seen[to : to + count] = seen[of : of + count]

    def selected(self, cells: np.ndarray, ids: np.ndarray) -> None:
        """The ids int [N] whose logprobs were taken at these cells int [N]."""
        self.selected_ids[cells] = ids

    def observed(self, cache: Literal["kv_cache", "none"]) -> ObservedInputs:
        """Everything seen so far; where no logprob was taken, the selected id is the fed one."""
        selected = np.where(self.selected_ids == -1, self.token_ids, self.selected_ids)
        return ObservedInputs(self.token_ids, selected, self.positions, self.attention_mask, cache)
