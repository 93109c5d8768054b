"""JSON read strictly: what two readers could understand differently is refused.

Duplicate keys, NaN and Infinity, numbers that overflow to infinity, bytes that are no UTF-8, files, nesting and numbers
of lists and objects beyond a cap: each an XdError, with the JSON pointer of the place where there is one. Whatever the
bytes are, time grows with their number, and what is made of them takes at most some 32 times their room.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import chain
from typing import Any

from libxd.errors import Status, XdError, XdErrors, of_exception
from libxd.plain import shortened

MAX_BYTES = 64 << 20  # of one JSON file or one JSONL row
MAX_DEPTH = 64
MAX_CONTAINERS = 1 << 22  # lists and objects: an empty one takes three bytes of a file, and 90 of memory

#: what opens and closes, and whole strings, so that what stands in them is neither
_STRUCTURE = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)


def load(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> Any:
    """The JSON value of a file. XdError 66 when it is not there, 65 when it is not strict JSON."""
    return loads(read_bytes(path, max_bytes=max_bytes), str(path), max_bytes=max_bytes)


def read_bytes(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> bytes:
    """A regular file's bytes, never more than the cap."""
    where = str(path)
    try:
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise XdError("not a regular file", code="not-a-file", where=where)
            data = file.read(min(about.st_size, max_bytes) + 1)  # a read sets aside all that it may return
    except FileNotFoundError as error:
        raise XdError("no such file", status=Status.MISSING, code="missing", where=where) from error
    except (IsADirectoryError, NotADirectoryError) as error:
        raise XdError("not a file", status=Status.MISSING, code="missing", where=where) from error
    except OSError as error:
        raise of_exception(error, where) from error
    if len(data) > max_bytes:
        raise XdError(
            "file is too large",
            code="too-large",
            where=where,
            found=f"over {max_bytes} bytes",
            expected=f"at most {max_bytes}",
        )
    return data


def loads(data: bytes | str, where: str, *, max_bytes: int = MAX_BYTES) -> Any:
    """The JSON value of some bytes; `where` names them in errors."""
    if len(data) > max_bytes:
        raise XdError(
            "JSON is too large", code="too-large", where=where, found=f"{len(data)} bytes", expected=max_bytes
        )
    if isinstance(data, bytes):
        try:
            data = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise XdError(f"not UTF-8 at byte {error.start}", code="not-utf8", where=where) from error
    if data.startswith("\ufeff"):
        raise XdError("begins with a byte order mark, which JSON has not", code="not-json", where=where,
                      hint="save it as UTF-8 without one")  # fmt: skip
    _check_structure(data, where)
    try:
        value = json.loads(
            data, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_integer
        )
    except json.JSONDecodeError as error:
        raise XdError(
            f"not JSON: {error.msg} at line {error.lineno} column {error.colno}", code="not-json", where=where
        ) from error
    flaws = _flaws(value)
    if (first := next(flaws, None)) is not None:
        raise XdErrors(
            XdError(flaw.what, code=flaw.code, where=where, path=reduce(pointer_to, place, ""))
            for place, flaw in chain([first], flaws)
        )
    return value


@dataclass(slots=True)
class _Flaw:
    """What must not be in strict JSON, left in its place until the walk knows its pointer: there may be millions."""

    code: str
    text: str  # that is at fault, shortened
    why: str = ""

    @property
    def what(self) -> str:
        return f"{self.text} {self.why}" if self.why else self.text


_flaw = lru_cache(maxsize=1024)(_Flaw)  # the same ones over and over


class _Repeated(dict):
    """An object in which `key` stood more than once."""

    key: str


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    marked = _Repeated(value)
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            marked.key = name
            break
        seen.add(name)
    return marked


def _constant(text: str) -> _Flaw:
    return _flaw("not-finite", text, "is not JSON")


def _float(text: str) -> float | _Flaw:
    value = float(text)
    return value if math.isfinite(value) else _flaw("not-finite", text[:40], "does not fit a 64-bit float")


def _integer(text: str) -> int | _Flaw:
    # Beyond 2^53 a reader with doubles sees another number (RFC 8785 section 3.2.2.3): such values travel as strings.
    if len(text) > 17 or abs(int(text)) > 2**53 - 1:
        return _flaw("integer-too-large", f"integer {text[:40]}", "is beyond 2^53 - 1; write it as a string")
    return int(text)


def _flaws(value: Any) -> Iterator[tuple[tuple[str | int, ...], _Flaw]]:
    """The flaws of a value, each with the keys that lead to it, put together where there is one: a key may be long, and
    what lies below it many."""
    if isinstance(value, _Flaw):
        yield (), value
    elif isinstance(value, dict):
        if isinstance(value, _Repeated):
            key = shortened(repr(value.key), 80)
            yield (value.key,), _Flaw("duplicate-key", f"key {key}", "stands twice in one object")
        for key, item in value.items():
            if not _encodable(key):
                yield (), _Flaw("not-utf8", "a key holds half of a surrogate pair")
            elif not isinstance(item, _SOUND):
                for place, flaw in _flaws(item):
                    yield (key, *place), flaw
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if not isinstance(item, _SOUND):
                for place, flaw in _flaws(item):
                    yield (index, *place), flaw
    elif isinstance(value, str) and not _encodable(value):
        yield (), _Flaw("not-utf8", "a string holds half of a surrogate pair")


#: what is no flaw and holds none
_SOUND = (int, float, type(None))


def _encodable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def pointer_to(parent: str, key: str | int) -> str:
    """The JSON pointer (RFC 6901) of a member of the place that `parent` points to."""
    return f"{parent}/{str(key).replace('~', '~0').replace('/', '~1')}"


def _check_structure(text: str, where: str) -> None:
    """Refuse deep nesting, and more lists and objects than there is room for, before the parser makes any."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = containers = 0
    for found in _STRUCTURE.finditer(text):
        mark = text[found.start()]
        if mark in "[{":
            depth += 1
            containers += 1
            if depth > MAX_DEPTH:
                raise XdError("JSON is nested too deeply", code="too-deep", where=where,
                              found=f"over {MAX_DEPTH} levels", expected=f"at most {MAX_DEPTH}")  # fmt: skip
            if containers > MAX_CONTAINERS:
                raise XdError("JSON holds too many lists and objects", code="too-many", where=where,
                              found=f"over {MAX_CONTAINERS}", expected=f"at most {MAX_CONTAINERS}")  # fmt: skip
        elif mark in "]}":
            depth -= 1
