"""A child process under supervision: started, asked, its chatter kept apart, ended with all that it started."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from libxd.errors import Status, XdError, is_scarce
from libxd.slots import Held

START_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 10.0  # for an engine to give its device back
TERM_TIMEOUT_S = 3.0
CHATTER_LINES = 20
_POLL_S = 0.2


class ChildDied(Exception):
    """The child ended without an answer."""

    def __init__(self, returncode: int) -> None:
        super().__init__(returncode)
        self.returncode = returncode

    @property
    def by_signal(self) -> bool:
        return self._signum > 0

    @property
    def _signum(self) -> int:
        """The signal that ended it: by itself, or caught and told as a shell would, by 128 + N; 0: none did."""
        if self.returncode < 0:
            return -self.returncode
        told = self.returncode - 128
        return told if told in set(signal.Signals) else 0

    @property
    def how(self) -> str:
        """`was killed by SIGKILL`, or `ended with status 3`."""
        if not self.by_signal:
            return f"ended with status {self.returncode}"
        try:
            return f"was killed by {signal.Signals(self._signum).name}"
        except ValueError:
            return f"was killed by signal {self._signum}"


class Chatter:
    """What the child and its engine say on stderr: the last lines are kept, and all are handed on where wanted."""

    def __init__(self, stream: Any, follow: Callable[[str], None] | None) -> None:
        self._lines: deque[str] = deque(maxlen=CHATTER_LINES)
        self._follow = follow
        self._stream = stream
        self._thread = threading.Thread(target=self._drain, args=(stream,), daemon=True)
        self._thread.start()

    def _drain(self, stream: Any) -> None:
        for line in stream:
            text = line.decode("utf-8", "replace").rstrip()
            if self._follow is not None:
                self._follow(text)
            elif text:
                self._lines.append(text)

    def forget(self) -> None:
        """Drop what was said so far."""
        self._lines.clear()

    def close(self) -> None:
        """Give the stream back, unless a rank that outlives the child holds its other end."""
        self._thread.join(timeout=1.0)
        if not self._thread.is_alive():
            self._stream.close()

    def last(self, ended: bool) -> list[str]:
        """What was said since `forget`; of a child that ended, to the last word."""
        if ended:
            self._thread.join(timeout=1.0)  # a rank that outlives the child may hold the stream open
        return list(self._lines)


class Child:
    """One scorer's child. It leads a process group of its own, so that its ranks end with it."""

    def __init__(
        self, python: str, side: str, follow: Callable[[str], None] | None, held: Held | None = None
    ) -> None:  # fmt: skip
        """Start it, wait until it is ready; `follow` takes every line of its stderr. XdError 70: it does not start.

        held: the slots of its devices. It sees no other device, and holds them, too, for as long as it lives.
        """
        answers, answers_fd = os.pipe()
        try:
            command = [python, "-P", "-m", "libxd.scoring.child", "--side", side, "--fd", str(answers_fd),
                       "--parent", str(os.getpid()),
                       *(f"--slot={file}" for file in (held.files if held else ()))]  # fmt: skip
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                pass_fds=(answers_fd, *(held.files if held else ())), process_group=0,
                env={**os.environ, **held.variables} if held else None,
            )  # fmt: skip
        except OSError as error:
            os.close(answers)
            status = Status.RETRY if is_scarce(error) else Status.MISSING
            raise XdError(f"the interpreter does not run: {error.strerror}", status=status, code="missing",
                          where=python) from error
        finally:
            os.close(answers_fd)
        self._answers = os.fdopen(answers, "rb")
        self.chatter = Chatter(self._process.stderr, follow)
        try:
            self._receive()
        except ChildDied as death:
            said = self.chatter.last(ended=True)
            # a signal comes from outside (memory ran out, a scheduler); a status is the interpreter's own
            status, hint = (
                (Status.RETRY, "run again; if it recurs, see whether memory ran out")
                if death.by_signal
                else (Status.BUG, "is xd installed there?")
            )
            raise XdError(f"the scorer does not start: it {death.how}{': ' + said[-1] if said else ''}",
                          status=status, code="no-scorer", where=python, hint=hint) from death
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        """Send a request, wait for the answer. ChildDied when there comes none; TimeoutError when it takes longer."""
        self.chatter.forget()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died before: _receive says how
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        # The end of the pipe alone does not tell of the child's death: a forked rank may hold it open.
        while not select.select([self._answers], [], [], _POLL_S)[0]:
            if self._process.poll() is not None and not select.select([self._answers], [], [], 0)[0]:
                raise self._died()
            if time.monotonic() > deadline:
                raise TimeoutError
        line = self._answers.readline()
        if not line.endswith(b"\n"):  # nothing, or all that it had written of an answer when it was killed
            raise self._died()
        return json.loads(line)

    def _died(self) -> ChildDied:
        try:
            returncode = self._process.wait(TERM_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it closed the pipe and lives on: nothing more can come of it
            self.kill()
            returncode = self._process.wait()
        self.kill()  # whatever ranks it left
        return ChildDied(returncode)

    def close(self) -> None:
        """Let it give its engine back and leave; end it when it does not."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        """End it and its process group: asked first, so that no temporary file stays; then not asked."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(TERM_TIMEOUT_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what was not yet written
            self._process.stdin.close()
        self._answers.close()
        self.chatter.close()

    def _signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signum)
