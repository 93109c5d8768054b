"""What `libxd.write_scores` takes of a step, in processor time and on the clock; docs/hooks.md's table.

    python -P dev/bench_hook.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import libxd

TURNS = 7
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
    generator = np.random.default_rng(0)
    active = np.zeros((sequences, length), bool)
    active[:, length // 4 :] = True
    rollout = -generator.random((sequences, length), np.float32)

    turns = []
    for step in range(TURNS):
        token_ids = generator.integers(0, 50_000, (sequences, length))
        begun = time.process_time(), time.perf_counter()
        libxd.write_scores(place, "bench", token_ids=token_ids, attention_mask=np.ones_like(token_ids), step=step,
                           active_mask=active, rollout=rollout, training=rollout, dtype="bfloat16")  # fmt: skip
        turns.append((time.process_time() - begun[0], time.perf_counter() - begun[1]))
    processor_s, wall_s = (statistics.median(column) for column in zip(*turns, strict=True))
    return processor_s, wall_s


if __name__ == "__main__":
    main()
