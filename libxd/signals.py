"""Ctrl-C, SIGTERM and SIGHUP end a tool by an exception, so that nothing temporary stays behind, and without a word."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

#: a keyboard; a scheduler, some time before it kills; a terminal or a connection that is gone
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_received = 0


class Ended(KeyboardInterrupt):
    """A signal asked for the end; the exit status is 128 + signum."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def by_default() -> None:
    """Let them kill the process: while there is nothing to clean up yet, and when there is nothing any more."""
    _handle(signal.SIG_DFL)


def by_exception() -> None:
    """The first one raises Ended in the main thread; another, meanwhile, kills the process."""
    sys.unraisablehook = _unraisable
    _handle(_raise)


def leave_if_asked() -> None:
    """Raise Ended if a signal came, whatever became of its exception: a library may have made another of it."""
    if _received:
        raise Ended(_received)


@contextlib.contextmanager
def each(interval_s: float, call: Callable[[], None]) -> Iterator[None]:
    """Meanwhile `call` every so often, in the main thread, whatever that waits for; what waited goes on waiting."""

    def again(_signum: int, _frame: Any) -> None:
        call()
        signal.setitimer(signal.ITIMER_REAL, interval_s)

    before = signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, interval_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _handle(handler: Any) -> None:
    for signum in _SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:  # a shell's background job, or nohup
            signal.signal(signum, handler)


def _raise(signum: int, _frame: Any) -> NoReturn:
    global _received
    _received = signum
    by_default()
    raise Ended(signum)


def _unraisable(unraisable: Any) -> None:
    """Raised where nothing can catch it, as in a destructor: the work would go on as if nobody had asked."""
    if isinstance(unraisable.exc_value, Ended):
        os.kill(os.getpid(), unraisable.exc_value.signum)
    sys.__unraisablehook__(unraisable)
