"""What detectors look at: a pair's active tokens laid side by side, and what else is at hand.

A of the T tokens are looked at, of S sequences that have one. Numbers are float64 here; the files' are float32.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from libxd import scores, seal
from libxd.diagnostics import locate
from libxd.doctor.places import Places
from libxd.doctor.rescoring import Rescored
from libxd.doctor.statistics import means_by
from libxd.doctor.vocabulary import Vocabulary
from libxd.knobs import DTYPE_OF_SIDE
from libxd.pairs import Pair
from libxd.planner import IMPORTED
from libxd.rundir import SEAL, SIDES, Attempt
from libxd.scores import ScoreFile
from libxd.sequences import Sequences

#: of more active tokens than this, statistics are of whole sequences that lie evenly; facts are of all
MOST_TOKENS = 1 << 18
_STRATA, _LEAST_A_STRATUM = 10, 16
#: of tokens and of sequences that lie far apart: a page, once touched, brings up to 2 MB of neighbours into memory
_TAKEN, _RELEASE_EVERY = 1 << 12, 16


@dataclass(frozen=True)
class Known:
    """What is at hand beside the two score files.

    reported: name -> value of an aggregate that somebody reports, as it is written. model: a checkpoint
    directory to name in commands.
    """

    sequences: Sequences | None = None
    vocabulary: Vocabulary | None = None
    rescored: Rescored | None = None
    reported: Mapping[str, Decimal | float] = field(default_factory=dict)
    model: str | None = None

    def has(self, name: str) -> bool:
        return bool(getattr(self, name))


@dataclass(frozen=True)
class Brief:
    """Of an `Evidence`, what several attempts are set beside one another by.

    count: tokens. sequences: those that have one, S. mean: of |d|; by_sequence: the same of each, float64 [S].
    """

    count: int
    sequences: int
    mean: float | None
    by_sequence: np.ndarray


@dataclass(frozen=True)
class Evidence:
    """Two score files, side by side where they can be.

    A token is looked at when both files call it active, hold the same id for it, and a finite logprob.
    """

    rollout: ScoreFile
    training: ScoreFile
    attempt: Attempt | None = None
    known: Known = field(default_factory=Known)

    @classmethod
    def of_pair(cls, pair: Pair, known: Known | None = None) -> Evidence:
        return cls(pair.rollout, pair.training, pair.attempt, known or Known())

    def with_known(self, known: Known) -> Evidence:
        """The same, with more at hand."""
        return replace(self, known=known)

    @cached_property
    def brief(self) -> Brief:
        """Without what it is made of, which would be held for as long as this is."""
        at = self.aside()
        means = means_by(at.index, at.magnitude, at.sequences.size) if at.count else np.zeros(0)
        return Brief(at.count, at.sequences.size, float(np.mean(at.magnitude)) if at.count else None, means)

    def aside(self) -> Evidence:
        """The same once more: what is computed of it goes with it."""
        copy = replace(self)
        copy.__dict__["tampered"] = self.tampered  # every file's digest, which is not taken twice
        return copy

    # -- the files

    @property
    def files(self) -> tuple[ScoreFile, ScoreFile]:
        return self.rollout, self.training

    @cached_property
    def tampered(self) -> list[seal.Problem]:
        """In which ways a sealed attempt is not what was sealed; [] of one that is not sealed. Digests every file."""
        return seal.verify(self.attempt) if self.attempt is not None and self.attempt.has(SEAL) else []

    @cached_property
    def side_by_side(self) -> bool:
        """Whether index i of both files is the same place of the same sequence."""
        return self.rollout.tokens == self.training.tokens and np.array_equal(
            self.rollout.cu_seqlens, self.training.cu_seqlens
        )

    def blocks(self) -> Iterator[slice]:
        """All T places where the files lie side by side, or the rollout side's, a block of N at a time."""
        return scores.blocks(self.rollout.tokens, *self.files)

    def active(self, where: slice) -> np.ndarray:
        """Which places both sides call active: bool [N]."""
        return self.rollout.active_mask[where] & self.training.active_mask[where]

    def find(self, holds: Callable[[slice], np.ndarray]) -> Places:
        """The places at which `holds`, of a block, is true: bool [N]."""
        found = Places()
        for where in self.blocks():
            found.add(where.start + np.flatnonzero(holds(where)))
        return found

    def marked(self, index: np.ndarray, where: slice) -> np.ndarray:
        """Which places of a block are among rising flat indices: bool [N]."""
        first, last = np.searchsorted(index, (where.start, where.stop))
        marks = np.zeros(where.stop - where.start, bool)
        marks[index[first:last] - where.start] = True
        return marks

    @cached_property
    def firsts(self) -> np.ndarray:
        """The first place of every sequence that has one: int64, rising."""
        return self.cu_seqlens[:-1][np.diff(self.cu_seqlens) > 0]

    @property
    def cu_seqlens(self) -> np.ndarray:
        """int64 [B+1], the rollout side's."""
        return self.rollout.cu_seqlens

    def place(self, index: int) -> str:
        """A flat index as a person reads it: sequence, position, id."""
        sequence, position = locate(int(index), self.cu_seqlens)
        return f"sequence {sequence}, position {position} (id {int(self.rollout.token_ids[index])})"

    def command(self, *options: str) -> str:
        """xd-doctor once more, with these options."""
        operands = [str(self.attempt)] if self.attempt else [str(file.path) for file in self.files]
        return " ".join(["xd-doctor", *options, *map(shlex.quote, operands)])

    @property
    def rescoring(self) -> str:
        """The command that looks at logits, too."""
        return self.command("--rescore", shlex.quote(self.known.model or "MODEL"))

    # -- what is looked at

    @cached_property
    def cells(self) -> np.ndarray:
        """Flat indices, in order: int64 [A]."""
        if not self.side_by_side:
            return np.zeros(0, np.int64)
        kept, count = [], 0
        for where in self.blocks():
            cells = self._usable(where)
            count += cells.size
            if count - cells.size <= MOST_TOKENS:
                kept.append(cells)
        if count <= MOST_TOKENS or self.cu_seqlens.size <= (keep_every := -(-count // MOST_TOKENS)) + 1:
            return np.concatenate([np.zeros(0, np.int64), *kept])[:MOST_TOKENS]
        some = (self._usable(where) for where in self.blocks())
        return np.concatenate([cells[self._sequence_of(cells) % keep_every == 0] for cells in some])

    def _usable(self, where: slice) -> np.ndarray:
        """The places of a block that may be looked at: flat indices, int64."""
        usable = self.active(where) & (self.rollout.token_ids[where] == self.training.token_ids[where])
        for file in self.files:
            usable &= np.isfinite(file.logprobs[where])
        return where.start + np.flatnonzero(usable)

    def _sequence_of(self, cells: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.cu_seqlens, cells, side="right") - 1

    @property
    def count(self) -> int:
        return self.cells.size

    @cached_property
    def r(self) -> np.ndarray:
        """The rollout side's logprobs: float64 [A]."""
        return self.taken(self.rollout, self.cells)

    @cached_property
    def t(self) -> np.ndarray:
        """The training side's: float64 [A]."""
        return self.taken(self.training, self.cells)

    @staticmethod
    def taken(file: ScoreFile, index: np.ndarray) -> np.ndarray:
        """A file's logprobs at flat indices [N], wherever they lie in it: float64 [N]."""
        values = np.empty(index.size)
        for start in range(0, index.size, _TAKEN):
            values[start : start + _TAKEN] = file.logprobs[index[start : start + _TAKEN]]
            file.release()
        return values

    def of_side(self, side: str) -> np.ndarray:
        return self.r if side == SIDES[0] else self.t

    @cached_property
    def d(self) -> np.ndarray:
        """training - rollout: float64 [A]."""
        return self.t - self.r

    @cached_property
    def magnitude(self) -> np.ndarray:
        return np.abs(self.d)

    @cached_property
    def sequence(self) -> np.ndarray:
        """Which sequence each is of: int [A]."""
        return self._sequence_of(self.cells)

    @cached_property
    def sequences(self) -> np.ndarray:
        """Those that have a token: int [S]."""
        return np.unique(self.sequence)

    @cached_property
    def index(self) -> np.ndarray:
        """`sequence`, counted over those that have a token: int [A] in 0 .. S-1."""
        return np.searchsorted(self.sequences, self.sequence)

    @cached_property
    def position(self) -> np.ndarray:
        """In its sequence: int [A]."""
        return self.cells - self.cu_seqlens[self.sequence]

    @cached_property
    def parts(self) -> list[slice]:
        """Of each of the S sequences, its places in [A]."""
        edges = np.searchsorted(self.index, np.arange(self.sequences.size + 1))
        return [slice(int(a), int(b)) for a, b in pairwise(edges)]

    @cached_property
    def prompt(self) -> np.ndarray:
        """Which prompt each of the S sequences answers: int [S].

        As the sequences file says; else sequences whose ids before the first active token are the same.
        """
        if self.known.sequences is not None:
            return self.known.sequences.prompt_index[self.sequences].astype(np.int64)
        firsts = self.cells[np.searchsorted(self.sequence, self.sequences)]
        known: dict[bytes, int] = {}
        numbers = np.empty(self.sequences.size, np.int64)
        for place, (sequence, first) in enumerate(zip(self.sequences, firsts, strict=True)):
            prompt = self.rollout.token_ids[self.cu_seqlens[sequence] : first].tobytes()
            numbers[place] = known.setdefault(prompt, len(known))
            if place % _RELEASE_EVERY == _RELEASE_EVERY - 1:
                self.rollout.release()
        return numbers

    @cached_property
    def rank(self) -> np.ndarray:
        """|d| by its rank among tokens of about the same logprob, in (0, 1): float64 [A].

        A token's rounding depends on how likely it is; what is left of it here does not.
        """
        ranks = np.empty(self.count)
        for part in self._strata:
            order = np.argsort(np.argsort(self.magnitude[part], kind="stable"), kind="stable")
            ranks[part] = (order + 0.5) / part.size
        return ranks

    @cached_property
    def ratio(self) -> np.ndarray:
        """|d| over the median |d| of tokens of about the same logprob: float64 [A]; 0 where all are equal."""
        ratios = np.zeros(self.count)
        for part in self._strata:
            middle = np.median(self.magnitude[part])
            if not middle:
                middle = np.mean(self.magnitude[part])
            if middle:
                ratios[part] = self.magnitude[part] / middle
        return ratios

    @cached_property
    def _strata(self) -> list[np.ndarray]:
        order = np.argsort(self.r + self.t, kind="stable")
        return np.array_split(order, max(1, min(_STRATA, order.size // _LEAST_A_STRATUM)))

    @cached_property
    def dtypes(self) -> dict[str, str | None]:
        """What each side's parameters are said to be: seen, else (of an import) declared."""
        said = {file.side: file.metadata["dtypes"]["parameters"] or file.metadata.get("declared_dtype")
                for file in self.files}  # fmt: skip
        requested = self.attempt.requested() if self.attempt is not None and None in said.values() else None
        if requested is None or requested["strategy"] != IMPORTED:
            return said
        return {side: dtype or requested["values"][DTYPE_OF_SIDE[side]] for side, dtype in said.items()}

    @cached_property
    def semantics(self) -> dict[str, dict[str, Any] | None]:
        return {file.side: file.metadata["semantics"] for file in self.files}

    @cached_property
    def rescored_index(self) -> tuple[np.ndarray, np.ndarray]:
        """Of tokens that were rescored and are looked at: their places in [A], and in `rescored`."""
        rescored = self.known.rescored
        assert rescored is not None
        _, ours, theirs = np.intersect1d(self.cells, rescored.cells, assume_unique=True, return_indices=True)
        return ours, theirs

