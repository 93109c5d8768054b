"""One entry of a foreign file: its named fields, each taken by the type it must have, or an error that says where.

A field that is null counts as absent. Nothing is converted that could be meant otherwise: `true` is no integer, "3" is
no number, a text is no list.
"""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from libxd.errors import XdError
from libxd.plain import shortened
from libxd.strictjson import pointer_to

_MOST_ID = 2**31 - 1  # token ids are int32 in a score file
_MOST_INT64 = 2**63 - 1
_MOST_FLOAT32 = float(np.finfo(np.float32).max)
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{16,}={0,2}\s*")
_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxlist, _BRIEF.maxdict, _BRIEF.maxtuple, _BRIEF.maxlong = 3, 20, 5, 20, 60
_PRINTED = re.compile(r"\s*(\[|array\(|tensor\(|<)")


class Notes:
    """What a reader had to say of the values it met, counted: missing ones, rounded ones."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, text: str, count: int = 1) -> None:
        if count:
            self._counts[text] += count

    def lines(self) -> list[str]:
        return [f"{count} {text}" for text, count in self._counts.items()]


class Row:
    """The fields of one entry. `where` names file and line, `index` the row of a file of columns (else None)."""

    def __init__(
        self, fields: Mapping[str, Any], where: str, notes: Notes, pointer: str = "", index: int | None = None
    ) -> None:
        self._fields = fields
        self.where = where
        self.notes = notes
        self._pointer = pointer
        self._index = index

    def __contains__(self, name: str) -> bool:
        return self._fields.get(name) is not None

    @property
    def place(self) -> str:
        """Where the row is, in the file and in the entry."""
        return self.where + (f"#{self._pointer}" if self._pointer else "") + (
            f"[{self._index}]" if self._index is not None else "")  # fmt: skip

    @property
    def names(self) -> Collection[str]:
        """The fields that are there, null or not."""
        return self._fields.keys()

    def error(
        self, name: str | None, message: str, *, at: int | None = None, code: str = "bad-field", **facts: Any
    ) -> XdError:
        """An error about a field (None: about the row), at element `at` of it."""
        place = self._pointer if name is None else pointer_to(self._pointer, name)
        for index in (self._index, at):
            if index is not None:
                place += f"/{index}"
        return XdError(message, code=code, where=self.where, path=place, **facts)

    # -- fields that hold one value

    def need(self, name: str, hint: str = "") -> Any:
        value = self._fields.get(name)
        if value is None:
            there = sorted(key for key in self._fields if isinstance(key, str))
            raise XdError(f"has no {name}" if name not in self._fields else f"{name} is null", code="missing-field",
                          where=self.where, path=self._pointer, found=there[:12], hint=hint)  # fmt: skip
        if isinstance(value, Misfit):
            raise self.error(name, f"{name} has another number of rows than {value.beside}", found=value.rows,
                             expected=value.expected)  # fmt: skip
        return value

    def number(self, name: str) -> float | None:
        """A number that a float32 has room for; None where there is none."""
        if name not in self:
            return None
        value = _scalar(self.need(name))
        if type(value) not in (int, float):
            raise self.error(name, f"{name} is {_kind(value)}, not a number", found=_shown(value))
        if not -_MOST_FLOAT32 <= value <= _MOST_FLOAT32:  # nor is NaN
            raise self.error(name, f"{name} does not fit a float32", found=str(value)[:40])
        return float(value)

    def integer(self, name: str) -> int | None:
        if name not in self:
            return None
        value = _scalar(self.need(name))
        if type(value) is not int:
            raise self.error(name, f"{name} is {_kind(value)}, not an integer", found=_shown(value))
        if abs(value) > _MOST_INT64:
            raise self.error(name, f"{name} does not fit 64 bits", found=str(value)[:40])
        return value

    def text(self, name: str) -> str | None:
        if name not in self:
            return None
        value = self.need(name)
        if not isinstance(value, str):
            raise self.error(name, f"{name} is {_kind(value)}, not a text", found=_shown(value))
        return value

    def key(self, name: str) -> str | int | None:
        """What tells one thing from another: a text or an integer."""
        if name not in self:
            return None
        value = _scalar(self.need(name))
        return value if type(value) is int else self.text(name)

    def row(self, name: str) -> Row:
        """A field that is an object."""
        value = self.need(name)
        if not isinstance(value, Mapping):
            raise self.error(name, f"{name} is {_kind(value)}, not an object", found=_shown(value))
        return Row(value, self.where, self.notes, pointer_to(self._pointer, name))

    def rows(self, name: str) -> Iterator[Row]:
        """A field that is a list of objects."""
        for index, value in enumerate(self.list(name)):
            if not isinstance(value, Mapping):
                raise self.error(name, f"{name} holds {_kind(value)}, not objects alone", at=index)
            yield Row(value, self.where, self.notes, pointer_to(pointer_to(self._pointer, name), index))

    # -- fields that hold a list

    def list(self, name: str, hint: str = "") -> Sequence[Any]:
        """A JSON list, as it is."""
        value = self.need(name, hint)
        if not isinstance(value, list):
            raise self._no_list(name, value)
        return value

    def ids(self, name: str, hint: str = "") -> np.ndarray:
        """Token ids: int64 [n], each of 0 to 2^31 - 1."""
        array = self._array(name, {int}, "integers", hint)
        if array.dtype.kind not in "iu":
            raise self.error(name, f"{name} is {array.dtype}, not integers")
        if array.size and (array.min() < 0 or array.max() > _MOST_ID):
            at = int(np.argmax((array < 0) | (array > _MOST_ID)))
            raise self.error(name, "is no token id", at=at, found=int(array[at]), expected=f"0 to {_MOST_ID}")
        return array.astype(np.int64)

    def floats(self, name: str, length: int | None = None) -> np.ndarray:
        """float32 [n], NaN where the list has null. Numbers that are no float32 are rounded to the nearest, and noted.

        A decimal of up to nine digits is how a float32 is written, and counts as the one that it is nearest to.

        XdError 65 for one beyond float32, and unless n is `length`.
        """
        array = self._array(name, {int, float, type(None)}, "numbers")
        if array.dtype.kind not in "iuf":
            raise self.error(name, f"{name} is {array.dtype}, not numbers")
        with np.errstate(over="ignore"):
            single = array.astype(np.float32)
        whole = isinstance(self._fields[name], np.ndarray)  # binary: an infinity was written as one
        if (lost := np.isinf(single) & (np.isfinite(array) | (not whole))).any():
            at = int(np.argmax(lost))
            raise self.error(name, "does not fit a float32", at=at, found=str(array[at]))
        if array.dtype != np.float32:
            other = (single.astype(np.float64) != array) & ~np.isnan(single)
            if not whole:
                other[other] = ~_is_written(array[other].astype(np.float64), single[other].astype(np.float64))
            self.notes.add(f"values of {name} are no float32 and were rounded to the nearest", int(other.sum()))
        self._require(name, single.size, length)
        return single

    def mask(self, name: str, length: int | None = None) -> np.ndarray:
        """bool [n] of a list of true and false, or of 1 and 0."""
        array = self._array(name, {bool, int, float}, "0 and 1")
        if array.dtype.kind not in "biuf":
            raise self.error(name, f"{name} is {array.dtype}, not a mask")
        if (other := (array != 0) & (array != 1)).any():
            at = int(np.argmax(other))
            raise self.error(name, "is neither 0 nor 1", at=at, found=array[at].item())
        self._require(name, array.size, length)
        return array.astype(bool)

    def _require(self, name: str, found: int, expected: int | None) -> None:
        if expected is not None and found != expected:
            raise self.error(name, f"{name} is of another length than the tokens", found=found, expected=expected)

    def _array(self, name: str, types: set[type], what: str, hint: str = "") -> np.ndarray:
        """The values as an array [n]; of JSON, of `types` alone (null becomes NaN)."""
        value = self.need(name, hint)
        if isinstance(value, np.ndarray):
            if value.ndim != 1:
                raise self.error(name, f"{name} has {value.ndim} dimensions a row", found=list(value.shape),
                                 expected="one number a token")  # fmt: skip
            return value
        if not isinstance(value, list):
            raise self._no_list(name, value)
        if not set(map(type, value)) <= types:
            at = next(index for index, item in enumerate(value) if type(item) not in types)
            raise self.error(name, f"{name} holds {_kind(value[at])}, not {what} alone", at=at, found=_shown(value[at]))
        try:
            if type(None) in types:
                return np.array([np.nan if item is None else item for item in value], np.float64)
            return np.array(value, np.float64 if float in types else np.int64)
        except OverflowError:  # an integer of JSON has any number of digits
            most = _MOST_FLOAT32 if float in types else _MOST_ID
            at = next(index for index, item in enumerate(value) if item is not None and abs(item) > most)
            if float in types:
                raise self.error(name, "does not fit a float32", at=at, found=_shown(value[at])) from None
            raise self.error(name, "is no token id", at=at, found=_shown(value[at]),
                             expected=f"0 to {_MOST_ID}") from None  # fmt: skip

    def _no_list(self, name: str, value: Any) -> XdError:
        if not isinstance(value, str):
            return self.error(name, f"{name} is {_kind(value)}, not a list", found=_shown(value))
        what = "a text"
        if _PRINTED.match(value):
            what = "a printed array"
        elif _BASE64.fullmatch(value):
            what = "base64"
        return self.error(name, f"{name} is {what}, not a list of numbers", found=_shown(value),
                          hint="write it as a JSON list (.tolist())")  # fmt: skip


class Misfit:
    """A column that has another number of rows than the file's others: an error once somebody asks for it."""

    def __init__(self, rows: int, expected: int, beside: str) -> None:
        self.rows = rows
        self.expected = expected
        self.beside = beside


def _is_written(values: np.ndarray, single: np.ndarray) -> np.ndarray:
    """Whether each is a decimal of up to nine digits, which tell any two float32 apart, beside the float32 that it is
    for. float64 [n] each; bool [n]."""
    magnitude = np.abs(values)
    beside = np.abs(single - values) <= 2.0**-24 * magnitude  # not so where it became 0, or subnormal
    magnitude = np.where(beside, magnitude, 1.0)
    digits = magnitude * 10.0 ** (8 - np.floor(np.log10(magnitude)))
    # of 10^8 to 10^9: what their rounding to float64 may leave
    return beside & (np.abs(digits - np.rint(digits)) <= 1e-6)


def _scalar(value: Any) -> Any:
    """A number that came as an array without dimensions."""
    if isinstance(value, np.generic | np.ndarray) and value.ndim == 0:
        return value.item()
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return "a text"
    names = {bool: "true or false", int: "an integer", float: "a number", list: "a list",
             dict: "an object"}  # fmt: skip
    return names.get(type(value), f"a {type(value).__name__}")


def _shown(value: Any) -> str:
    """The beginning of a value. What was unpickled may hold itself, or one list ten times over and over."""
    return shortened(_BRIEF.repr(value) if not isinstance(value, str) else value, 60)
