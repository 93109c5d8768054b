"""Touch a sealed attempt in every way there is, and see that `xd-seal --verify` and `xd-resume` notice.

    python -P dev/torture/tamper.py

Every byte of every file is made another one, and every bit of the seal; files are truncated, exchanged, linked and so
on, the seal and the plan row edited in every place. After each the attempt is judged by what the two tools call, and
nearly every way by the tools themselves, too. The ways stand in tests/tamper_fixtures.py. Some minutes.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tests"))  # the fixtures make sealed attempts without an engine

from conftest import Tools  # noqa: E402
from tamper_fixtures import NAMES, NOTICED, SAME, SEAL, Ground, Way, flips, modes, rows, unprivileged, ways  # noqa: E402


@dataclass
class Count:
    """How often one kind of tampering was tried, and which of them went wrong."""

    tried: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, what: str, held: bool) -> None:
        self.tried += 1
        if not held:
            self.wrong.append(what)


Counts = dict[str, Count]


def in_process(ground: Ground, chosen: Iterable[Way], counts: Counts) -> None:
    """Each way on the attempt as it was sealed."""
    for way in chosen:
        way.touch(ground)
        counts[_kind(way)].add(way.name, ground.judge().is_(way.expected))
        ground.restore()
    counts["untouched, afterwards [not a change]"].add("", ground.judge().is_(SAME))


def closed(ground: Ground, counts: Counts) -> None:
    """The ways that need somebody who may not read everything."""
    for way in modes():
        way.touch(ground)
        with unprivileged():
            held = ground.judge().is_(way.expected)
        counts[_kind(way)].add(way.name, held)
        ground.restore()


def _kind(way: Way) -> str:
    return f"{way.kind} [not a change]" if way.expected == SAME else way.kind


def flipped(ground: Ground, counts: Counts, every: int = 1) -> None:
    """A byte of each `every` in each file; of the seal each of its eight bits."""
    for name in NAMES:
        size = ground.victim.file(name).stat().st_size
        masks = [1 << bit for bit in range(8)] if name == SEAL and every == 1 else [0]
        for fixed in masks:
            mask = (lambda _, fixed=fixed: fixed) if fixed else (lambda offset: 1 + offset * 37 % 255)
            for offset, seen in flips(ground, name, range(0, size, every), mask):
                counts[f"a byte of {name}"].add(f"byte {offset} ^ {mask(offset)}", seen.is_(NOTICED))
    counts["untouched, afterwards [not a change]"].add("", ground.judge().is_(SAME))


def edited_rows(ground: Ground, counts: Counts) -> None:
    for pointer, held in rows(ground):
        counts["the plan row edited"].add(pointer, held)


def through_tools(root: Path, counts: Counts, every: int = 1) -> None:
    """One of each `every` ways, each on an attempt of its own, all of one case: by xd-seal --verify and xd-resume."""
    ground, tools = Ground(root), Tools(root)
    case = root / "tools" / "test" / "cases" / ground.victim.case_id
    case.mkdir(parents=True)
    row = root / "row.jsonl"
    row.write_bytes(ground.victim.file("requested.json").read_bytes())
    shutil.copytree(ground.victim.path, case / "a0001")
    whole = case / "a0001"
    touched: dict[Path, Way] = {}
    for way in [way for way in ways(ground) if way.expected == NOTICED and ground.case.name not in way.name][::every]:
        way.touch(ground)
        if not ground.case.is_symlink():
            place = case / f"a{len(touched) + 2:04d}"
            ground.victim.path.rename(place)
            touched[place] = way
        ground.restore()
    attempts = [place for place in touched if place.is_dir() and not place.is_symlink()]
    others = [place for place in touched if place not in attempts]
    for places, status in ((attempts, 1), (others, 65)):
        if not places:
            continue
        ran = tools("xd-seal", "--verify", whole, *places)
        held = (ran.status, ran.out) == (status, f"{whole}\n")
        counts["xd-seal: status and stdout"].add(f"{ran.status} {ran.out}", held)
        for place in places:
            counts["xd-seal: a line an attempt"].add(touched[place].name, f"xd-seal: {place}: " in ran.err)
    asked = ("xd-resume", row, "--runs", root / "tools", "--answers", "--exit-code")
    ran = tools(*asked)
    held = (ran.status, ran.out) == (0, f"{whole}\n")
    counts["xd-resume: an older valid one answers"].add(f"{ran.status} {ran.out}", held)
    for place, way in touched.items():
        lines = [line for line in ran.err.splitlines() if line.startswith(f"xd-resume: {place}: passed over: ")]
        counts["xd-resume: a line an attempt"].add(way.name, len(lines) == 1)
    (whole / "comparison.json").write_bytes(b"{}")
    ran = tools(*asked)
    counts["xd-resume: none answers"].add(f"{ran.status} {ran.out}", (ran.status, ran.out) == (1, ""))


def short(root: Path, every: int = 97) -> Counts:
    """The long form is every=1. Otherwise one byte of each `every`, one way of three, and one of seven by the tools."""
    counts: Counts = defaultdict(Count)
    ground = Ground(root / "ground")
    flipped(ground, counts, every)
    in_process(ground, list(ways(ground))[:: 1 if every == 1 else 3], counts)
    closed(ground, counts)
    edited_rows(ground, counts)
    through_tools(root / "chain", counts, 1 if every == 1 else 7)
    return counts


def lines(counts: Counts) -> Iterator[str]:
    width = max(map(len, counts))
    yield f"{'what was touched':{width}}  tried  held"
    for kind, count in sorted(counts.items()):
        yield f"{kind:{width}}  {count.tried:5}  {count.tried - len(count.wrong):5}"
        yield from (f"  WRONG: {what}" for what in count.wrong[:5])
    wrong = sum(len(count.wrong) for count in counts.values())
    yield f"{sum(count.tried for count in counts.values())} tried, {wrong} wrong"


def main() -> int:
    """Print the table; 1 when something was not noticed, or something sound was refused."""
    with tempfile.TemporaryDirectory(prefix="xd-tamper-") as place:
        os.chmod(place, 0o711)  # so that a nobody gets in
        counts = short(Path(place), every=1)
    print(*lines(counts), sep="\n")
    return 1 if any(count.wrong for count in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
