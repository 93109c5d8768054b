"""xd-compare over 50 million tokens against reading the same inputs and writing the same outputs; its memory.

Run as a program with a directory and a number of tokens it makes the scored attempt there and prints its path: the
system counts what a parent once held towards the peak of its children, so the parent stays small.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench_timing import ROOT, Result, output, ratio, run, tool

from libxd.rundir import Attempt

TOKENS, LIMIT, TURNS = 50_000_000, 4.0, 5
RESPONSE_TOKENS = 500
INPUTS = ("score_rollout.safetensors", "score_training.safetensors")
OUTPUTS = ("actual.json", "token_diffs.safetensors", "comparison.json")

#: what the comparison is held against: every byte in once, as many bytes out once, durably
COPY = """
import os, sys
block = 1 << 20
*inputs, output, size = sys.argv[1:]
data = b""
for path in inputs:
    with open(path, "rb") as file:
        while part := file.read(block):
            data = part if len(part) == block else data or part
left = int(size)
with open(output, "wb") as file:
    while left > 0:
        left -= file.write(data[:left])
    file.flush()
    os.fsync(file.fileno())
os.unlink(output)
"""


def attempt(place: Path, tokens: int) -> Attempt:
    """A scored attempt of `tokens` tokens."""
    return Attempt(output([sys.executable, __file__, str(place), str(tokens)]).decode().strip())


def make(place: Path, tokens: int) -> Attempt:
    """The attempt itself: a fifth of it prompt, bfloat16's kind of drift."""
    import numpy as np

    sys.path.append(str(ROOT / "tests"))
    from comparison_fixtures import scored

    random = np.random.default_rng(0)
    rollout = -np.abs(random.standard_normal(tokens, dtype=np.float32))
    training = rollout + random.standard_normal(tokens, dtype=np.float32) * np.float32(0.02)
    active = np.arange(tokens) % 5 != 0
    lengths = (RESPONSE_TOKENS,) * (tokens // RESPONSE_TOKENS)
    return scored(place / f"compare-{tokens}", rollout, training, active=active, lengths=lengths, dtype="bfloat16")


def compare(target: Attempt) -> tuple[float, int]:
    """Wall time and memory of judging it anew."""
    for name in OUTPUTS:
        target.file(name).unlink(missing_ok=True)
    return run(tool("xd-compare", "-q", target))


def measure(place: Path, target: Attempt) -> list[Result]:
    """`target` is of TOKENS tokens; its outputs stand afterwards."""
    peaks = []

    def ours() -> float:
        wall_s, peak = compare(target)
        peaks.append(peak)
        return wall_s

    def copy() -> float:
        written = sum(target.file(name).stat().st_size for name in OUTPUTS)
        inputs = [str(target.file(name)) for name in INPUTS]
        return run([sys.executable, "-c", COPY, *inputs, str(place / "copy"), str(written)])[0]

    found, ours_s, theirs_s = ratio(TURNS, ours, copy)
    _, small = compare(attempt(place, TOKENS // 2))
    size = sum(target.file(name).stat().st_size for name in (*INPUTS, *OUTPUTS))
    detail = f"{ours_s:.2f} s; reading and writing these {size / 1e9:.2f} GB {theirs_s:.2f} s"
    memory = f"peak {max(peaks) / 1e6:.0f} MB at {TOKENS // 10**6} M tokens, {small / 1e6:.0f} MB at half of them"
    return [
        Result(f"xd-compare of {TOKENS // 10**6} M tokens", found, LIMIT, detail),
        Result("its memory, twice the tokens", max(peaks) / small, 1.2, memory),
    ]


if __name__ == "__main__":
    print(make(Path(sys.argv[1]), int(sys.argv[2])))
