"""make bench-kernels: the kernels beside their floors, their peers and their targets, on the GPU that is here.

    python -P dev/bench_kernels.py [logprob] [linear] [policy] [attention]     all of them where none is named
"""

from __future__ import annotations

import datetime
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "kernels")]

PARTS = ("logprob", "linear", "policy", "attention")


def main(names: list[str]) -> int:
    """Print both tables; 1 when a target is not met, 69 where there is no GPU."""
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        print(f"bench-kernels: no part {', '.join(unknown)}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print("bench-kernels: no CUDA device is visible: the kernels are timed on a GPU alone", file=sys.stderr)
        return 69
    from bench_device import machine, read_bytes_per_s

    read = read_bytes_per_s()
    print(f"{datetime.date.today()}: {machine()}; reads {read / 1e12:.2f} TB/s")
    rows, targets = [], []
    for name in names or PARTS:
        found = importlib.import_module(f"bench_kernels_{name}").measure(say, read)
        rows += found[0]
        targets += found[1]
        torch.cuda.empty_cache()
    width = max(len(f"{row.kernel}  {row.shape}") for row in rows)
    print(f"\n{'':{width}}   time ms  floor    error same bits    GiB")
    for row in rows:
        print(row.line(width))
    width = max(len(target.what) for target in targets)
    print(f"\n{'':{width}}  measured   asked")
    for t in targets:
        met = "met" if t.met else "not met"
        print(f"{t.what:{width}}  {t.measured:8.3g}  {'>=' if t.at_least else '<='} {t.bound:g} {t.unit}  {met}")
    return 0 if all(target.met for target in targets) else 1


def say(what: str) -> None:
    """Where it is, on stderr."""
    print(f"bench-kernels: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
