"""The other ranks of a world that the scorer's child starts by itself: their processes, and what they say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import IO

from libxd import slots
from libxd.errors import Status, XdError

#: ranks of a world on one machine, without a launcher: each is a process that loads the whole checkpoint
MOST = 64
#: what a launcher around us says to its own ranks is not for these
_FOREIGN = ("TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
_END_TIMEOUT_S = 5.0


class Processes:
    """Ranks 1 to world_size - 1, on this machine. They end with this process, however it ends."""

    def __init__(self, side: str, world_size: int, address: str, port: int) -> None:
        """Start them. XdError 69 for a world of more than MOST."""
        if world_size > MOST:
            raise XdError("more ranks than xd-score starts on one machine", status=Status.REFUSED,
                          code="too-many-ranks", found=world_size, expected=f"at most {MOST}",
                          hint="launch them (torchrun, srun)")  # fmt: skip
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        command = [sys.executable, "-P", "-m", "libxd.runtimes.ranks.worker", "--side", side,
                   "--parent", str(os.getpid())]  # fmt: skip
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._listeners: list[threading.Thread] = []
        for rank in range(1, world_size):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                     "MASTER_ADDR": address, "MASTER_PORT": str(port)}  # fmt: skip
            process = subprocess.Popen(
                command, env={**inherited, **place}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, pass_fds=slots.kept(),
            )  # fmt: skip
            self._processes[rank] = process
            assert process.stderr is not None
            listener = threading.Thread(target=_hand_on, args=(rank, process.stderr), daemon=True)
            listener.start()
            self._listeners.append(listener)

    def ended(self) -> dict[int, str]:
        """The ranks that are gone, and how: those that a signal ended come first."""
        found = {rank: p.poll() for rank, p in self._processes.items() if p.poll() is not None}
        return {
            rank: f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            for rank, code in sorted(found.items(), key=lambda item: (item[1] >= 0, item[0]))
        }

    def killed(self) -> list[int]:
        """The ranks that a signal ended."""
        return [rank for rank, process in self._processes.items() if (process.poll() or 0) < 0]

    def end(self, at_once: bool) -> None:
        """Wait for all of them; those that do not leave in time, or where nothing is waited for, are killed."""
        deadline = time.monotonic() + (0 if at_once else _END_TIMEOUT_S)
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.last_words()

    def last_words(self) -> None:
        """What the ranks that ended said goes out before anything else is said."""
        for listener in self._listeners:
            listener.join(timeout=1.0)


def _hand_on(rank: int, stream: IO[bytes]) -> None:
    with stream:
        for line in stream:
            sys.stderr.write(f"rank {rank}: {line.decode('utf-8', 'replace').rstrip()}\n")
            sys.stderr.flush()
