"""What `libxd.write_scores` takes of a step, in processor time and on the clock; docs/hooks.md's table.

    python -P dev/bench_hook.py

`make bench` holds it against writing the same files with the same durability.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_timing import Result, ratio

import libxd

TURNS = 7
#: against the bare writes: the rest is digests and checks. What it was seen to be (7.0), and some room
LIMIT = 8.0
#: sequences and their lengths, a quarter of which is prompt
BATCHES = ((8, 512), (64, 2048), (512, 2048))


def main() -> None:
    print(f"{'tokens':>9}  processor  wall clock")
    for sequences, length in BATCHES:
        with tempfile.TemporaryDirectory(prefix="xd-bench-") as place:
            processor_s, wall_s = measure(Path(place), sequences, length)
            print(f"{sequences * length:9,}  {1e3 * processor_s:6.1f} ms  {1e3 * wall_s:7.1f} ms")


def measure(place: Path, sequences: int, length: int) -> tuple[float, float]:
    """Medians over the turns, in seconds: processor time and wall time of a call."""
    turns = [_call(place, sequences, length, step)[1:] for step in range(TURNS)]
    processor_s, wall_s = (statistics.median(column) for column in zip(*turns, strict=True))
    return processor_s, wall_s


def beside_writing(place: Path) -> Result:
    """The largest batch, beside writing the files that it leaves, each synced."""
    sequences, length = BATCHES[-1]
    files: list[bytes] = []
    steps = iter(range(TURNS))

    def hook() -> float:
        attempt, _, wall_s = _call(place / "runs", sequences, length, next(steps))
        frozen = (place / "runs" / "bench" / "sequences").iterdir()
        files[:] = [path.read_bytes() for path in (*Path(attempt).iterdir(), max(frozen, key=os.path.getmtime))]
        return wall_s

    def write() -> float:
        begun = time.perf_counter()
        for number, content in enumerate(files):
            with open(place / f"copy-{number}", "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        return time.perf_counter() - begun

    found, ours_s, theirs_s = ratio(TURNS, hook, write)
    detail = f"{ours_s:.3f} s; writing its {sum(map(len, files)) / 1e6:.0f} MB {theirs_s:.3f} s"
    return Result(f"write_scores of {sequences * length / 1e6:.2g} M tokens", found, LIMIT, detail)


def _call(place: Path, sequences: int, length: int, step: int) -> tuple[str, float, float]:
    """The attempt, and the seconds that it took: of processors, and on the clock."""
    generator = np.random.default_rng(step)
    active = np.zeros((sequences, length), bool)
    active[:, length // 4 :] = True
    rollout = -generator.random((sequences, length), np.float32)
    token_ids = generator.integers(0, 50_000, (sequences, length))
    begun = time.process_time(), time.perf_counter()
    attempt = libxd.write_scores(place, "bench", token_ids=token_ids, attention_mask=np.ones_like(token_ids), step=step,
                                 active_mask=active, rollout=rollout, training=rollout, dtype="bfloat16")  # fmt: skip
    return str(attempt), time.process_time() - begun[0], time.perf_counter() - begun[1]


if __name__ == "__main__":
    main()
