"""Power is lost at each file operation of the chain, on a file system that keeps nothing but what was synced.

    python -P dev/torture/power.py [--short] [WORD]

A trace of every tool is recorded, and one of each tool killed at each change it makes and then run again. In each the
bytes of a file must be synced before it gets its name, and its name, and those of the directories above it, before its
path is printed. Then what would be left after each operation is put there, once with only the names that were synced
and once with all names but only the bytes that were, and the chain is finished from it as dev/torture/crash.py does.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tests")]

from crash_fixtures import STANDING, Broken, Chain, Every, Start, Tree, chain_under_faults  # noqa: E402
from fault_fixtures import CHANGING, KILL_BEFORE, Fault, Ran  # noqa: E402
from power_fixtures import Disk, Node, printed_at  # noqa: E402

from libxd import publish  # noqa: E402

BOTH = ("tool", "child")


def flaws(chain: Chain, start: Start, runs: Sequence[Ran]) -> list[str]:
    """What is said or named too early in these traces of one stage, one run after another from its start."""
    found, disk = [], _disk(chain, start)
    for ran in runs:
        position = 0
        for operation in ran.trace:
            if flaw := disk.do(operation):
                found.append(flaw)
            lines, position = printed_at(operation, ran.out, position)
            for line in lines:
                below = os.path.relpath(line, chain.root) if start.stage.name in STANDING else ""
                found += [f"{place} may be lost, and it was told" for place in disk.not_lasting(below)]
    return found


def _disk(chain: Chain, start: Start) -> Disk:
    return Disk(str(chain.root), [(place, content is None) for place, content in sorted(start.tree.items())])


def interrupted(chain: Chain, start: Start, every: Every) -> Iterator[tuple[str, list[Ran]]]:
    """The stage killed at each change it makes, and run again."""
    for role, trace in start.traces.items():
        for operation in every(each for each in trace if each.name in CHANGING):
            killed = chain.disturb(start, Fault(KILL_BEFORE, operation.number, role=role, traced=BOTH))
            yield f"killed at {operation.number}", [killed, chain.run(start.stage, start.stdin, Fault(traced=BOTH))]


def losses(chain: Chain, start: Start, ran: Ran, after: Tree, every: Every) -> Iterator[tuple[str, Tree, bytes]]:
    """(where, tree, what was printed by then): after every operation both of what may be left."""
    disk, position = _disk(chain, start), 0
    for operation in ran.trace:
        disk.do(operation)
        _, position = printed_at(operation, ran.out, position)
        if every.takes():
            for what, nodes in (("names", disk.top.lasting()), ("bytes", dict(disk.all()))):
                left = {place: _left(node, after.get(place, b"")) for place, node in nodes.items()}
                yield f"after {operation.name} {operation.path}, {what} lost", left, ran.out[:position]


def _left(node: Node, content: bytes | str | None) -> bytes | str | None:
    """Of bytes that were not synced the first half."""
    if node.directory:
        return None
    return content if node.synced or not isinstance(content, bytes) else content[: len(content) // 2]


# -- what must be found


def _syncs(wanted: Callable[[int], bool]) -> Callable[[], None]:
    """A writer that syncs only descriptors for which `wanted` of their mode is true."""

    def spoil() -> None:
        whole = os.fsync
        publish.os = SimpleNamespace(**{
            **vars(os), "fsync": lambda number: whole(number) if wanted(os.fstat(number).st_mode) else None
        })  # fmt: skip

    return spoil


def _makes_directories() -> None:
    publish.directory = lambda path: path.mkdir(parents=True, exist_ok=True)


CONTROLS = (
    ("bytes that are not synced", "compare", _syncs(stat.S_ISDIR)),
    ("names that are not synced", "compare", _syncs(stat.S_ISREG)),
    ("directories that are not synced", "materialize", _makes_directories),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="every so many-th point: seconds, for the tests")
    parser.add_argument("word", nargs="?", default="", help="only the stages that have this in their name")
    given = parser.parse_args()
    every = Every(151 if given.short else 1)
    broken = 0
    line = "{:36} {:>7} {:>11} {:>9} {:>9} {:>7}".format
    with chain_under_faults() as chain:
        print(line("stage", "traces", "operations", "losses", "states", "held"), flush=True)
        for start in (start for start in chain.starts if given.word in start.title):
            found, traces, operations, tried, states = [], 0, 0, 0, 0
            ran = chain.disturb(start, Fault(traced=BOTH))
            after = chain.tree()
            for where, runs in (("undisturbed", [ran]), *interrupted(chain, start, every)):
                traces += 1
                operations += sum(len(each.trace) for each in runs)
                found += [f"{where}: {flaw}" for flaw in dict.fromkeys(flaws(chain, start, runs))]
            for where, left, printed in losses(chain, start, ran, after, every):
                tried += 1
                chain.restore(left)
                try:
                    chain.require_standing(start.stage, printed)
                    states += chain.finish(chain.stages["seal"], b"")
                except Broken as flaw:
                    found.append(f"{where}: {flaw}")
            print(line(start.title, traces, operations, tried, states, "no" if found else "yes"), flush=True)
            print("".join(f"    {flaw}\n" for flaw in found[:8]), end="", flush=True)
            broken += len(found)
        for what, title, spoil in CONTROLS:
            start = chain.start(title)
            missed = not flaws(chain, start, [chain.disturb(start, Fault(traced=BOTH), spoil)])
            print(f"control: {what}: {'MISSED' if missed else 'found'}")
            broken += missed
    print(f"{broken} did not hold")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
