"""The paths that a scorer is given, as they come or all at once.

In a pipe of two sides the first one's engine lives until its input ends. A side that finds no room for its own engine
reads its input to the end first: by then the other side has finished and given its memory back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator


class Intake:
    """Lines that are handed on as they come, or read to the end first."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._coming = iter(lines)
        self._read: deque[str] = deque()

    def __iter__(self) -> Iterator[str]:
        while True:
            if self._read:
                yield self._read.popleft()
                continue
            try:
                yield next(self._coming)
            except StopIteration:
                return

    def read_to_end(self) -> None:
        """Wait until whoever writes the lines has finished."""
        self._read.extend(self._coming)
