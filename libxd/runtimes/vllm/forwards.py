"""What goes into vLLM's model, forward by forward, as the model's call and the attention's own tables show it.

Shapes: M tokens of a forward, R requests in it, S slots of the KV cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from libxd.runtimes.protocol import Piece
from libxd.scoring.observer import Observer
from libxd.sequences import Sequences

#: key of a request's extra arguments under which its sequence stands
SEQUENCE = "xd_sequence"
#: in the place of a cell: keys that no forward of this scoring wrote
_NOBODY = -2


@dataclass(frozen=True)
class Fed:
    """`count` tokens of a sequence from its token `start` on, in the rows of a forward from `first` on."""

    sequence: int
    start: int
    count: int
    first: int

    @property
    def end(self) -> int:
        return self.start + self.count


class Forwards:
    """Watches the runner's calls of its model, tells the observer, and keeps account of the cache's slots.

    Which cell's keys and values a slot holds follows from the slots that each forward wrote. A token counts as attended
    when the attention is causal, as long as the sequence so far, and each slot before it holds what it did when the
    sequence first read it. Keys that a sequence begins with and that another one wrote are shared ones.
    `fed` and `output` are of the forward that ran last.
    """

    def __init__(self, runner: Any, sequences: Sequences, observer: Observer) -> None:
        self.fed: list[Fed] = []
        self.output: Tensor | None = None
        self.shared_tokens = 0
        self._runner = runner
        self._observer = observer
        self._first = sequences.cu_seqlens
        self._length = np.diff(sequences.cu_seqlens)
        self._cell_of = np.full(1, -1, np.int64)  # [S]
        self._held: dict[int, np.ndarray] = {}
        self._to_share: list[Fed] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every forward meanwhile."""
        call = self._runner._model_forward

        def watched(*arguments: Any, **given: Any) -> Any:
            self._before(given["input_ids"], given["positions"])
            self.output = call(*arguments, **given)
            return self.output

        self._runner._model_forward = watched
        try:
            yield
        finally:
            del self._runner._model_forward  # the class's own shows again

    def _before(self, input_ids: Tensor, positions: Tensor) -> None:
        """A forward of ids and positions [M], as the attention's metadata lays it out."""
        metadata = next(iter(get_forward_context().attn_metadata.values()))
        self.fed = list(self._rows(metadata))
        slots, blocks = metadata.slot_mapping.cpu().numpy(), metadata.block_table.cpu().numpy()
        size = self._runner.input_batch.block_table[0].block_size
        for fed in self.fed:
            self._write(slots[fed.first : fed.first + fed.count], fed)
        for row, fed in enumerate(self.fed):
            if fed.sequence not in self._held:
                self._begin(fed, self._cells(blocks[row], fed.start, size))
        causal, attended = bool(torch.as_tensor(metadata.causal).all()), []
        for row, fed in enumerate(self.fed):
            kept = np.array_equal(self._cells(blocks[row], fed.end, size), self._held[fed.sequence][: fed.end])
            attended += [kept and causal] * fed.count
        pieces = [Piece(fed.sequence, fed.start, fed.count) for fed in self.fed]
        self._observer.forward(pieces, input_ids.cpu().numpy(), positions.cpu().numpy(), np.array(attended, np.bool_))
        self._share()

    def _rows(self, metadata: Any) -> Iterator[Fed]:
        """What belongs to whom: requests by the runner's batch, from where and how far by what the attention uses."""
        batch = self._runner.input_batch
        starts, lengths = metadata.query_start_loc.cpu().tolist(), metadata.seq_lens.cpu().tolist()
        for row, request in enumerate(batch.req_ids[: batch.num_reqs]):
            count = starts[row + 1] - starts[row]
            yield Fed(self._sequence(request), lengths[row] - count, count, starts[row])

    def _sequence(self, request: str) -> int:
        return self._runner.requests[request].sampling_params.extra_args[SEQUENCE]

    def _write(self, slots: np.ndarray, fed: Fed) -> None:
        needed = int(slots.max()) + 1
        if needed > len(self._cell_of):
            grown = np.full(2 * needed, -1, np.int64)
            grown[: len(self._cell_of)] = self._cell_of
            self._cell_of = grown
        self._cell_of[slots] = self._first[fed.sequence] + np.arange(fed.start, fed.end)

    def _cells(self, blocks: np.ndarray, count: int, size: int) -> np.ndarray:
        """The cells [count] whose keys lie where a row's first `count` tokens are looked up; -1: nobody's."""
        places = np.arange(count)
        slots = blocks[places // size].astype(np.int64) * size + places % size
        known = slots < len(self._cell_of)
        return np.where(known, self._cell_of[np.where(known, slots, 0)], -1)

    def _begin(self, fed: Fed, found: np.ndarray) -> None:
        """A sequence's first forward: what of it is not fed comes from the cells `found` [start]."""
        held = self._first[fed.sequence] + np.arange(self._length[fed.sequence])
        held[: fed.start] = np.where(found >= 0, found, _NOBODY)
        self._held[fed.sequence] = held
        self.shared_tokens += fed.start
        self._to_share.append(fed)

    def _share(self) -> None:
        """Tell the observer, run by run of cells that lie side by side, now that they have all been fed."""
        for fed in self._to_share:
            found = self._held[fed.sequence][: fed.start]
            runs = np.split(np.arange(fed.start), np.flatnonzero(np.diff(found) != 1) + 1)
            for run in runs:
                if len(run) and found[run[0]] != _NOBODY:
                    self._observer.shared_cells(int(self._first[fed.sequence] + run[0]), int(found[run[0]]), len(run))
        self._to_share.clear()
