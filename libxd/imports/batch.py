"""Records laid end to end: the flat arrays that are published (T tokens of B sequences)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from libxd.diagnostics import locate
from libxd.errors import XdError
from libxd.imports.record import Record
from libxd.imports.spool import Spool

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
        """The records as they come: only the last is held, the arrays lie in files (`Spool`).

        XdError 65 for the first record that contradicts itself, or holds another thing than those before it.
        """
        kept = _Beside()
        with Spool() as spool:
            for record in _checked(records, where):
                first = np.arange(len(record.token_ids)) == 0
                _require_ids(record.token_ids, record.where or where)
                spool.append("token_ids", record.token_ids.astype(np.int32))
                spool.append("active", record.active)
                for side, values in record.logprobs.items():
                    spool.append(side, _scored(values, record.active, first))
                kept.add(record, spool)
            return cls(
                token_ids=spool.array("token_ids"),
                cu_seqlens=np.cumsum([0, *kept.lengths], dtype=np.int64),
                active_mask=spool.array("active"),
                # one without a prompt has tokens that nothing comes before
                prompt_lens=np.array(kept.prompt_lens, np.int32) if all(kept.prompt_lens) else None,
                logprobs={side: spool.array(side) for side in kept.sides},
                extras=kept.extras(spool),
                places=[place or where for place in kept.places],
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
            sequence, position = locate(int(wrong[0]), cu_seqlens)
            raise _no_id(places[sequence] if places else f"sequence {sequence}", position, token_ids[wrong[0]])
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


def _require_ids(token_ids: np.ndarray, where: str) -> None:
    wrong = np.flatnonzero((token_ids < 0) | (token_ids > _MAX_ID))
    if wrong.size:
        raise _no_id(where, int(wrong[0]), token_ids[wrong[0]])


def _no_id(where: str, position: int, found: Any) -> XdError:
    return XdError("is no token id: padding is left out by a mask", code="bad-token-id", where=where,
                   path=f"/{position}", found=int(found), expected=f"0 to {_MAX_ID}")  # fmt: skip


class _Beside:
    """What records say beside their scores, one a sequence; what one of them lacks is unknown as a whole."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.prompt_lens: list[int | None] = []
        self.places: list[str] = []
        self.sides: tuple[str, ...] = ()
        self._rewards: list[float | None] = []
        self._prompts: list[Hashable | None] = []
        self._versions: list[int | None] = []
        self._advantages = True

    def add(self, record: Record, spool: Spool) -> None:
        self.lengths.append(len(record.token_ids))
        self.prompt_lens.append(record.prompt_len)
        self.places.append(record.where)
        self.sides = tuple(record.logprobs)
        self._rewards.append(record.reward)
        self._prompts.append(record.prompt)
        self._versions.append(record.version)
        self._advantages = self._advantages and record.advantage is not None
        if self._advantages:
            spool.append("advantages", np.broadcast_to(np.float32(record.advantage), self.lengths[-1]))

    def extras(self, spool: Spool) -> dict[str, np.ndarray]:
        said: dict[str, np.ndarray] = {}
        if self._advantages:
            said["advantages"] = spool.array("advantages")
        if None not in self._rewards:
            said["rewards"] = np.array(self._rewards, np.float32)
        if None not in self._prompts:
            said["prompt_index"] = numbered(self._prompts)
        if None not in self._versions:
            said["versions"] = np.array(self._versions, np.int64)
        return said


def numbered(keys: Iterable[Hashable]) -> np.ndarray:
    """int32: keys as numbers from 0, equal ones alike, in the order in which each first comes."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], np.int32)
