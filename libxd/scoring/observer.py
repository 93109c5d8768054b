"""What really went into a model and came out of its head: the one collector of evidence that every engine feeds.

It is fed from hooks on the modules that run, not by the scheduler that meant to run them.
Shapes: M rows of a batch, L columns fed at once, S columns of the cache so far (S >= L), T tokens of all sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from libxd.operators.session import checksum
from libxd.runtimes.protocol import Observation, ObservedInputs, Piece, Request, submission_batches
from libxd.sequences import Sequences


@dataclass(frozen=True)
class Row:
    """Where the tokens of a padded batch's row belong: `count` tokens of `sequence` from its token `start` on, in the
    columns from `offset` on of what is fed now. A row of padding alone has no Row."""

    row: int
    sequence: int
    start: int
    count: int
    offset: int = 0

    @property
    def piece(self) -> Piece:
        return Piece(self.sequence, self.start, self.count)


class Observer:
    """Fills a cell a token of the flat batch; a token that reached no model keeps id and position -1.

    `forwards` lists what went in together. Of a padded batch a token counts as attended when the mask lets it see
    itself, and of the columns before it none that is padding and just those of its own sequence that counted as
    attended themselves; a row's tokens lie side by side in the cache.
    """

    def __init__(self, cu_seqlens: np.ndarray) -> None:
        total = int(cu_seqlens[-1])
        self._first = cu_seqlens
        self._rows: Sequence[Row] = ()
        self._pieces: Sequence[Piece] = ()
        self.token_ids = np.full(total, -1, np.int32)
        self.selected_ids = np.full(total, -1, np.int32)
        self.positions = np.full(total, -1, np.int32)
        self.attention_mask = np.zeros(total, np.bool_)
        self.scored = np.zeros(total, np.bool_)
        self.forwards: list[list[Piece]] = []
        self._head_outputs: set[int] = set()

    # -- forwards

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
        ids = given["input_ids"].cpu().numpy()  # [M, L]
        positions = given["position_ids"].cpu().numpy()  # [M, L]
        mask = given["attention_mask"].cpu().numpy().astype(bool)  # [M, S]
        past = mask.shape[1] - ids.shape[1]
        self.forwards.append([])
        for row in self._rows:
            columns = slice(row.offset, row.offset + row.count)
            begin = past + row.offset - row.start  # the column of the sequence's first token
            attended = np.zeros(row.count, np.bool_)
            if begin >= 0:  # else the cache has lost tokens of the sequence: none counts as attended
                cells = self.cells(row.piece)
                before = slice(cells.start - row.start, cells.start)
                foreign = mask[row.row, :begin].any()
                kept = np.array_equal(mask[row.row, begin : begin + row.start], self.attention_mask[before])
                # causal: what is fed now and comes later in the row is not seen
                own = mask[row.row, begin + row.start : begin + row.start + row.count]
                attended = own & (kept and not foreign)
            self.fed(row.piece, ids[row.row, columns], positions[row.row, columns], attended)

    def forward(self, pieces: Sequence[Piece], ids: np.ndarray, positions: np.ndarray, attended: np.ndarray) -> None:
        """One forward over rows without padding, piece after piece: ids, positions [M], attended bool [M]."""
        self.forwards.append([])
        first = 0
        for piece in pieces:
            rows = slice(first, first + piece.count)
            self.fed(piece, ids[rows], positions[rows], attended[rows])
            first += piece.count

    def fed(self, piece: Piece, ids: np.ndarray, positions: np.ndarray, attended: np.ndarray) -> None:
        """A piece of the forward that is running: [count] each."""
        cells = self.cells(piece)
        self.forwards[-1].append(piece)
        self.token_ids[cells] = ids
        self.positions[cells] = positions
        self.attention_mask[cells] = attended

    def cells(self, piece: Piece) -> slice:
        """Where a piece's tokens stand in the flat batch."""
        first = int(self._first[piece.sequence]) + piece.start
        return slice(first, first + piece.count)

    def shared(self, sequence: int, origin: int, count: int) -> None:
        """The first `count` keys of `sequence` are those that `origin` filled: what was fed there counts here."""
        self.shared_cells(int(self._first[sequence]), int(self._first[origin]), count)

    def shared_cells(self, to: int, of: int, count: int) -> None:
        """The same of any `count` cells of the flat batch."""
        for seen in (self.token_ids, self.positions, self.attention_mask):
            seen[to : to + count] = seen[of : of + count]

    # -- the head

    @contextlib.contextmanager
    def on_head(self, module: Any) -> Iterator[None]:
        """Watch what a torch module gives as logits, before anything can be done to them."""
        handle = module.register_forward_hook(lambda _module, _arguments, out: self.logits(out))
        try:
            yield
        finally:
            handle.remove()

    def logits(self, logits: Any) -> None:
        """Logits as the head gave them."""
        found = checksum(logits)
        if found is not None:
            self._head_outputs.add(found)

    def selected(self, cells: np.ndarray, ids: np.ndarray) -> None:
        """The ids int [N] whose logprobs were taken at these cells int [N]."""
        self.selected_ids[cells] = ids
        self.scored[cells] = True

    # -- the whole

    def take_over(self, ranks: Sequence[Observer]) -> None:
        """What the observers of all ranks saw, each of the same tokens; `forwards` are those of the first.

        A token of which two ranks saw something else counts as one that reached no model; attended and scored is what
        was so on every rank.
        """
        for seen in ("token_ids", "selected_ids", "positions"):
            held = [getattr(rank, seen) for rank in ranks]
            alike = np.logical_and.reduce([one == held[0] for one in held])
            setattr(self, seen, np.where(alike, held[0], np.int32(-1)))
        self.attention_mask = np.logical_and.reduce([rank.attention_mask for rank in ranks])
        self.scored = np.logical_and.reduce([rank.scored for rank in ranks])
        self.forwards = ranks[0].forwards
        self._head_outputs = set().union(*(rank._head_outputs for rank in ranks))

    def observed(self, kept: bool) -> ObservedInputs:
        """Everything seen so far; where no logprob was taken, the selected id is the fed one.

        kept: whether keys and values were seen to outlive a forward. They did, too, where a sequence was gone on with
        in another forward than it was begun in.
        """
        resumed = any(piece.start > 0 for pieces in self.forwards for piece in pieces)
        selected = np.where(self.scored, self.selected_ids, self.token_ids)
        return ObservedInputs(
            self.token_ids, selected, self.positions, self.attention_mask, self.scored,
            "kv_cache" if kept or resumed else "none", self.forwards, frozenset(self._head_outputs),
        )  # fmt: skip


# -- what the forwards tell


def fits_mode(mode: str, forwards: Sequence[Sequence[Piece]], cu_seqlens: np.ndarray, prompt_lens: np.ndarray) -> bool:
    """Whether the tokens went through as a mode says.

    decode: each token behind a prompt by itself, in a forward after that of the token before it. prefill and
    teacher_forced: each sequence to its end in one forward. A prompt that is all of its sequence may never have been
    fed: another one that begins alike was.
    """
    lengths = np.diff(cu_seqlens).tolist()
    prompts = prompt_lens.tolist()
    reached = [0] * len(lengths)
    for piece in (piece for pieces in forwards for piece in pieces):
        s, end = piece.sequence, piece.start + piece.count
        if mode == "decode":
            fits = end <= prompts[s] or (piece.count == 1 and piece.start == max(reached[s], prompts[s]))
        else:
            fits = end == lengths[s] and not reached[s]
        if not fits:
            return False
        reached[s] = end
    return all(
        end == length or (end == 0 and prompt == length)
        for end, length, prompt in zip(reached, lengths, prompts, strict=True)
    )


def batches(forwards: Sequence[Sequence[Piece]]) -> list[list[int]]:
    """The sequences that went through the model together, in the order in which they came.

    Those that met in some forward are one batch, in the order of the first forward that held most of it.
    """
    groups: list[set[int]] = []
    for pieces in forwards:
        members = {piece.sequence for piece in pieces}
        touched = [group for group in groups if group & members]
        if touched:
            touched[0].update(members, *touched[1:])
            groups = [group for group in groups if not any(group is merged for merged in touched[1:])]
        elif members:
            groups.append(members)
    orders: dict[int, list[int]] = {}
    for pieces in forwards:
        order = list(dict.fromkeys(piece.sequence for piece in pieces))
        index = next((i for i, group in enumerate(groups) if group.issuperset(order)), -1)
        if len(order) > len(orders.get(index, ())):
            orders[index] = order
    # a member that never was in the fullest forward comes behind those that were
    return [[*orders[i], *sorted(group.difference(orders[i]))] for i, group in enumerate(groups)]


def ran_as_asked(asked: Sequence[Sequence[int]], ran: Sequence[Sequence[int]], telling: set[int]) -> tuple[bool, bool]:
    """Whether batches that ran are those that were asked for: (the same together, in the same order).

    telling: the sequences that go through the model whatever is shared; what only repeats another one's prompt may
    never be fed.
    """
    wanted, found = ([[s for s in batch if s in telling] for batch in given] for given in (asked, ran))
    wanted, found = ([batch for batch in given if batch] for given in (wanted, found))
    together = {frozenset(batch) for batch in wanted} == {frozenset(batch) for batch in found}
    return together, [s for batch in wanted for s in batch] == [s for batch in found for s in batch]


def batch_size(request: Request, sequences: Sequences, forwards: Sequence[Sequence[Piece]]) -> Observation:
    """Knob batch.size by what went through the model together; sequences too few to fill a batch fit what was asked."""
    asked = submission_batches(sequences.num_sequences, request.submission, request.batch_size)
    ran = batches(forwards)
    together, _ = ran_as_asked(asked, ran, sequences.answered())
    sizes = [len(batch) for batch in ran]
    return Observation(request.batch_size if together else max(sizes, default=0), {"batches": sizes})
