"""Errors that are the user's to mend, and the exit statuses all tools share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import IntEnum
from typing import Any


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
        """`WHERE: WHAT (found …, expected …; hint)`."""
        facts = []
        if self.found is not _UNSET:
            facts.append(f"found {_short(self.found)}")
        if self.expected is not _UNSET:
            facts.append(f"expected {_short(self.expected)}")
        tail = "; ".join(part for part in (", ".join(facts), self.hint) if part)
        place = self.where + (f"#{self.path}" if self.path else "")
        text = (f"{place}: " if place else "") + self.message + (f" ({tail})" if tail else "")
        return " ".join(text.split())  # one line, whatever the parts held

    def record(self) -> dict[str, Any]:
        """The same as one JSON object (`--log-json`, and what a scorer's child hands its parent)."""
        return {
            "level": "error",
            "code": self.code,
            "status": int(self.status),
            "where": self.where,
            "path": self.path,
            "message": self.message,
            "found": None if self.found is _UNSET else _short(self.found),
            "expected": None if self.expected is _UNSET else _short(self.expected),
            "hint": self.hint,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> XdError:
        facts = {key: record[key] for key in ("found", "expected") if record.get(key) is not None}
        kept = {key: record[key] for key in ("code", "status", "where", "path", "hint")}
        return cls(record["message"], **kept, **facts)


class XdErrors(XdError):
    """Several mistakes found in one pass; the exit status is the first's."""

    def __init__(self, issues: Iterable[XdError]) -> None:
        self._issues = list(issues)
        first = self._issues[0]
        super().__init__(first.message, status=first.status, code=first.code, where=first.where, path=first.path)

    @property
    def issues(self) -> list[XdError]:
        return self._issues

    def line(self) -> str:
        return "\n".join(issue.line() for issue in self._issues)


def _short(value: Any, limit: int = 120) -> str:
    """A value as a person reads it: JSON where it is JSON, cut where it is long."""
    if isinstance(value, str):
        text = value
    else:
        try:
            text = json.dumps(value, ensure_ascii=False, sort_keys=True)
        except (TypeError, ValueError):
            text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
