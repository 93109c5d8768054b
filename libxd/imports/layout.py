"""How a trainer lays out the tokens of B sequences, and how the values beside them become flat [T].

Padded: a rectangle [B, L] and which of its cells hold tokens. Flat: [T] and boundaries. Ragged: a list of sequences.
Values may be narrower than the tokens: their last column, or element, belongs to the last one of the tokens, as with a
response beside prompt and response, and with labels beside inputs. What they do not reach is filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from libxd.errors import Status, XdError


class Padded:
    """token_ids [B, L], held bool [B, L]: padding stands where it likes."""

    def __init__(self, token_ids: np.ndarray, held: np.ndarray) -> None:
        if held.shape != token_ids.shape:
            raise usage("attention_mask is of another shape than token_ids", "attention_mask", list(held.shape),
                        list(token_ids.shape))  # fmt: skip
        self._held = truth("attention_mask", held)
        begins = np.diff(self._held.astype(np.int8), axis=1, prepend=0) == 1
        if (holes := np.flatnonzero(begins.sum(1) > 1)).size:
            place = [int(holes[0]), int(np.flatnonzero(begins[holes[0]])[1])]
            raise usage("has a hole: padding stands before or behind a sequence's tokens", "attention_mask", place,
                        "a token after padding in the first place of a row alone")  # fmt: skip
        self.token_ids = token_ids[self._held]
        self.cu_seqlens = np.cumsum([0, *self._held.sum(1)], dtype=np.int64)

    def flat(self, name: str, values: Any, fill: Any) -> np.ndarray:
        given = array(name, values)
        rows, width = self._held.shape
        if given.ndim != 2 or given.shape[0] != rows or given.shape[1] > width:
            raise usage("is not laid out as token_ids", name, list(given.shape), f"[{rows}, at most {width}]")
        if given.shape[1] < width:
            whole = np.full((rows, width), fill, given.dtype)
            whole[:, width - given.shape[1] :] = given
            given = whole
        if name == "active_mask" and (stray := np.argwhere(truth(name, given) & ~self._held)).size:
            raise usage("is true where attention_mask holds no token", name, stray[0].tolist(), "a token")
        return given[self._held]


class Flat:
    """token_ids [T], cu_seqlens [B+1]."""

    def __init__(self, token_ids: np.ndarray, cu_seqlens: np.ndarray) -> None:
        whole = cu_seqlens.ndim == 1 and cu_seqlens.size > 1 and np.issubdtype(cu_seqlens.dtype, np.integer)
        bounds = cu_seqlens.astype(np.int64) if whole else cu_seqlens  # a difference of unsigned ones never falls
        if not whole or bounds[0] != 0 or bounds[-1] != token_ids.size or (np.diff(bounds) < 0).any():
            raise usage("does not rise from 0 to the number of tokens", "cu_seqlens", bounds.tolist(), token_ids.size)
        self.token_ids = token_ids
        self.cu_seqlens = bounds

    def flat(self, name: str, values: Any, fill: Any) -> np.ndarray:
        given = array(name, values)
        if given.shape != self.token_ids.shape:
            raise usage("is not laid out as token_ids", name, list(given.shape), list(self.token_ids.shape))
        return given


class Ragged:
    """A sequence of token ids for each of B; values a sequence each, too."""

    def __init__(self, token_ids: Sequence[Any]) -> None:
        rows = [array(f"token_ids/{i}", row) for i, row in enumerate(token_ids)]
        if (bad := next((i for i, row in enumerate(rows) if row.ndim != 1), None)) is not None:
            raise usage("is no sequence of ids", f"token_ids/{bad}", list(rows[bad].shape), "[length]")
        self.token_ids = np.concatenate(rows)
        self.cu_seqlens = np.cumsum([0, *map(len, rows)], dtype=np.int64)

    def flat(self, name: str, values: Any, fill: Any) -> np.ndarray:
        lengths = np.diff(self.cu_seqlens).tolist()
        if hasattr(values, "detach"):
            values = array(name, values)
        if not hasattr(values, "__len__") or getattr(values, "ndim", 1) == 0:
            raise usage("is no list of sequences, as token_ids is", name, type(values).__name__)
        if len(values) != len(lengths):
            raise usage("has another number of sequences than token_ids", name, len(values), len(lengths))
        parts: list[np.ndarray] = []
        for i, (row, length) in enumerate(zip(values, lengths, strict=True)):
            given = array(f"{name}/{i}", row)
            if given.ndim != 1 or len(given) > length:
                raise usage("is longer than its sequence", f"{name}/{i}", list(given.shape), f"[at most {length}]")
            parts += [np.full(length - len(given), fill, given.dtype if given.size else None), given]
        return np.concatenate(parts)


def of(token_ids: Any, attention_mask: Any, cu_seqlens: Any) -> Padded | Flat | Ragged:
    """The layout of what a caller gives. XdError 2 where it cannot be told, and for ids that are no integers."""
    if attention_mask is not None and cu_seqlens is not None:
        raise usage("is given beside attention_mask, and each says whose the tokens are", "cu_seqlens",
                    expected="one of them")  # fmt: skip
    if of_sequences(token_ids) and attention_mask is None:
        if cu_seqlens is not None:
            raise usage("is given beside a list of sequences, which have their own bounds", "cu_seqlens",
                        expected="token_ids [T]")  # fmt: skip
        found: Padded | Flat | Ragged = Ragged(token_ids)
    else:
        ids = array("token_ids", token_ids)
        if ids.ndim == 2 and attention_mask is not None:
            found = Padded(ids, array("attention_mask", attention_mask))
        elif ids.ndim == 1 and cu_seqlens is not None:
            found = Flat(ids, array("cu_seqlens", cu_seqlens))
        else:
            raise usage("which of its cells hold whose tokens is not said", "token_ids", list(ids.shape),
                        "attention_mask for [B, L], cu_seqlens for [T]")  # fmt: skip
    if not np.issubdtype(found.token_ids.dtype, np.integer):
        raise usage("ids are no integers", "token_ids", str(found.token_ids.dtype), "integers")
    empty = np.flatnonzero(np.diff(found.cu_seqlens) == 0)
    if not found.token_ids.size or empty.size:
        raise usage("a sequence without tokens", "token_ids", int(empty[0]) if empty.size else 0, "at least one each")
    return found


def of_sequences(values: Any) -> bool:
    """Whether it is a list of lists, or of arrays."""
    if not isinstance(values, list | tuple) or not values:
        return False
    return isinstance(values[0], list | tuple) or getattr(values[0], "ndim", 0) > 0


def array(name: str, values: Any) -> np.ndarray:
    """A numpy array of a torch tensor, on any device and of any floating-point dtype that has one, or of whatever numpy
    takes. XdError 2 for one that holds something else than numbers, or does not hold them all (a mask, a layout)."""
    if hasattr(values, "detach"):
        try:
            values = values.detach()
            if str(values.dtype) == "torch.bfloat16":  # numpy has none; float32 holds all of its values
                values = values.float()
            values = values.cpu().numpy()
        except (RuntimeError, TypeError) as error:  # sparse, nested, on no device, float8, quantised
            raise usage("is no tensor that numpy can hold", name, f"{values.dtype}, {values.layout}, {values.device}",
                        "a dense one of numbers") from error  # fmt: skip
    if np.ma.isMaskedArray(values):
        raise usage("is a masked array, whose mask would be lost", name, expected=".filled(float('nan'))")
    if of_sequences(values):
        values = [array(f"{name}/{i}", row) for i, row in enumerate(values)]
    try:
        found = np.asarray(values)
    except ValueError as error:  # lists of several lengths
        raise usage("is no array: its rows are of several lengths", name, expected="a rectangle") from error
    if found.dtype == object:
        raise usage("holds what is no number", name, expected="numbers, and NaN for a missing one")
    return found


def truth(name: str, values: np.ndarray) -> np.ndarray:
    """A mask as bool, which may come as numbers. XdError 2 for one that weighs."""
    if values.dtype.kind not in "biuf":
        raise usage("is a mask of true and false, or 1 and 0", name, str(values.dtype), "booleans or numbers")
    if values.dtype != bool and not np.isin(values, (0, 1)).all():
        weight = values[~np.isin(values, (0, 1))][0]
        raise usage("is a mask of true and false, or 1 and 0", name, float(weight), "0 or 1")
    return values.astype(bool)


def usage(what: str, name: str, found: Any = None, expected: Any = None) -> XdError:
    """A wrong argument of `write_scores`."""
    facts = {key: value for key, value in (("found", found), ("expected", expected)) if value is not None}
    return XdError(what, status=Status.USAGE, code="bad-argument", where="write_scores", path=f"/{name}", **facts)
