"""Whether another engine fits beside what already uses the device (what to do when it does not: `intake.py`).

`python -P -m libxd.scoring.room` prints the free bytes of the first visible CUDA device. That needs a context on the
device, which would stay in a process and which a fork does not survive: so it is a process of its own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from libxd import environment

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
ASK_TIMEOUT_S = 60.0


def has_room(needed_bytes: int, free_bytes: int | None, releasing_bytes: int = 0) -> bool:
    """Whether to start at once. releasing_bytes: what our own engine will give back first. None: nobody knows."""
    return free_bytes is None or needed_bytes <= free_bytes + releasing_bytes


def free_bytes(device: str, python: str, variables: Mapping[str, str] | None = None) -> int | None:
    """Free memory in bytes: of the machine (cpu), or of the first device that `python` sees (cuda). None: unknown.

    variables: the engine's, beside those of this process; they say which device is its first.
    """
    if device == "cuda":
        return _ask_device(python, variables or {})
    return min((free for free in (_available(), _cgroup_free()) if free is not None), default=None)


def _available() -> int | None:
    """MemAvailable of /proc/meminfo, in bytes."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kib is None else int(kib) * 1024


def _cgroup_free() -> int | None:
    """What the control group (v2) still allows, in bytes; file cache that can be dropped counts as free."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - used + int(stat.get("inactive_file", 0)))


def _ask_device(python: str, variables: Mapping[str, str]) -> int | None:
    try:
        done = subprocess.run(
            [python, "-P", "-m", "libxd.scoring.room"], capture_output=True, check=False, timeout=ASK_TIMEOUT_S,
            env={**os.environ, **variables},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return int(done.stdout) if done.returncode == 0 else None


def _device_free_bytes() -> int | None:
    """cuMemGetInfo of device 0, through the CUDA driver library."""
    try:
        driver = ctypes.CDLL(environment.CUDA_LIBRARY)
    except OSError:
        return None
    context, device = ctypes.c_void_p(), ctypes.c_int()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or driver.cuCtxSetCurrent(context)
        or driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    )
    return None if failed else free.value


if __name__ == "__main__":
    found = _device_free_bytes()
    if found is None:
        sys.exit(1)
    sys.stdout.write(f"{found}\n")
