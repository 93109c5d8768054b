"""Text as a person reads it: no character that a terminal acts on, no more of it than a line bears, few digits."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

#: columns of a line of text, tables included
WIDTH = 120


def plain(text: str) -> str:
    """`text` with every character that does not print as itself written as an escape: controls, bidirectional marks,
    line separators, bytes that were no UTF-8."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shortened(text: str, most: int) -> str:
    """At most `most` characters of `text`: its beginning and its end, around a mark."""
    if len(text) <= most:
        return text
    tail = most // 3
    return text[: most - tail - 1] + "…" + text[-tail:]


def told_apart(first: str, second: str, most: int) -> tuple[str, str]:
    """Both texts shortened, so that it shows in what they differ."""
    short = shortened(first, most), shortened(second, most)
    if short[0] != short[1] or first == second:
        return short
    common = next(i for i, (a, b) in enumerate(zip(first + "\0", second + "\0", strict=False)) if a != b)
    start = max(0, common - most // 3)
    return shortened("…" + first[start:], most), shortened("…" + second[start:], most)


def number(value: float | None) -> str:
    """Three significant digits; "-" for what is undefined."""
    if value is None:
        return "-"
    mantissa, _, exponent = (f"{value:#.3g}" if value else "0").partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa.rstrip(".")


def value(given: Any) -> str:
    """A knob's value as it stands in a config: true, not True."""
    return str(given).lower() if isinstance(given, bool) else plain(str(given))


def leaves(given: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, value as text) of each leaf of a JSON value, its names joined by dots; a list of words is one leaf."""
    if isinstance(given, dict):
        for key, item in sorted(given.items()):
            yield from leaves(item, f"{path}.{plain(key)}" if path else plain(key))
    elif isinstance(given, list) and all(isinstance(item, str) for item in given):
        yield path, plain(" ".join(given)) or "none"
    elif given is None:
        yield path, "none"
    else:
        yield path, plain(given if isinstance(given, str) else _compact(given))


def _compact(given: Any) -> str:
    return json.dumps(given, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def wrapped(text: str, first: str = "", rest: str | None = None) -> list[str]:
    """`text`, plain, in lines of at most WIDTH columns that begin with `first`, and from the second on with `rest` (of
    as many spaces by default). A word is never broken: paths and commands can be copied."""
    return textwrap.wrap(plain(text), WIDTH, initial_indent=first, break_long_words=False, break_on_hyphens=False,
                         subsequent_indent=" " * len(first) if rest is None else rest)  # fmt: skip


class Footnotes:
    """Reasons below a table, each once, and the mark of each in its cells."""

    def __init__(self) -> None:
        self._notes: list[str] = []

    def mark(self, note: str) -> str:
        """What stands behind the cell: " [1]"; nothing for no note."""
        if not note:
            return ""
        if note not in self._notes:
            self._notes.append(note)
        return f" [{self._notes.index(note) + 1}]"

    def lines(self) -> list[str]:
        return [line for place, note in enumerate(self._notes, 1) for line in wrapped(note, f"[{place}] ", "    ")]
