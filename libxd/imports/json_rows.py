"""The objects of a JSON or JSONL file, one after another, in memory that does not grow with the file.

JSONL has an object a line. Anything else is one object, a list of them, or objects one after another, laid out in any
way: each is cut out by its brackets and parsed by itself. Parsing is strict (`strictjson`).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from libxd import streams, strictjson
from libxd.errors import Status, XdError, of_exception
from libxd.imports.rows import Notes, Row

_LINES = (".jsonl", ".ndjson")
_CHUNK = 1 << 20
_MOST = strictjson.MAX_BYTES  # of one object
_MARKS = re.compile(rb'["{}\[\]]')
_IN_STRING = re.compile(rb'["\\]')
_BETWEEN = b" \t\r\n,"


def rows(path: Path, notes: Notes) -> Iterator[Row]:
    """The objects as rows. XdError 66 or 65: no such file, no JSON, cut off, no object, none at all."""
    count = 0
    for line, data in _entries(path):
        where = f"{path}:{line}"
        try:
            value = strictjson.loads(data, where, max_bytes=_MOST)
        except XdError as error:
            raise _cut_off(error, data, where) from error
        if not isinstance(value, dict):
            raise XdError("is no JSON object", code="not-an-object", where=where, found=_first(value))
        count += 1
        yield Row(value, where, notes)
    if not count:
        raise XdError("holds no entry", code="empty", where=str(path))


def open_regular(path: Path) -> BinaryIO:
    """A regular file, open for reading. XdError 66 when it is not there, 65 when it is no file of bytes."""
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except FileNotFoundError as error:
        raise XdError("no such file", status=Status.MISSING, code="missing", where=str(path)) from error
    except OSError as error:
        raise of_exception(error, str(path)) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise XdError("not a regular file", code="not-a-file", where=str(path))
    return file


def _entries(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line it begins on, its bytes) of each entry."""
    with open_regular(path) as file:
        if path.suffix in _LINES or _first_line_is_whole(file):
            for place, data in streams.rows(str(path), file, _MOST):
                yield int(place.rpartition(":")[2]), data
        else:
            yield from _Cutter(file, str(path)).entries()


def _first_line_is_whole(file: BinaryIO) -> bool:
    """Whether the first line is an object by itself; leaves the file at its beginning."""
    if file.peek(1).lstrip()[:1] != b"{":  # type: ignore[attr-defined]
        return False
    _, line = next(streams.rows("", file, _MOST), ("", b""))
    file.seek(0)
    if not line.rstrip().endswith(b"}"):
        return False
    try:
        return isinstance(strictjson.loads(line, "", max_bytes=_MOST), dict)
    except XdError as error:
        return error.code != "not-json"  # whole, and wrong in another way: its line says so


class _Cutter:
    """The objects between an outer pair of brackets, or beside one another, by counting brackets outside of strings."""

    def __init__(self, file: BinaryIO, where: str) -> None:
        self._file = file
        self._where = where
        self._buffer = b""
        self._position = 0
        self._line = 1

    def entries(self) -> Iterator[tuple[int, bytes]]:
        """(line it begins on, its bytes) of each."""
        listed: int | None = None  # the line that a list begins on, until it ends
        first = True
        while (mark := self._next()) is not None:
            if mark == b"[" and first:
                listed = self._line
                self._position += 1
            elif mark == b"]" and listed is not None:
                self._position += 1
                if self._next() is not None:
                    raise self._unexpected("nothing was expected after the list")
                return
            elif mark == b"{":
                line, entry = self._line, self._object()
                self._line += entry.count(b"\n")
                yield line, entry
            else:
                raise self._unexpected("an object or a list of objects was expected here")
            first = False
        if listed is not None:
            raise _truncated(f"{self._where}:{listed}", "the list")

    def _next(self) -> bytes | None:
        """The next byte that is neither space nor comma; None at the end."""
        while True:
            while (mark := self._buffer[self._position : self._position + 1]) and mark in _BETWEEN:
                self._line += mark == b"\n"
                self._position += 1
            if mark:
                return mark
            if not self._more():
                return None

    def _more(self) -> bool:
        """Read on; what lies behind is let go."""
        more = self._file.read(_CHUNK)
        self._buffer = self._buffer[self._position :] + more
        self._position = 0
        return bool(more)

    def _object(self) -> bytes:
        depth, at, in_string = 0, self._position, False
        while True:
            found = (_IN_STRING if in_string else _MARKS).search(self._buffer, at)
            if found is None:
                at = self._read_on(max(at, len(self._buffer)))
            elif in_string and found[0] == b"\\":
                at = found.end() + 1  # what is escaped may still be to come; searching past the end finds nothing
            elif found[0] == b'"':
                in_string, at = not in_string, found.end()
            else:
                depth, at = depth + (1 if found[0] in b"{[" else -1), found.end()
                if depth == 0:
                    entry = self._buffer[self._position : at]
                    self._position = at
                    return entry

    def _read_on(self, at: int) -> int:
        """Where `at` is, once more has been read. XdError 65: there is no more, or it is too much for one entry."""
        at -= self._position
        if not self._more():
            raise _truncated(f"{self._where}:{self._line}", "the object")
        if len(self._buffer) > _MOST + _CHUNK:
            raise XdError("one entry is too large", code="too-large", where=f"{self._where}:{self._line}",
                          expected=f"at most {_MOST} bytes", hint="write JSONL, one sequence a line")  # fmt: skip
        return at

    def _unexpected(self, what: str) -> XdError:
        text = self._buffer[self._position : self._position + 20].decode("utf-8", "backslashreplace")
        return XdError(f"not JSON: {what}", code="not-json", where=f"{self._where}:{self._line}", found=text)


def _truncated(where: str, what: str) -> XdError:
    return XdError(f"cut off: the file ends before {what} that begins here does", code="truncated", where=where,
                   hint="was the file still being written?")  # fmt: skip


def _cut_off(error: XdError, data: bytes, where: str) -> XdError:
    """The same error, or a plainer one where an entry just stops."""
    if error.code == "not-json" and not data.rstrip().endswith((b"}", b"]")) and data.lstrip()[:1] in (b"{", b"["):
        return XdError("cut off: the entry ends before its last bracket", code="truncated", where=where,
                       hint="was the file still being written?")  # fmt: skip
    return error


def _first(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:40]}"
