"""Fixtures shared by all tests: the tools as black boxes, and places of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# as `make run` does: engines of one test run side by side
os.environ.setdefault("OMP_NUM_THREADS", "1")


# pytest hands a test's id to every process the test starts, in PYTEST_CURRENT_TEST, and the kernel takes no variable
# above 128 KiB
LONGEST_ID = 100


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """A long text or byte string is no id: it is named by its argument and its length."""
    return f"{argname}-{len(val)}" if isinstance(val, str | bytes) and len(val) > LONGEST_ID else None


@dataclass(frozen=True)
class Ran:
    """What a tool left: exit status, stdout, stderr."""

    status: int
    out: str
    err: str


class Tools:
    """Runs a tool as a user does, in a process of its own, under the interpreter of the tests."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd

    def __call__(self, tool: str, *arguments: object, stdin: str = "", env: dict[str, str] | None = None) -> Ran:
        done = subprocess.run(
            [ROOT / "tools" / tool, *map(str, arguments)],
            input=stdin, capture_output=True, text=True, cwd=self.cwd, timeout=600,
            env={**os.environ, "XD_PYTHON": sys.executable, **(env or {})},
        )  # fmt: skip
        return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def xd(tmp_path: Path) -> Tools:
    """`xd("xd-plan", config)`: runs in a temporary directory."""
    return Tools(tmp_path)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT
