"""The tools, one module each. What is installed as `xd-<name>` starts here.

`run` keeps the promise that exit status 1 only ever means "no": a module that cannot be imported is status 70 and one
line, not the interpreter's traceback and 1.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from typing import NoReturn

TOOLS = ("rollout", "plan", "resume", "materialize", "score", "compare", "seal")


def run(tool: str) -> NoReturn:
    """Run the tool `xd-<tool>` with this process's arguments."""
    try:
        module = importlib.import_module(f"libxd.cmd.{tool}")
    except ImportError as error:
        if os.environ.get("XD_DEBUG") == "1":
            raise
        sys.stderr.write(f"xd-{tool}: cannot be imported: {error} (run `make setup`, or install the package again)\n")
        sys.exit(70)
    module.main()


def __getattr__(name: str) -> partial[NoReturn]:
    """Entry points `libxd.cmd:xd_plan` … (they are looked up before any tool's module is imported)."""
    tool = name.removeprefix("xd_")
    if name.startswith("xd_") and tool in TOOLS:
        return partial(run, tool)
    raise AttributeError(name)
