"""Runs a tool in a process of its own with a fault at one of its file operations: dev/torture/faults.c from Python.

`under_faults` starts the program that calls it anew with the library loaded. `Tool` then forks a child a run: the
interpreter, libxd and torch are there already, so a run takes as long as its work, and a thousand take minutes. What
the child runs is the tool's own entry; the scorer's child is forked from it where it would have been started.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libxd import publish

SOURCE = Path(__file__).resolve().parent.parent / "dev" / "torture" / "faults.c"

#: the numbers of `enum action`
NONE, KILL_BEFORE, KILL_AFTER, FAIL, FAIL_FROM, TEAR, SHORT = range(7)
KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Fault:
    """What happens at operation number `at` (from 1) of the process `role`.

    parameter: of FAIL and FAIL_FROM the errno, of TEAR and SHORT how many thousandths of the bytes are written.
    only: the operations that FAIL_FROM fails, from `at` on. role: "tool", or "child" for the scorer's. traced: of
    which of the two the operations are written down.
    """

    action: int = NONE
    at: int = 0
    parameter: int = 0
    only: tuple[str, ...] = ()
    role: str = "tool"
    traced: tuple[str, ...] = ()


#: nothing
UNDISTURBED = Fault()


@dataclass(frozen=True)
class Operation:
    """A line of the trace; `result` is -1 for one that failed."""

    number: int
    name: str
    path: str
    other: str
    result: int

    @property
    def stream(self) -> bool:
        """Whether it is on a standard stream or a pipe, and no file's."""
        return self.path.startswith("<")


@dataclass(frozen=True)
class Ran:
    """status: of the exit; negative: the signal that killed it."""

    status: int
    out: bytes
    err: str
    trace: tuple[Operation, ...] = ()


def temporary(place: str) -> bool:
    """Whether a path bears the name of a file that is being written."""
    return os.path.basename(place).startswith(publish.TEMPORARY_PREFIX)


def errors_of(operation: Operation) -> tuple[int, ...]:
    """The errnos by which a system refuses this operation."""
    name, path = operation.name, operation.path
    if path == "<pipe>":
        return ()
    if path.startswith("<"):
        return (errno.EIO, errno.ENOSPC) if name == "write" else (errno.EIO,)
    if name == "close":  # of what was written: a network file system may say only here that it could not
        return (errno.EIO, errno.ENOSPC, errno.EDQUOT) if temporary(path) else ()
    if name in ("open", "open-directory", "list"):
        return (errno.EIO, errno.EMFILE)
    if name in ("read", "truncate"):
        return (errno.EIO,)
    if name in ("unlink", "rmdir"):
        return (errno.EIO, errno.EROFS)
    full = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
    if name in ("write", "fsync"):
        return full
    return (*full, errno.EROFS, *((errno.EMFILE,) if name == "create" else ()))


CHANGING = ("create", "write", "fsync", "link", "rename", "symlink", "mkdir", "unlink", "rmdir", "truncate")
FULL = ("create", "write", "link", "rename", "symlink", "mkdir")
READ_ONLY = ("create", "link", "rename", "symlink", "mkdir", "unlink", "rmdir")


def under_faults() -> None:
    """Start this program anew with the library loaded, unless it is. What it starts in turn does not get it."""
    if hasattr(ctypes.CDLL(None), "faults_arm"):
        os.unlink(os.environ.pop("LD_PRELOAD"))
        return
    descriptor, library = tempfile.mkstemp(suffix=".so")
    os.close(descriptor)
    subprocess.run([os.environ.get("CC", "cc"), "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    os.environ["LD_PRELOAD"] = library
    os.execv(sys.executable, [sys.executable, "-P", *sys.argv])


class Injector:
    """Forks tools whose file operations below `root` count. scratch: for their streams and traces, elsewhere."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root = root
        self.scratch = scratch
        self._library = ctypes.CDLL(None)
        scratch.mkdir(exist_ok=True)

    def run(
        self, tool: str, arguments: Sequence[object] = (), stdin: bytes = b"", fault: Fault = UNDISTURBED,
        before: Callable[[], None] = lambda: None,
    ) -> Ran:  # fmt: skip
        """Run xd-<tool>. before: called in its process first, to set a limit or to spoil what is about to be done."""
        files = {name: self.scratch / name for name in ("stdin", "stdout", "stderr", "trace")}
        for path in files.values():
            path.write_bytes(b"")
        files["stdin"].write_bytes(stdin)
        pid = os.fork()
        if pid == 0:
            _leave(lambda: self._become(tool, arguments, files, fault, before))
        _, ended = os.waitpid(pid, 0)
        trace = (line.split("\t") for line in files["trace"].read_text().splitlines())
        return Ran(
            os.waitstatus_to_exitcode(ended), files["stdout"].read_bytes(), files["stderr"].read_text(),
            tuple(Operation(int(number), *words, int(result)) for number, *words, result in trace),
        )  # fmt: skip

    def _become(
        self, tool: str, arguments: Sequence[object], files: dict[str, Path], fault: Fault, before: Callable[[], None]
    ) -> None:
        from libxd import cmd
        from libxd.scoring import process

        for number, name in enumerate(("stdin", "stdout", "stderr")):
            descriptor = os.open(files[name], os.O_RDWR | os.O_APPEND)
            os.dup2(descriptor, number)
            os.close(descriptor)
        _fresh_streams()
        sys.argv = [f"xd-{tool}", *map(str, arguments)]

        def arm(role: str, first: bool = True) -> None:
            if role == fault.role or role in fault.traced:
                words = f",{','.join(fault.only)}," if fault.only else ""
                self._library.faults_arm(
                    os.fsencode(self.root), os.fsencode(files["trace"]) if role in fault.traced else b"",
                    ctypes.c_long(fault.at), fault.action if role == fault.role and first else NONE, fault.parameter,
                    words.encode(),
                )  # fmt: skip

        process.subprocess.Popen = _forking(arm)  # of this process alone
        before()
        arm("tool")
        cmd.run(tool)


def _forking(arm: Callable[[str, bool], None]) -> type[subprocess.Popen[bytes]]:
    """A Popen that forks the scorer's child instead of starting an interpreter for it. The first one is disturbed."""
    started: list[int] = []

    class Forking(subprocess.Popen):  # type: ignore[type-arg]
        def _execute_child(self, command: Any, *given: Any) -> None:
            pass_fds, pipes, group = given[3], given[9:15], given[-1]
            self.pid = os.fork()
            if self.pid == 0:
                if group is not None:
                    os.setpgid(0, group)
                for descriptor, number in zip((pipes[0], pipes[3], pipes[5]), range(3), strict=True):
                    os.dup2(descriptor, number)
                for number in range(3, 200):  # the trace of the tool has a number above
                    if number not in pass_fds:
                        _close_quietly(number)
                _leave(lambda: _scorers_child(command, lambda: arm("child", not started)))
            started.append(self.pid)
            self._child_created = True
            self._close_pipe_fds(*pipes)

    return Forking


def _scorers_child(command: Sequence[str], arm: Callable[[], None]) -> None:
    from libxd.scoring import child

    _fresh_streams()
    sys.argv = ["child", *command[command.index("--side") :]]
    arm()
    sys.exit(child.main())


def _fresh_streams() -> None:
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115


def _close_quietly(number: int) -> None:
    try:
        os.close(number)
    except OSError:
        return


def _leave(work: Callable[[], None]) -> None:
    """Do the work of a forked child and end it, as an interpreter does, without its parent's exit handlers."""
    status = 0
    try:
        work()
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        status = status or 120
    os._exit(status & 0xFF)
