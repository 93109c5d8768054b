"""The process group that the ranks of a world form, and the two ways in which rank 0 and the others talk. Torch."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist

from libxd.errors import Status, XdError
from libxd.runtimes.ranks import wire

#: for the other ranks of a launcher to come, once rank 0 needs them
MEETING_S = 300.0
#: for rank 0 to come: it may first wait for the pipe before it
QUEUE_S = 3600.0
#: an engine waits for its next attempt as long as the pipe before it takes; `xd-score --timeout` bounds a scoring
FOREVER = datetime.timedelta(days=30)


class Group:
    """A joined process group. `control` carries commands and outcomes; engines use the default group."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.store = dist.PrefixStore("said", store)
        # NCCL makes its communicators when the first CUDA tensor comes, so where there is a device both are at hand
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        dist.init_process_group(
            backend, store=dist.PrefixStore("data", store), rank=rank, world_size=world_size, timeout=FOREVER
        )
        self._control = dist.new_group(backend="gloo", timeout=FOREVER)

    @classmethod
    def join(cls, side: str, patience_s: float) -> Group:
        """The world that the variables of this process name, as torchrun says them; a launcher may bring both sides.

        XdError 75 as `meet`, and when rank 0 cannot listen where it should.
        """
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        patience = datetime.timedelta(seconds=patience_s)
        try:
            store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=patience))
        except RuntimeError as error:  # of torch's stores
            raise _not_met(error, rank, world_size, patience_s) from error
        return cls.meet(store, side, rank, world_size, patience_s)

    @classmethod
    def meet(cls, store: Any, side: str, rank: int, world_size: int, patience_s: float) -> Group:
        """Rank 0 waits for all others, and they for rank 0. XdError 75 when they do not come in time."""
        others = range(1, world_size) if rank == 0 else [0]
        try:
            store.set(f"here/{side}/{rank}", b"")
            store.wait([f"here/{side}/{other}" for other in others], datetime.timedelta(seconds=patience_s))
            store.set_timeout(FOREVER)
        except RuntimeError as error:
            raise _not_met(error, rank, world_size, patience_s) from error
        return cls(dist.PrefixStore(side, store), rank, world_size)

    def send(self, message: Any) -> None:
        """Rank 0: to all others."""
        data = _bytes(wire.dumps(message))
        dist.broadcast(torch.tensor([data.numel()]), src=0, group=self._control)
        dist.broadcast(data, src=0, group=self._control)

    def receive(self) -> Any:
        """The others: the next message of rank 0."""
        size = torch.empty(1, dtype=torch.int64)
        dist.broadcast(size, src=0, group=self._control)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._control)
        return wire.loads(data.numpy().tobytes())

    def gather(self, outcome: Any) -> list[Any]:
        """All ranks: their outcomes in rank order, on rank 0; elsewhere an empty list."""
        mine = b"" if self.rank == 0 else wire.dumps(outcome)  # rank 0 has its own
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._control)
        largest = max(map(int, sizes))
        padded = _bytes(mine.ljust(largest, b"\0"))
        if self.rank != 0:
            dist.gather(padded, dst=0, group=self._control)
            return []
        said = [torch.empty(largest, dtype=torch.uint8) for _ in sizes]
        dist.gather(padded, said, dst=0, group=self._control)
        others = zip(said[1:], sizes[1:], strict=True)
        return [outcome, *(wire.loads(each.numpy()[: int(size)].tobytes()) for each, size in others)]

    def leave(self) -> None:
        self._control = None
        dist.destroy_process_group()


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _not_met(error: RuntimeError, rank: int, world_size: int, patience_s: float) -> XdError:
    if "EADDRINUSE" in str(error):
        return XdError("rank 0 cannot listen there: the port is in use", status=Status.RETRY, code="port-in-use",
                       where="$MASTER_PORT", found=os.environ["MASTER_PORT"], hint="name a free port")  # fmt: skip
    missed = "the others" if rank == 0 else "rank 0"
    return XdError(f"this is rank {rank} of {world_size}, and {missed} did not come within {patience_s:g} s",
                   status=Status.RETRY, code="no-meeting", where="$WORLD_SIZE",
                   hint="a launcher has to start all ranks; without one, unset RANK and WORLD_SIZE")  # fmt: skip


def local_device(name: str) -> torch.device:
    """The device of this rank by the name that a plan has: `cuda` is the one of its place on the machine."""
    if name != "cuda":
        return torch.device(name)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
