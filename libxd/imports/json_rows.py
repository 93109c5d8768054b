"""The objects of a JSON or JSONL file, one after another, in memory that does not grow with the file.

JSONL has an object a line. Anything else is one object, a list of them, or objects one after another, laid out in any
way, of which no more is held than one. What is no strict JSON (`strictjson`) is refused.
"""

from __future__ import annotations

import codecs
import contextlib
import json
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
_BETWEEN = re.compile(r"[ \t\r\n]*")


def rows(path: Path, notes: Notes) -> Iterator[Row]:
    """The objects as rows. XdError 66 or 65: no such file, no JSON, cut off, no object, none at all."""
    count = 0
    with open_regular(path) as file:
        by_line = path.suffix in _LINES or _first_line_is_whole(file)
        for where, value in _of_lines(file, path) if by_line else _Laid(file, str(path)).objects():
            if not isinstance(value, dict):
                raise XdError("is no JSON object", code="not-an-object", where=where, found=str(value)[:40])
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


def _of_lines(file: BinaryIO, path: Path) -> Iterator[tuple[str, Any]]:
    for where, line in streams.rows(str(path), file, _MOST):
        try:
            yield where, _parsed(line, where)
        except XdError as error:
            if error.code == "not-json" and line[:1] == b"{" and not line.rstrip().endswith(b"}"):
                raise _cut_off(where, "line") from error
            raise


def _parsed(data: bytes, where: str) -> Any:
    """The value, by the parser that is ten times faster unless there is something for the strict one to find.

    Numbers beyond 2^53 or beyond a double are for `Row`, which sees those that are used.
    """
    if len(data) <= _MOST:
        with contextlib.suppress(ValueError, RecursionError, _Suspect):
            return _DECODER.decode(data.decode("utf-8"))
    return _strictly(data, where)


def _strictly(data: bytes | str, where: str) -> Any:
    """What `strictjson` makes of it; of a number that is none it says what to write instead."""
    try:
        return strictjson.loads(data, where, max_bytes=_MOST)
    except XdError as error:
        for issue in error.issues:
            if issue.code == "not-finite":
                issue.hint = "write null where there is no logprob"
        raise


class _Suspect(Exception):
    """Something that is no strict JSON: `strictjson` says what, and where."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _Suspect
    return value


def _constant(text: str) -> Any:
    raise _Suspect


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)
_LENIENT = json.JSONDecoder(parse_int=str)  # of integers that are too long to be read, too
_NEAR = 32  # characters before the end: what is wrong there may only be cut off


def _first_line_is_whole(file: BinaryIO) -> bool:
    """Whether the first line is an object by itself; leaves the file at its beginning."""
    if file.peek(1).lstrip()[:1] != b"{":  # type: ignore[attr-defined]
        return False
    _, line = next(streams.rows("", file, _MOST), ("", b""))
    file.seek(0)
    if not line.rstrip().endswith(b"}"):
        return False
    try:
        return isinstance(_parsed(line, ""), dict)
    except XdError as error:
        return error.code != "not-json"  # whole, and wrong in another way: its line says so


class _Laid:
    """A file of a list of objects, or of objects one after another, over any lines."""

    def __init__(self, file: BinaryIO, where: str) -> None:
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._where = where
        self._text = ""
        self._at = 0
        self._line = 1

    def objects(self) -> Iterator[tuple[str, Any]]:
        """(file and line it begins on, value) of each."""
        if self._next() == "[":
            yield from self._list()
            return
        while self._next():
            yield self._one()

    def _list(self) -> Iterator[tuple[str, Any]]:
        begins = f"{self._where}:{self._line}"
        self._move(self._at + 1)
        mark = self._next()
        while mark and mark != "]":
            yield self._one()
            mark = self._next()
            if mark == ",":
                self._move(self._at + 1)
                mark = self._next()
                if mark == "]":
                    raise self._unexpected("an object was expected after the comma")
            elif mark and mark != "]":
                raise self._unexpected("a comma or the end of the list was expected")
        if not mark:
            raise _cut_off(begins, "list")
        self._move(self._at + 1)
        if self._next():
            raise self._unexpected("nothing was expected after the list")

    def _one(self) -> tuple[str, Any]:
        """(file and line it begins on, value) of the object that begins here."""
        if self._next() != "{":
            raise self._unexpected("an object or a list of objects was expected here")
        where = f"{self._where}:{self._line}"
        return where, self._object(where)

    def _next(self) -> str:
        """The next character that is no space; "" at the end."""
        while True:
            found = _BETWEEN.match(self._text, self._at)
            self._move(found.end() if found else self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _move(self, end: int) -> None:
        self._line += self._text.count("\n", self._at, end)
        self._at = end

    def _more(self, least: int = _CHUNK) -> bool:
        """Read on; what lies behind is let go."""
        data = self._file.read(least)
        try:
            self._text = self._text[self._at :] + self._decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise XdError("not UTF-8", code="not-utf8", where=f"{self._where}, after line {self._line}") from error
        self._at = 0
        return bool(data)

    def _object(self, where: str) -> Any:
        """The object that begins here. What does not end within what was read is tried again with twice as much."""
        decoder = _DECODER
        while True:
            try:
                value, end = decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                unended = error.pos > len(self._text) - _NEAR or error.msg.startswith("Unterminated")
                behind = error.pos - self._at
                if not unended or not self._more(max(_CHUNK, len(self._text) - self._at)):
                    raise self._not_json(error.msg, self._at + behind, where) from error
                if len(self._text) > _MOST:
                    raise XdError("one entry is too large", code="too-large", where=where, expected=f"at most {_MOST} "
                                  "characters", hint="write JSONL, one sequence a line") from error  # fmt: skip
            except (_Suspect, RecursionError, ValueError):  # the last of an integer of more digits than are read
                if decoder is _LENIENT:
                    return _strictly(self._text[self._at :], where)
                decoder = _LENIENT  # to find where it ends
            else:
                text, at = self._text, self._at
                self._move(end)
                return value if decoder is _DECODER else _strictly(text[at:end], where)

    def _not_json(self, what: str, at: int, where: str) -> XdError:
        rest = self._text[at:].strip()
        if not rest or what.startswith("Unterminated"):
            return _cut_off(where, "object")
        line = self._line + self._text.count("\n", self._at, at)
        return XdError(f"not JSON: {what}", code="not-json", where=f"{self._where}:{line}", found=rest[:20])

    def _unexpected(self, what: str) -> XdError:
        return XdError(f"not JSON: {what}", code="not-json", where=f"{self._where}:{self._line}",
                       found=self._text[self._at : self._at + 20])  # fmt: skip


def _cut_off(where: str, what: str) -> XdError:
    return XdError(f"cut off: the {what} that begins here does not end", code="truncated", where=where,
                   hint="was the file still being written?")  # fmt: skip
