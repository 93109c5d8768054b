"""Errors that are the user's to mend, and the exit statuses all tools share."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from enum import IntEnum
from itertools import islice
from typing import Any

from libxd.plain import plain, shortened, told_apart


class Status(IntEnum):
    """Exit statuses (sysexits where one fits). 128 + N for a signal is added by the console."""

    DONE = 0
    NO = 1  # only as the answer to a question that was asked
    USAGE = 2
    INVALID = 65
    MISSING = 66
    REFUSED = 69
    BUG = 70
    CONFLICT = 73
    RETRY = 75


_UNSET: Any = object()
MAX_ISSUES = 32  # of one pass that are said; more says nothing new
MAX_COUNTED = 1000  # that are looked for: a file may hold millions
#: characters of a part of a message
_MOST_PLACE, _MOST_TEXT, _MOST_FACT = 400, 2000, 120
_MOST_CHOICES = 300  # what was expected may be a list, and a name that is cut helps nobody


class XdError(ValueError):
    """A mistake in what xd was given; one line on stderr, no traceback.

    `where` is the file, row or attempt; `path` a JSON pointer inside it; `code` a stable kebab-case word for machines;
    `hint` what to do next.
    """

    def __init__(
        self,
        message: str,
        *,
        status: Status = Status.INVALID,
        code: str = "invalid",
        where: str = "",
        path: str = "",
        found: Any = _UNSET,
        expected: Any = _UNSET,
        hint: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = Status(status)
        self.code = code
        self.where = str(where)
        self.path = path
        self.found = found
        self.expected = expected
        self.hint = hint

    @property
    def issues(self) -> list[XdError]:
        return [self]

    def line(self) -> str:
        """`WHERE: WHAT (found …, expected …; hint)`: one line of bounded length, whatever the parts hold."""
        found, expected = self._facts()
        facts = [
            f"{name} {_printed(text, _MOST_CHOICES)}"
            for name, text in (("found", found), ("expected", expected)) if text is not None
        ]  # fmt: skip
        tail = "; ".join(part for part in (", ".join(facts), _one_line(self.hint, _MOST_TEXT)) if part)
        place = _printed(self.where, _MOST_PLACE) + (f"#{_printed(self.path, _MOST_PLACE)}" if self.path else "")
        text = _one_line(self.message, _MOST_TEXT)
        return (f"{place}: " if place else "") + text + (f" ({tail})" if tail else "")

    def record(self) -> dict[str, Any]:
        """The same as one JSON object (`--log-json`, and what a scorer's child hands its parent)."""
        found, expected = self._facts()
        return {
            "level": "error",
            "code": self.code,
            "status": int(self.status),
            "where": shortened(self.where, _MOST_PLACE),
            "path": shortened(self.path, _MOST_PLACE),
            "message": shortened(self.message, _MOST_TEXT),
            "found": found,
            "expected": expected,
            "hint": shortened(self.hint, _MOST_TEXT),
        }

    def _facts(self) -> tuple[str | None, str | None]:
        """found and expected as a person reads them; None for what is not given."""
        found, expected = (None if value is _UNSET else _as_text(value) for value in (self.found, self.expected))
        if found is not None and expected is not None:
            if len(found) <= _MOST_FACT and len(expected) <= _MOST_CHOICES:
                return found, expected
            return told_apart(found, expected, _MOST_FACT)
        return found and shortened(found, _MOST_FACT), expected and shortened(expected, _MOST_FACT)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> XdError:
        facts = {key: record[key] for key in ("found", "expected") if record.get(key) is not None}
        kept = {key: record[key] for key in ("code", "status", "where", "path", "hint")}
        return cls(record["message"], **kept, **facts)


class XdErrors(XdError):
    """Several mistakes found in one pass; the exit status is the first's. Of many, the first few and how many more."""

    def __init__(self, issues: Iterable[XdError]) -> None:
        coming = iter(issues)
        self._issues = list(islice(coming, MAX_ISSUES))
        first = self._issues[0]
        if more := sum(1 for _ in islice(coming, MAX_COUNTED)):
            least = "at least " if more == MAX_COUNTED else ""
            self._issues.append(XdError(f"and {least}{more} more", status=first.status, code="more", where=first.where))
        super().__init__(first.message, status=first.status, code=first.code, where=first.where, path=first.path)

    @property
    def issues(self) -> list[XdError]:
        return self._issues

    def line(self) -> str:
        return "\n".join(issue.line() for issue in self._issues)


#: a place that takes no more bytes; what else the system refuses is taken for something that could not be read,
#: because every writer of files says itself that it could not write (publish.cannot_write)
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


#: what there may be enough of at another time: descriptors, memory, processes
_SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}

#: how torch and its allocators say that memory ran out
_OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "can't allocate memory")


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, of whatever library, says that there is no memory left."""
    said = f"{type(error).__name__}: {error}"
    return isinstance(error, MemoryError) or any(word in said for word in _OUT_OF_MEMORY)


def is_scarce(error: OSError) -> bool:
    """Whether the system refuses for want of descriptors, memory or processes: 75, worth trying again."""
    return error.errno in _SCARCE


def of_exception(error: BaseException, where: str = "") -> XdError:
    """The one way from an exception to a status: what the system refuses is 66 or 73, what is scarce 75 (descriptors,
    memory), the unforeseen 70.

    An XdError is returned as it is. where: what was being worked on, if the system names nothing else.
    """
    if isinstance(error, XdError):
        return error
    if isinstance(error, OSError):
        where = where or _text(error.filename)
        reason = error.strerror or str(error) or type(error).__name__
        if error.filename and _text(error.filename) != where:
            reason += f": {_text(error.filename)}"
        if error.errno in _UNWRITABLE:
            return XdError(f"cannot be written: {reason}", status=Status.CONFLICT, code="cannot-write", where=where)
        status = Status.RETRY if is_scarce(error) else Status.MISSING
        return XdError(f"cannot be read: {reason}", status=status, code="unreadable", where=where)
    if isinstance(error, ValueError) and "null byte" in str(error):  # no system call takes such a path
        return XdError("a path holds a NUL byte", code="bad-path", where=where)
    if isinstance(error, UnicodeDecodeError | UnicodeEncodeError | UnicodeTranslateError):
        return XdError(f"holds text that is none: {error.reason}", code="not-utf8", where=where)
    if isinstance(error, MemoryError):
        return XdError("out of memory", status=Status.RETRY, code="out-of-memory", where=where)
    return bug(error, where)


def bug(error: BaseException, where: str = "") -> XdError:
    """What xd did not foresee, as one line with status 70."""
    detail = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return XdError(
        f"a bug in xd or a broken installation: {detail}",
        status=Status.BUG,
        code="bug",
        where=where,
        hint="XD_DEBUG=1 shows the traceback",
    )


def _text(filename: Any) -> str:
    return os.fsdecode(filename) if isinstance(filename, bytes | str) else str(filename or "")


def _one_line(text: str, most: int) -> str:
    """A text of lines, such as a library's message, in one."""
    return _printed(" ".join(text.split()), most)


def _printed(text: str, most: int) -> str:
    """A part of a line: at most so many characters as they are printed, an escape for one that is not being several."""
    return shortened(plain(shortened(text, most)), most)


def _as_text(value: Any) -> str:
    """JSON where it is JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    except (TypeError, ValueError):
        return repr(value)
