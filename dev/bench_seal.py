"""xd-seal against hashing the same bytes: b3sum where there is one, else blake3 with all threads."""

from __future__ import annotations

import os
import shutil
import sys

from bench_timing import Result, ratio, run, tool

from libxd.rundir import PAYLOADS, SEAL, Attempt

LIMIT, TURNS = 1.2, 7
ATTEMPTS = 8  # sealed by one call, of the same content: what is measured is hashing, not the start of an interpreter
HASH = """
import sys
from blake3 import blake3
for path in sys.argv[1:]:
    print(blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest(), path)
"""


def measure(compared: Attempt) -> Result:
    """`compared` is not sealed; so it is again afterwards."""
    attempts = [compared, *(_linked(compared, number) for number in range(2, ATTEMPTS + 1))]
    files = [str(attempt.file(name)) for attempt in attempts for name in PAYLOADS]
    b3sum = shutil.which("b3sum")
    reference = [b3sum, *files] if b3sum else [sys.executable, "-c", HASH, *files]

    def seal() -> float:
        for attempt in attempts:
            attempt.file(SEAL).unlink(missing_ok=True)
        return run(tool("xd-seal", "-q", *attempts))[0]

    found, ours, theirs = ratio(TURNS, seal, lambda: run(reference)[0])
    for attempt in attempts:
        attempt.file(SEAL).unlink()
    size = sum(os.path.getsize(path) for path in files)
    detail = (
        f"{ours:.2f} s; {'b3sum' if b3sum else 'blake3 with threads'} over these {size / 1e9:.2f} GB {theirs:.2f} s"
    )
    return Result(f"xd-seal of {ATTEMPTS} such attempts", found, LIMIT, detail)


def _linked(attempt: Attempt, number: int) -> Attempt:
    """Another attempt at the same case, its files hard links: no further disk is needed."""
    other = Attempt(attempt.path.with_name(f"a{number:04d}"))
    other.path.mkdir()
    for name in PAYLOADS:
        os.link(attempt.file(name), other.file(name))
    return other
