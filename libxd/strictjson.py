"""JSON read strictly: what two readers could understand differently is refused.

Duplicate keys, NaN and Infinity, numbers that overflow to infinity, bytes that are no UTF-8, files and nesting beyond a
cap: each an XdError, with the JSON pointer of the place where there is one.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from itertools import chain
from typing import Any

from libxd.errors import Status, XdError, XdErrors, of_exception
from libxd.plain import shortened

MAX_BYTES = 64 << 20  # of one JSON file or one JSONL row
MAX_DEPTH = 64


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
    _check_depth(data, where)
    try:
        value = json.loads(
            data, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_integer
        )
    except json.JSONDecodeError as error:
        raise XdError(
            f"not JSON: {error.msg} at line {error.lineno} column {error.colno}", code="not-json", where=where
        ) from error
    flaws = _flaws(value, "")
    if (first := next(flaws, None)) is not None:
        raise XdErrors(
            XdError(flaw.what, code=flaw.code, where=where, path=pointer) for pointer, flaw in chain([first], flaws)
        )
    return value


class _Flaw:
    """What must not be in strict JSON, left in its place until the walk knows its pointer."""

    def __init__(self, code: str, what: str) -> None:
        self.code = code
        self.what = what


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
    return _Flaw("not-finite", f"{text} is not JSON")


def _float(text: str) -> float | _Flaw:
    value = float(text)
    return value if math.isfinite(value) else _Flaw("not-finite", f"{text[:40]} does not fit a 64-bit float")


def _integer(text: str) -> int | _Flaw:
    # Beyond 2^53 a reader with doubles sees another number (RFC 8785 section 3.2.2.3): such values travel as strings.
    if len(text) > 17 or abs(int(text)) > 2**53 - 1:
        return _Flaw("integer-too-large", f"integer {text[:40]} is beyond 2^53 - 1; write it as a string")
    return int(text)


def _flaws(value: Any, pointer: str) -> Iterator[tuple[str, _Flaw]]:
    if isinstance(value, _Flaw):
        yield pointer, value
    elif isinstance(value, dict):
        if isinstance(value, _Repeated):
            yield (
                pointer_to(pointer, value.key),
                _Flaw("duplicate-key", f"key {shortened(repr(value.key), 80)} stands twice in one object"),
            )
        for key, item in value.items():
            if not _encodable(key):
                yield pointer, _Flaw("not-utf8", "a key holds half of a surrogate pair")
            elif not isinstance(item, int):
                yield from _flaws(item, pointer_to(pointer, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if not isinstance(item, int):
                yield from _flaws(item, f"{pointer}/{index}")
    elif isinstance(value, str) and not _encodable(value):
        yield pointer, _Flaw("not-utf8", "a string holds half of a surrogate pair")


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


def _check_depth(text: str, where: str) -> None:
    """Refuse deep nesting before the parser recurses into it."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth, in_string, escaped = 0, False, False
    for char in text:
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise XdError(
                    "JSON is nested too deeply",
                    code="too-deep",
                    where=where,
                    found=f"over {MAX_DEPTH} levels",
                    expected=f"at most {MAX_DEPTH}",
                )
        elif char in "]}":
            depth -= 1
