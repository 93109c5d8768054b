"""The tools, one module each. What is installed as `xd-<name>` starts here, and so does what stands in tools/.

`run` keeps the promise that exit status 1 only ever means "no": a module that cannot be imported is status 70 and one
line, not the interpreter's traceback and 1.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from functools import partial
from typing import NoReturn

TOOLS = (
    "rollout", "plan", "resume", "materialize", "score", "compare", "seal", "ladder", "impact", "import", "doctor",
    "bisect", "report",
)  # fmt: skip


def run(tool: str) -> NoReturn:
    """Run the tool `xd-<tool>` with this process's arguments."""
    try:
        from libxd import signals, streams

        signals.by_default()
        streams.make_sound()
        gc.disable()  # nothing that is imported is garbage, now or later
        module = importlib.import_module(f"libxd.cmd.{tool}")
        gc.freeze()
        gc.enable()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # an import runs all of a package that may be broken in any way
        if os.environ.get("XD_DEBUG") == "1":
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())
        line = f"xd-{tool}: cannot be imported: {what} (run `make setup`, or install the package again)\n"
        with contextlib.suppress(OSError):  # a full or closed stderr
            os.write(2, line.encode(errors="backslashreplace"))
        sys.exit(70)
    module.main()


def __getattr__(name: str) -> partial[NoReturn]:
    """Entry points `libxd.cmd:xd_plan` … (they are looked up before any tool's module is imported)."""
    tool = name.removeprefix("xd_")
    if name.startswith("xd_") and tool in TOOLS:
        return partial(run, tool)
    raise AttributeError(name)
