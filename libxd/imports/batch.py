"""Records laid end to end: the flat arrays that are published (T tokens of B sequences)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from libxd.errors import XdError
from libxd.imports.record import Record

_MAX_ID = 2**31 - 1
#: active tokens at the end of a response whose logprobs are all 0.0 and that are spoken of: a probability of exactly 1
#: so often in a row is what a padded array looks like under a mask that is too wide
ZERO_TAIL = 8


@dataclass(frozen=True)
class Batch:
    """What others had scored.

    token_ids int32 [T]; cu_seqlens int64 [B+1]; active_mask bool [T]; prompt_lens int32 [B], None where a prompt is
    unknown; logprobs: side -> float32 [T] in nats, a quiet NaN where nothing was scored. extras: tensors of a score
    file that its dump holds beside them: `advantages` float32 [T], `rewards` float32 [B], `prompt_index` int32 [B],
    `versions` int64 [B]. places: where each sequence stood, for messages.
    """

    token_ids: np.ndarray
    cu_seqlens: np.ndarray
    active_mask: np.ndarray
    prompt_lens: np.ndarray | None
    logprobs: Mapping[str, np.ndarray]
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    places: Sequence[str] | None = None

    @classmethod
    def of_records(cls, records: Iterable[Record], where: str) -> Batch:
        """XdError 65 for the first record that contradicts itself, or holds another thing than those before it."""
        kept = list(_checked(records, where))
        first = kept[0]
        lengths = [len(record.token_ids) for record in kept]
        known = all(record.prompt_len for record in kept)  # one without a prompt has tokens that nothing comes before
        return cls.of_arrays(
            token_ids=np.concatenate([record.token_ids for record in kept]),
            cu_seqlens=np.cumsum([0, *lengths], dtype=np.int64),
            active_mask=np.concatenate([record.active for record in kept]),
            prompt_lens=np.array([record.prompt_len for record in kept], np.int32) if known else None,
            logprobs={side: np.concatenate([record.logprobs[side] for record in kept]) for side in first.logprobs},
            extras=_extras(kept, lengths),
            places=[record.where or where for record in kept],
        )

    @classmethod
    def of_arrays(
        cls, token_ids: np.ndarray, cu_seqlens: np.ndarray, active_mask: np.ndarray, prompt_lens: np.ndarray | None,
        logprobs: Mapping[str, np.ndarray], extras: Mapping[str, np.ndarray], places: Sequence[str] | None = None,
    ) -> Batch:  # fmt: skip
        """Arrays of the class's shapes, made to be what it says.

        An inactive token's 0.0 is the fill of a padded array and becomes NaN, and so does an inactive first token's
        logprob, which nothing comes before. XdError 65 for an id that is none.
        """
        wrong = np.flatnonzero((token_ids < 0) | (token_ids > _MAX_ID))
        if wrong.size:
            sequence, position = place(cu_seqlens, int(wrong[0]))
            raise XdError("is no token id: padding is left out by a mask", code="bad-token-id",
                          where=places[sequence] if places else f"sequence {sequence}", path=f"/{position}",
                          found=int(token_ids[wrong[0]]), expected=f"0 to {_MAX_ID}")  # fmt: skip
        first = np.zeros(len(token_ids), bool)
        first[cu_seqlens[:-1]] = True
        return cls(
            token_ids=token_ids.astype(np.int32),
            cu_seqlens=cu_seqlens.astype(np.int64, copy=False),
            active_mask=active_mask,
            prompt_lens=prompt_lens,
            logprobs={side: _scored(values, active_mask, first) for side, values in logprobs.items()},
            extras=extras,
            places=places,
        )

    def notes(self, side: str) -> list[str]:
        """What of a side's numbers is taken as it stands, and may be no score at all."""
        ends = self._zero_tails(self.logprobs[side])
        if not ends:
            return []
        sequence, position = ends[0]
        return [
            f"{side}: logprobs of 0.0 over the last {ZERO_TAIL} active tokens or more, of {len(ends)} of the sequences "
            f"(sequence {sequence} from position {position} on): taken as scored, with probability 1; a fill value is "
            "left out by the mask, or is NaN"
        ]

    def _zero_tails(self, logprobs: np.ndarray) -> list[tuple[int, int]]:
        """(sequence, position from which on) of each whose last active logprobs are 0.0, ZERO_TAIL of them or more."""
        tails = []
        for sequence, (begin, end) in enumerate(zip(self.cu_seqlens[:-1], self.cu_seqlens[1:], strict=True)):
            active = np.flatnonzero(self.active_mask[begin:end])
            values = logprobs[begin:end][active]
            zeros = int(np.argmax(values[::-1] != 0)) if values.any() else len(values)
            if zeros >= ZERO_TAIL:
                tails.append((sequence, int(active[len(active) - zeros])))
        return tails


def place(cu_seqlens: np.ndarray, index: int) -> tuple[int, int]:
    """(sequence, position in it) of a token."""
    sequence = int(np.searchsorted(cu_seqlens, index, "right")) - 1
    return sequence, index - int(cu_seqlens[sequence])


def _scored(values: np.ndarray, active: np.ndarray, first: np.ndarray) -> np.ndarray:
    """float32 [T] with one quiet NaN wherever nothing was scored."""
    with np.errstate(over="ignore"):  # beyond float32 is infinite, which a verdict finds
        values = values.astype(np.float32)
    values[np.isnan(values) | (~active & ((values == 0) | first))] = np.float32(np.nan)
    return values


def _checked(records: Iterable[Record], where: str) -> Iterator[Record]:
    """The records, as long as each agrees with itself and with the first; XdError 65."""
    sides: set[str] | None = None
    for record in records:
        at = record.where or where
        arrays = {"active": record.active, **{f"logprobs/{side}": values for side, values in record.logprobs.items()}}
        if np.ndim(record.advantage):
            arrays["advantage"] = record.advantage
        length = len(record.token_ids)
        if not length:
            raise XdError("a sequence without tokens", code="empty-sequence", where=at)
        for name, kind, values in (("token_ids", np.integer, record.token_ids), ("active", np.bool_, record.active)):
            if not np.issubdtype(np.asarray(values).dtype, kind):
                raise XdError("is of another type than it must be", code="wrong-type", where=at, path=f"/{name}",
                              found=str(np.asarray(values).dtype), expected=kind.__name__.strip("_"))  # fmt: skip
        for name, values in arrays.items():
            if np.shape(values) != (length,):
                raise XdError("has another length than the token ids beside it", code="mixed-lengths", where=at,
                              path=f"/{name}", found=list(np.shape(values)), expected=[length])  # fmt: skip
        if record.prompt_len is not None and not 0 <= record.prompt_len <= length:
            raise XdError("a prompt longer than its sequence", code="bad-prompt", where=at, path="/prompt_len",
                          found=record.prompt_len, expected=f"at most {length}")  # fmt: skip
        if record.active[: record.prompt_len or 0].any():
            raise XdError("a prompt's token is active", code="bad-mask", where=at, path="/active",
                          found=int(np.argmax(record.active)), expected=f"from {record.prompt_len} on")  # fmt: skip
        if sides is not None and set(record.logprobs) != sides:
            raise XdError("holds other sides than the records before it", code="mixed-sides", where=at,
                          found=sorted(record.logprobs), expected=sorted(sides))  # fmt: skip
        sides = set(record.logprobs)
        yield record
    if sides is None:
        raise XdError("holds no sequence", code="no-sequences", where=where)


def _extras(records: list[Record], lengths: list[int]) -> dict[str, np.ndarray]:
    """What all records say beside their scores; what one of them lacks is unknown as a whole."""
    said: dict[str, np.ndarray] = {}
    if all(record.advantage is not None for record in records):
        said["advantages"] = np.concatenate(
            [np.broadcast_to(np.float32(record.advantage), length) for record, length in zip(records, lengths,
                                                                                             strict=True)]
        )  # fmt: skip
    if all(record.reward is not None for record in records):
        said["rewards"] = np.array([record.reward for record in records], np.float32)
    if all(record.prompt is not None for record in records):
        said["prompt_index"] = numbered(record.prompt for record in records)
    if all(record.version is not None for record in records):
        said["versions"] = np.array([record.version for record in records], np.int64)
    return said


def numbered(keys: Iterable[Hashable]) -> np.ndarray:
    """int32: keys as numbers from 0, equal ones alike, in the order in which each first comes."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], np.int32)
