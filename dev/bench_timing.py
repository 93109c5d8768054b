"""Wall time, memory and ratios: two commands in turn, so that both meet the same machine."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: one thread an engine: its matrices are small, and more threads would wait for one another; bytecode kept, as users do
ENVIRONMENT = {**os.environ, "XD_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}


@dataclass(frozen=True)
class Result:
    """One line of the table. A ratio above `limit` is not met; `detail` says what was set beside what.

    No ratio: it was not run, and `detail` says why.
    """

    what: str
    ratio: float | None
    limit: float
    detail: str

    @property
    def failed(self) -> bool:
        return self.ratio is not None and self.ratio > self.limit

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "not run"
        return "not met" if self.failed else "met"


def tool(name: str, *arguments: object) -> list[str]:
    """A tool as a user calls it."""
    return [str(ROOT / "tools" / name), *map(str, arguments)]


def output(command: Sequence[str], stdin: bytes = b"") -> bytes:
    """The stdout of a process that must succeed."""
    return subprocess.run(command, input=stdin, stdout=subprocess.PIPE, env=ENVIRONMENT, check=True).stdout


def run(command: Sequence[str]) -> tuple[float, int]:
    """Wall time in seconds, and the largest resident memory in bytes, of one process that must succeed."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"bench: status {process.returncode} from: {' '.join(command)}")
    return wall_s, usage.ru_maxrss * 1024


def ratio(times: int, measured: Callable[[], float], reference: Callable[[], float]) -> tuple[float, float, float]:
    """Medians over `times` turns: of measured / reference in one turn, of measured, of reference (seconds)."""
    turns = [(measured(), reference()) for _ in range(times)]
    ratios = [ours / theirs for ours, theirs in turns]
    return statistics.median(ratios), *(statistics.median(column) for column in zip(*turns, strict=True))
