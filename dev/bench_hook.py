"""What `libxd.write_scores` takes, beside writing and syncing the bytes of its arrays plainly; docs/hooks.md's table.

    python -P dev/bench_hook.py
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import libxd

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_timing import ratio

TURNS = 7
#: sequences and their lengths, a quarter of which is prompt
BATCHES = ((8, 512), (64, 2048), (512, 2048))


def main() -> None:
    print(f"{'tokens':>9}  write_scores  plain files  ratio")
    for sequences, length in BATCHES:
        with tempfile.TemporaryDirectory(prefix="xd-bench-") as place:
            times, ours_s, theirs_s = measure(Path(place), sequences, length)
            print(f"{sequences * length:9,}  {1e3 * ours_s:9.1f} ms  {1e3 * theirs_s:8.1f} ms  {times:5.1f}")


def measure(place: Path, sequences: int, length: int) -> tuple[float, float, float]:
    """Medians: of the ratio in one turn, of write_scores, of the plain files (seconds)."""
    generator = np.random.default_rng(0)
    step = iter(range(10**6))
    active = np.zeros((sequences, length), bool)
    active[:, length // 4 :] = True
    rollout = -generator.random((sequences, length), np.float32)

    def batch() -> np.ndarray:
        return generator.integers(0, 50_000, (sequences, length))

    def ours() -> float:
        token_ids, number = batch(), next(step)
        start = time.perf_counter()
        libxd.write_scores(place, "bench", token_ids=token_ids, attention_mask=np.ones_like(token_ids), step=number,
                           active_mask=active, rollout=rollout, training=rollout, dtype="bfloat16")  # fmt: skip
        return time.perf_counter() - start

    def theirs() -> float:
        token_ids, number = batch(), next(step)
        start = time.perf_counter()
        for side in ("rollout", "training"):
            with open(place / f"{side}-{number}", "xb") as file:
                for array in (token_ids.astype(np.int32), rollout, active):
                    file.write(array.tobytes())
                file.flush()
                os.fsync(file.fileno())
        return time.perf_counter() - start

    return ratio(TURNS, ours, theirs)


if __name__ == "__main__":
    main()
