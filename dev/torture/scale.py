"""Constant memory, at length: runs of many tokens, cases and shards through every tool that reads them, under one cap.

    python -P dev/torture/scale.py [--directory DIR] [pair] [cases] [growth] [shards]

pair: one pair of --pair tokens. cases: --cases cases of --tokens tokens, --slice of them on the disk at a time; the
report is of the first --reported. growth: all cases at once with fewer tokens. shards: one pair in 1, 8 and 64 shards.
Each tool runs in a process whose private memory is capped at CAP and whose resident memory must stay below it, too; it
prints a row a tool (docs/scale.md has them). A control, which lays the same arrays out whole, must die of that cap.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from scale_fixtures import STAGES, Spent, control, make, spend  # noqa: E402

#: bytes: an interpreter with numpy, threads' buffers, what blocks of 2^17 tokens take on their way, a report's content
CAP = 192 << 20
ALL = tuple(STAGES)


class Proof:
    """Rows as they come; `failed` once one was not as it must be."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def row(self, what: str, stage: str, found: Spent, size: int) -> None:
        held = found.status == 0 and found.peak_bytes < CAP
        if not held:
            self.failed.append(f"{what}, {stage}: status {found.status}, {found.peak_bytes} bytes: {found.said[-500:]}")
        print(f"| {what} | {stage} | {size / 1e9:.2f} GB | {found.wall_s:.1f} s | {found.cpu_s:.1f} s | "
              f"{found.peak_bytes / 1e6:.0f} MB | {'held' if held else 'FAILED'} |", flush=True)  # fmt: skip

    def stages(self, what: str, place: Path, paths: list[str], stages: tuple[str, ...] = ALL) -> None:
        for stage in stages:
            found = spend(STAGES[stage](place, paths), CAP)
            self.row(what, stage, found, sum(map(_size, paths[:1] if stage in ("impact", "doctor") else paths)))

    def control(self, what: str, paths: list[str]) -> None:
        """The cap bites: who holds the arrays whole does not live through it, and does without it."""
        capped, free = spend(control(paths), CAP), spend(control(paths))
        if capped.status == 0 or "MemoryError" not in capped.said or free.status:
            self.failed.append(f"{what}: the control lived: {capped}")
        died = "died of the cap" if capped.status else "LIVED"
        print(f"| {what} | control | | | | {free.peak_bytes / 1e6:.0f} MB | {died} |", flush=True)


def _size(path: str) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(path))


def pair(proof: Proof, place: Path, given: argparse.Namespace) -> None:
    paths = make(place, 1, given.pair)
    proof.control(f"1 x {given.pair}", paths)
    proof.stages(f"1 x {given.pair}", place, paths)


def cases(proof: Proof, place: Path, given: argparse.Namespace) -> None:
    """A slice is a run of its own, which has the baseline, too."""
    for start in range(0, given.cases, given.slice):
        here = place / str(start)
        count = min(given.slice, given.cases - start)
        paths = make(here, count, given.tokens, first=start)
        what = f"{count} x {given.tokens}"
        proof.stages(what, here, paths, ("compare", "seal", "verify", "resume", "table"))
        if start == 0:
            proof.stages(f"{given.reported} x {given.tokens}", here, paths[: given.reported], ("report",))
        shutil.rmtree(here)


def growth(proof: Proof, place: Path, given: argparse.Namespace) -> None:
    for count in (given.cases // 16, given.cases // 4, given.cases):
        here = place / str(count)
        paths = make(here, count, given.tokens // 16)
        proof.stages(f"{count} x {given.tokens // 16}", here, paths)
        shutil.rmtree(here)


def shards(proof: Proof, place: Path, given: argparse.Namespace) -> None:
    for count in (1, 8, 64):
        here = place / str(count)
        tokens = given.pair // 10
        paths = make(here, 1, tokens, tokens if count == 1 else -(-tokens // count) + 1000)
        proof.stages(f"1 x {tokens} in {count}", here, paths)
        shutil.rmtree(here)


PARTS = {each.__name__: each for each in (pair, cases, growth, shards)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--directory", type=Path,
                        help="where there is room: 45 bytes a token of the pair (9 GB), 28 of a slice's cases (7 GB)")
    parser.add_argument("--pair", type=int, default=200_000_000)
    parser.add_argument("--cases", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--slice", type=int, default=128)
    parser.add_argument("--reported", type=int, default=64)
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no such part: {unknown.pop()}")
    proof = Proof()
    print("| run | tool | read and written | wall | processors | peak resident | |\n|---|---|---|---|---|---|---|")
    for name in given.parts or PARTS:
        with tempfile.TemporaryDirectory(dir=given.directory) as place:
            PARTS[name](proof, Path(place), given)
    for line in proof.failed:
        print(line, file=sys.stderr)
    return 1 if proof.failed else 0


if __name__ == "__main__":
    sys.exit(main())
