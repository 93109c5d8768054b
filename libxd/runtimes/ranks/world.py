"""Rank 0's end of a world: the other ranks started or met, asked, and watched."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from libxd.errors import Status, XdError
from libxd.runtimes.ranks import launch
from libxd.runtimes.ranks.group import FOREVER, MEETING_S, Group
from libxd.runtimes.ranks.processes import Processes

_ADDRESS = "127.0.0.1"
_POLL_S = 0.2
#: from a rank's end until what waits for it must have noticed; a collective on a device never does
_GRACE_S = 3.0
#: for a launcher's ranks to come and hear that they are not needed
_DISMISSAL_S = 60.0

#: whether this process was, or is, rank 0 of a launcher's world: it is met once
_met = False


class World:
    """Commands go to all ranks at once. A rank that fails or dies ends the world, and with it the engine.

    When the main thread waits for a rank that is gone and does not notice, the process is ended: nothing else can be.
    """

    def __init__(self, side: str, world_size: int) -> None:
        self._serial = 0
        self._busy = False
        self._over = threading.Event()
        self._cause: XdError | None = None
        self._processes: Processes | None = None
        self._group: Group | None = None
        launched = launch.of(os.environ)
        launch.require_world(launched, world_size, "the scorer")
        if launched:
            self._group = _meet(side, MEETING_S)
            self._serial += 1
            self._store = self._group.store.clone()
        else:
            server = _listen()
            self._processes = Processes(side, world_size, _ADDRESS, server.port)
            self._store = dist.PrefixStore("said", dist.PrefixStore(side, server.clone()))
        self.world_size = world_size
        self._watch = threading.Thread(target=self._watching, daemon=True)
        self._watch.start()
        if self._group is None:
            with self._together():
                self._group = Group.meet(server, side, 0, world_size, MEETING_S)

    # -- commands

    def ask(self, command: str, *arguments: Any, here: Any) -> list[Any]:
        """Have all other ranks do a command while `here()` does rank 0's part: outcomes in rank order.

        XdError when a rank fails, is gone, or refuses.
        """
        outcomes: list[Any] = []
        with self.all_doing(command, *arguments) as gather:
            outcomes = gather(here())
        return outcomes

    @contextlib.contextmanager
    def all_doing(self, command: str, *arguments: Any) -> Iterator[Any]:
        """The others do a command meanwhile; the last thing inside is to call what is given with rank 0's outcome."""
        assert self._group is not None
        with self._together():
            self._group.send((command, arguments))
            yield self._group.gather

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        self._serial += 1
        self._busy = True
        try:
            yield
        except XdError:
            if not self._all_refused():
                self.end()
            raise
        except Exception as error:
            cause = self._wait_for_cause()
            self.end()
            if cause is not None:
                raise cause from error
            raise
        except BaseException:  # a signal, or whoever was handed weights has stopped taking them: others wait in vain
            self.end()
            raise
        finally:
            self._busy = False

    def _all_refused(self) -> bool:
        """Whether the other ranks refuse, too, and the world can go on; they wait to hear so."""
        keys = [f"refused/{self._serial}/{rank}" for rank in range(1, self.world_size)]
        try:
            self._group.store.wait(keys, datetime.timedelta(seconds=_GRACE_S))
            self._group.store.set(f"over/{self._serial}", b"")
        except RuntimeError:
            return False
        return True

    # -- the end

    @property
    def alive(self) -> bool:
        return not self._over.is_set()

    def close(self) -> None:
        """Let every rank give its engine back and leave."""
        if self.alive:
            self.ask("close", here=lambda: None)
            self.end(at_once=False)

    def end(self, at_once: bool = True) -> None:
        """The end of a world that is broken, or of which all ranks have left."""
        if self._over.is_set():
            return
        self._over.set()
        self._watch.join()
        if self._processes is not None:
            self._processes.end(at_once)
        if dist.is_initialized():
            self._group = None
            dist.destroy_process_group()

    # -- watching

    def _watching(self) -> None:
        """Look for a rank that is gone; when nobody notices in time, end this process with the reason."""
        while not self._over.wait(_POLL_S):
            self._cause = self._cause or self._failure()
            if self._cause is None:
                continue
            if self._over.wait(_GRACE_S):
                return
            if self._processes is not None:
                self._processes.last_words()
            sys.stderr.write(f"{self._cause.line()}\n")
            sys.stderr.flush()
            os._exit(128 + signal.SIGKILL if self._cause.status == Status.RETRY else self._cause.status)

    def _failure(self) -> XdError | None:
        """Why the world cannot go on: a rank that was killed, that said why it failed, refuses alone, or is gone."""
        gone = self._processes.ended() if self._processes is not None else {}
        killed = self._processes.killed() if self._processes is not None else []
        for rank in killed:
            return _gone(rank, gone[rank], Status.RETRY)
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the launcher
            if self._store.check(["failed"]):
                return _said(self._store.get("failed"))
            for rank in range(1, self.world_size if self._busy else 0):
                if self._store.check([f"refused/{self._serial}/{rank}"]):
                    return _said(self._store.get(f"refused/{self._serial}/{rank}"))
        for rank, how in gone.items():
            return _gone(rank, how, Status.BUG)
        return None

    def _wait_for_cause(self) -> XdError | None:
        """What is behind an exception here: it may come of another rank's end, which shows a moment later."""
        deadline = time.monotonic() + _GRACE_S
        while self._cause is None and time.monotonic() < deadline:
            time.sleep(_POLL_S / 4)
        return self._cause


def dismiss(side: str) -> None:
    """Let a launcher's other ranks go that no attempt has needed."""
    if launch.of(os.environ) is not None and not _met:
        group = _meet(side, _DISMISSAL_S)
        group.send(("close", ()))
        group.gather(None)
        group.leave()


def _meet(side: str, patience_s: float) -> Group:
    """The launcher's world. XdError 69 when it was met before: its ranks have left; 75 when they do not come."""
    global _met
    if _met:
        raise XdError("the launcher's ranks have left with the engine before this one", status=Status.REFUSED,
                      code="world-differs", hint="launch a group of attempts at a time (xd-resume --groups)")
    _met = True
    return Group.join(side, patience_s)


def _listen() -> Any:
    """The store that the ranks find each other by, on the loopback, at a port that the kernel chooses."""
    with socket.socket() as listening:
        listening.bind((_ADDRESS, 0))
        listening.listen(128)
        port = listening.getsockname()[1]
        return dist.TCPStore(
            _ADDRESS, port, is_master=True, wait_for_workers=False, timeout=FOREVER, master_listen_fd=listening.detach()
        )


def _said(record: bytes) -> XdError:
    return XdError.from_record(json.loads(record))


def _gone(rank: int, how: str, status: Status) -> XdError:
    hint = "run again; if it recurs, see whether memory ran out" if status == Status.RETRY else "-v shows what it says"
    return XdError(f"rank {rank} {how}, and the engine cannot go on without it", status=status, code="rank-died",
                   hint=hint)  # fmt: skip
