"""The standard streams, whatever the caller made of them: closed, full, a folder, or of an encoding that is not text's.

Results and operands are bytes: paths are written as they were read, JSON is UTF-8.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import BinaryIO

from libxd.errors import Status, XdError

_PATH_BYTES = 1 << 12  # PATH_MAX: a longer line is no path of this system
_BLOCK = 1 << 16


class StdoutLost(XdError):
    """Nothing more can be said on stdout: 73, once, and the tool ends."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=Status.CONFLICT, code="cannot-write", where="stdout")


def make_sound() -> None:
    """Fill descriptors 0 to 2 where they are closed, before a file or a pipe gets one of them.

    What fills stdin cannot be read, what fills stdout cannot be written. sys.stdin and sys.stdout stay None then.
    """
    for descriptor, way in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, way)  # gets the lowest that is free
            os.set_inheritable(descriptor, True)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  (for those who ask what it is)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def require_stdout() -> None:
    """StdoutLost where there is none, before anything is made that nobody would be told of."""
    if sys.stdout is None:
        raise StdoutLost("is closed")


def write_line(line: str | bytes) -> None:
    """A line on stdout, at once. StdoutLost when it takes nothing more; BrokenPipeError when nobody reads."""
    require_stdout()
    try:
        sys.stdout.buffer.write((os.fsencode(line) if isinstance(line, str) else line) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StdoutLost(f"cannot be written: {error.strerror}") from error


def say(text: str) -> None:
    """A line on stderr if it takes one: that it does not changes nothing about the work."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:
        _silence(2)


def silence_stdout() -> None:
    """Keep the interpreter's own flush at exit from complaining about a stdout that takes nothing more."""
    _silence(1)


def _silence(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # as when no descriptor is free: it stays what it is
        nothing = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nothing, descriptor)
        finally:
            os.close(nothing)


def stdin() -> BinaryIO | None:
    """stdin, if it is there and no terminal. XdError 66: it is closed."""
    if sys.stdin is None:
        raise XdError("is closed", status=Status.MISSING, code="unreadable", where="stdin")
    return None if sys.stdin.isatty() else sys.stdin.buffer


def paths(file: BinaryIO) -> Iterator[str]:
    """The non-blank lines as paths, as they come; what is not UTF-8 is escaped as `os.fsdecode` does."""
    for _, line in _lines(file, _PATH_BYTES):
        yield os.fsdecode(line)


def rows(name: str, file: BinaryIO, most: int) -> Iterator[tuple[str, bytes]]:
    """(place, line) of the non-blank lines, as they come; one with more than `most` bytes is cut off just past them."""
    for number, line in _lines(file, most):
        yield f"{name}:{number}", line


def _lines(file: BinaryIO, most: int) -> Iterator[tuple[int, bytes]]:
    """(number, line without its end) of the non-blank lines, each as soon as it is complete.

    Of one with more than `most` bytes, most + 1 are given and the rest is read past, in constant memory.
    """
    number = 0
    while line := file.readline(most + 1):
        number += 1
        whole = line.endswith(b"\n") or len(line) <= most
        if line.strip():
            yield number, line.rstrip(b"\r\n") if whole else line
        while not whole and (rest := file.readline(_BLOCK)):
            whole = rest.endswith(b"\n")
