"""Timing on a GPU: medians of events, in turns, beside the ceilings of the same machine in the same run."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

#: more than the L2 of any GPU so far: what is written between two timings leaves nothing of the inputs in it
FLUSH_BYTES = 256 * 2**20

#: some 2 ms of waiting on the device ahead of each timing: the host's launches are then queued behind it
HEAD_START_CYCLES = 4_000_000


@dataclass(frozen=True)
class Row:
    """One measurement. floor_ms: the least time that its bytes or operations take at this run's ceiling.

    error: largest difference from float64; invariant: whether a row's bits were the same in every batch tried.
    """

    kernel: str
    shape: str
    time_ms: float
    floor_ms: float | None = None
    error: float | None = None
    invariant: bool | None = None
    extra_bytes: int | None = None

    def line(self, width: int) -> str:
        """As aligned text."""
        cells = [
            f"{self.time_ms:9.3f}",
            "" if self.floor_ms is None else f"{self.floor_ms / self.time_ms:.0%}",
            "" if self.error is None else f"{self.error:.1e}",
            {None: "", True: "yes", False: "NO"}[self.invariant],
            "" if self.extra_bytes is None else f"{self.extra_bytes / 2**30:.2f}",
        ]
        widths = (9, 6, 8, 9, 6)
        return f"{self.kernel + '  ' + self.shape:{width}} " + " ".join(
            f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True)
        )


@dataclass(frozen=True)
class Target:
    """What the issue of the kernels asks for. `at_least`: the measured value must reach the bound, not stay under."""

    what: str
    measured: float
    bound: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        """NaN meets nothing."""
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound


def once_ms(function: Callable[[], object], flush: torch.Tensor | None = None) -> float:
    """One call, by events. The device is kept busy while the host launches, so that its own time is what is taken."""
    if flush is not None:
        flush.zero_()
    torch.cuda._sleep(HEAD_START_CYCLES)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def in_turns(functions: dict[str, Callable[[], object]], turns: int, *, flush: bool = False) -> dict[str, list[float]]:
    """Times in ms of each function, one after the other in every turn, after one call each to warm up.

    Each turn has an order of its own, the same in every run: what ran before leaves its clocks and its heat behind.
    """
    shuffled = random.Random(0)
    scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda") if flush else None
    for function in functions.values():
        function()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(turns):
        for name in shuffled.sample(list(functions), len(functions)):
            times[name].append(once_ms(functions[name], scratch))
    return times


def median_ratio(above: list[float], below: list[float]) -> float:
    """Of the ratios within a turn: both then met the same clocks."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def extra_bytes(function: Callable[[], object]) -> int:
    """The most that a call holds beyond what was there before it, its result included."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def read_bytes_per_s() -> float:
    """Bandwidth of reading: a sum over 8 GiB, the best of several kernels' medians."""
    data = torch.ones(2**31, dtype=torch.float32, device="cuda")
    rows = data.view(2**13, -1)
    times = in_turns({"sum": data.sum, "amax": lambda: rows.amax(dim=1), "rows": lambda: rows.sum(dim=1)}, 10)
    best_ms = min(statistics.median(found) for found in times.values())
    return data.numel() * 4 / best_ms * 1e3


def machine() -> str:
    """Device and versions, those of the peers among them, as a table of figures must name them."""
    import importlib.metadata
    import importlib.util
    import platform

    import triton

    peers = {"cut_cross_entropy": "cut-cross-entropy", "liger_kernel": "liger-kernel"}
    found = [f", {name} {importlib.metadata.version(name)}" for module, name in peers.items()
             if importlib.util.find_spec(module)]  # fmt: skip
    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"Python {platform.python_version()}{''.join(found)}"
    )
