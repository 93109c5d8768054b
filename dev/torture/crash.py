"""Each tool is killed at each of its file operations, and each operation fails in each way that a system has for it.

    python -P dev/torture/crash.py [--short] [WORD]

The chain is that of s0 with two cases: plan, resume, materialize, score (both sides; the tool, and its engine's
process), compare, seal. After every fault what the tool had printed goes down the rest of the pipe, and the chain is
run again from its plan. Then no final name may hold but what it holds in an undisturbed run, no attempt that was sealed
may have changed, and the verdicts must be those of the undisturbed run, byte for byte. Needs Linux and a C compiler.
"""

from __future__ import annotations

import argparse
import errno
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tests")]

from crash_fixtures import (  # noqa: E402
    Broken,
    Chain,
    Every,
    Stage,
    Start,
    chain_under_faults,
)
from fault_fixtures import (  # noqa: E402
    CHANGING,
    FAIL,
    FAIL_FROM,
    FULL,
    KILL_AFTER,
    KILL_BEFORE,
    KILLED,
    READ_ONLY,
    SHORT,
    TEAR,
    UNDISTURBED,
    Fault,
    Operation,
    Ran,
    errors_of,
    temporary,
)

from libxd import publish  # noqa: E402
from libxd.errors import Status  # noqa: E402

#: what a system may break off for a signal
INTERRUPTIBLE = ("create", "open", "read", "write", "fsync")

#: a point that was tried: where, how the disturbed stage ended, what must hold of that
Trial = tuple[str, Ran, Callable[[], None]]


class Table:
    """What was tried, and what did not hold."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.points = self.killed = self.broken = 0

    def say(self, *cells: object) -> None:
        print("{:54} {:>7} {:>7} {:>7}".format(*cells), flush=True)

    def row(self, what: str, stage: Stage, trials: Iterator[Trial]) -> None:
        """Try, then finish the chain. states: how many of the points left one that had not been finished before."""
        points, states, flaws = 0, 0, []
        for where, ran, check in trials:
            points += 1
            try:
                check()
                self.chain.require_standing(stage, ran.out)
                states += self.chain.finish(stage, ran.out)
            except Broken as flaw:
                flaws.append(f"    {what}, {where}: {flaw}")
        if not points:
            return
        self.say(what, points, states, points - len(flaws))
        print("\n".join(flaws[:8]), end="\n" if flaws else "", flush=True)
        self.points += points
        self.broken += len(flaws)
        self.killed += points if what.startswith("killed") else 0

    def control(self, what: str, found: bool) -> None:
        """Something that is broken on purpose must be found."""
        self.say(f"control: {what}", "", "", "found" if found else "MISSED")
        self.broken += not found


# -- points


def kills(chain: Chain, start: Start, role: str, every: Every) -> Iterator[Trial]:
    """Killed before each operation, within each write (after a byte, half of it, all but a byte), after the last."""
    operations = start.traces[role]
    for operation in every(operations):
        faults = [Fault(KILL_BEFORE, operation.number, role=role)]
        if operation.name == "write":
            faults += [Fault(TEAR, operation.number, part, role=role) for part in (1, 500, 999)]
        if operation is operations[-1]:
            faults += [Fault(KILL_AFTER, operation.number, role=role)]
        for fault in faults:
            ran = chain.disturb(start, fault)
            yield f"{role} at {operation.number} ({operation.name})", ran, lambda ran=ran: _require_death(ran, role)


def kills_of_kills(chain: Chain, start: Start, every: Every) -> Iterator[Trial]:
    """Killed at a change, started again, and killed there, too: over an attempt that is half done."""
    role = "child" if "child" in start.traces else "tool"
    changes = [each.number for each in start.traces[role] if each.name in CHANGING]
    for first, second in every(zip(changes, reversed(changes), strict=True)):
        chain.disturb(start, Fault(KILL_BEFORE, first, role=role))
        ran = chain.run(start.stage, start.stdin, Fault(KILL_BEFORE, second, role=role))
        yield f"{role} at {first}, then at {second}", ran, lambda: None


def refusals(chain: Chain, start: Start, role: str, every: Every) -> Iterator[Trial]:
    """Each operation fails once with each errno that it can have."""
    for planned in every(start.traces[role]):
        for code in errors_of(planned):
            ran = chain.disturb(start, Fault(FAIL, planned.number, code, role=role, traced=(role,)))
            hit = next(each for each in ran.trace if each.number == planned.number)
            if code in errors_of(hit):  # xd-compare has two threads: it may be another operation than it was
                where = f"{role} at {hit.number} ({hit.name} {hit.path} {errno.errorcode[code]})"
                yield where, ran, lambda ran=ran, hit=hit, code=code: _require_refusal(chain, start, ran, hit, code)


def refused_from(
    chain: Chain, start: Start, role: str, code: int, which: tuple[str, ...], every: Every
) -> Iterator[Trial]:
    """From each operation on, all of these fail: a disk that is full, or read-only, stays so."""
    for operation in every(start.traces[role]):
        if operation.name in which and not operation.stream:
            ran = chain.disturb(start, Fault(FAIL_FROM, operation.number, code, which, role))
            yield f"{role} from {operation.number}", ran, lambda ran=ran: _require_status(ran, (Status.CONFLICT,), code)


def harmless(chain: Chain, start: Start, role: str, every: Every) -> Iterator[Trial]:
    """Writes that take only a part of the bytes, and calls that a signal interrupts, go through."""
    for planned in every(start.traces[role]):
        faults = [Fault(FAIL, planned.number, errno.EINTR, role=role, traced=(role,))]
        if planned.name == "write":
            faults += [Fault(SHORT, planned.number, 500, role=role, traced=(role,))]
        for fault in faults if planned.name in INTERRUPTIBLE else ():
            ran = chain.disturb(start, fault)
            hit = next(each for each in ran.trace if each.number == planned.number)
            if hit.name in INTERRUPTIBLE:
                where = f"{role} at {hit.number} ({hit.name} {hit.path})"
                yield where, ran, lambda ran=ran: _require_as_ever(start, ran)


def limits(chain: Chain, start: Start, kind: int, values: Iterable[int]) -> Iterator[Trial]:
    """A limit of the process (RLIMIT_NOFILE, RLIMIT_FSIZE) that is too low, or just enough."""
    for value in values:
        def lower(value: int = value) -> None:
            resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))

        ran = chain.disturb(start, UNDISTURBED, lower)
        statuses = (Status.CONFLICT,) if kind == resource.RLIMIT_FSIZE else (Status.RETRY,)
        yield f"limit {value}", ran, lambda ran=ran, statuses=statuses: (
            _require_as_ever(start, ran) if ran.status == 0 else _require_status(ran, statuses, None)
        )


def small_disks(chain: Chain, sizes: Iterable[int], option: str) -> Iterator[Trial]:
    """The whole chain on a file system that is too small, which then grows."""
    for size in sizes:
        mount = ["mount", "-t", "tmpfs", "-o", f"{option}={size}", "none", chain.root]
        subprocess.run(mount, check=True)
        try:
            chain.restore(chain.starts[0].tree)
            printed, last, failed = b"", chain.starts[0].ran, []
            for stage in chain.stages.values():
                last = chain.run(stage, printed)
                printed = last.out
                if last.status:
                    failed.append(last)
            roomy = f"remount,{option}={1 << 24 if option == 'size' else 4096}"
            subprocess.run([*mount[:4], roomy, *mount[5:]], check=True)

            def check(failed: list[Ran] = failed) -> None:
                for ran in failed[:1]:
                    _require_status(ran, (Status.CONFLICT,), errno.ENOSPC)

            yield f"{option}={size}", last, check
        finally:
            subprocess.run(["umount", chain.root], check=True)


# -- what must hold of a disturbed stage


def _require_death(ran: Ran, role: str) -> None:
    """A tool dies; one whose engine's process dies says so and that it is worth trying again."""
    if role == "tool" and ran.status != KILLED:
        raise Broken(f"was to be killed, and ended with {ran.status}")
    if role == "child":
        _require_status(ran, (Status.RETRY, Status.DONE), None)  # 0: it had answered for its last attempt


def _require_status(ran: Ran, statuses: tuple[int, ...], code: int | None) -> None:
    if ran.status not in statuses:
        raise Broken(f"ended with {ran.status}, not {[int(status) for status in statuses]}: {ran.err}")
    said = [line for line in ran.err.splitlines() if " to score; " not in line and "nothing to score" not in line]
    if "Traceback" in ran.err or not all(line.startswith("xd-") for line in said):
        raise Broken(f"said more than its lines: {ran.err}")
    if code is not None and (not said or not all(os.strerror(code) in line for line in said)):
        raise Broken(f"does not say {os.strerror(code)!r} in each line: {ran.err or '(nothing)'}")


def _require_refusal(chain: Chain, start: Start, ran: Ran, operation: Operation, code: int) -> None:
    """One line with the reason, the status of its kind, nothing temporary left, the other row done."""
    if operation.path == "<stderr>":  # that nobody hears changes nothing about the work
        if (ran.status, ran.out) != (0, start.ran.out):
            raise Broken(f"ended with {ran.status} for want of a stderr")
        return
    reading = operation.path == "<stdin>" or operation.name in ("open", "list", "read")
    status = (
        Status.RETRY if code == errno.EMFILE
        else Status.MISSING if reading else Status.CONFLICT
    )  # fmt: skip
    # an attempt that cannot be read is no answer: xd-resume says so, and the row is scored anew
    passed_over = start.stage.tool == "resume" and status == Status.MISSING
    _require_status(ran, (status, Status.DONE) if passed_over else (status,), code)
    lines = [line for line in ran.err.splitlines() if os.strerror(code) in line]
    if len(lines) != 1:
        raise Broken(f"said {len(lines)} lines: {ran.err}")
    if operation.name != "unlink" and (left := [place for place in chain.tree() if temporary(place)]):
        raise Broken(f"left {left}")
    rows = start.ran.out.count(b"\n")
    if not operation.stream and start.stage.tool != "plan" and ran.out.count(b"\n") < rows - 1:
        raise Broken(f"the other row was not done, either: {ran.err}")


def _require_as_ever(start: Start, ran: Ran) -> None:
    usual = start.ran
    if (ran.status, ran.out, ran.err) != (usual.status, usual.out, usual.err):
        raise Broken(f"ended with {ran.status}: {ran.err}")


# -- what must be found


def _writes_in_place() -> None:
    """The writer of files that this one must not be: it writes under the final name."""

    def in_place(path: str | os.PathLike[str], data: bytes) -> bool:
        with open(path, "wb") as file:
            file.write(data if isinstance(data, bytes) else b"".join(data))
        return True

    publish.publish = in_place


def _scores_otherwise() -> None:
    """A scorer whose logprobs are one unit in the last place off."""
    import numpy as np

    from libxd.scoring import score_file

    score_file._one_nan = lambda values: np.nextafter(values, np.float32(0))


def controls(table: Table) -> None:
    """The checks must be able to fail."""
    chain = table.chain
    trace = chain.disturb(chain.start("compare"), Fault(traced=("tool",)), _writes_in_place).trace
    write = next(each.number for each in trace if each.path.endswith(".json") and each.name == "write")
    chain.disturb(chain.start("compare"), Fault(TEAR, write, 500), _writes_in_place)
    table.control("a half file under a final name", _breaks(lambda: chain.require_whole(chain.tree())))
    ran = chain.disturb(chain.start("score training"), UNDISTURBED, _scores_otherwise)
    for name in ("compare", "seal"):
        ran = chain.run(chain.stages[name], ran.out)
    table.control("verdicts of other scores", _breaks(chain.require_verdicts))
    chain.restore(chain.starts[0].tree)
    chain.resume()
    sealed = chain.sealed()
    victim = chain.root / next(place for place in sealed if place.endswith("comparison.json"))
    victim.write_bytes(victim.read_bytes()[:-1])
    table.control("a sealed attempt that changed", _breaks(lambda: chain.require_kept(sealed)))


def _breaks(check: Callable[[], object]) -> bool:
    try:
        check()
    except Broken:
        return True
    return False


# -- the whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="every so many-th point: seconds, for the tests")
    parser.add_argument("word", nargs="?", default="", help="only the rows that have this in their title")
    given = parser.parse_args()
    every = Every(211 if given.short else 1)
    with chain_under_faults() as chain:
        table = Table(chain)
        table.say("what is disturbed", "points", "states", "held")
        for title, stage, trials in rows(table.chain, every):
            if given.word in title:
                table.row(title, stage, trials)
        controls(table)
    print(f"{table.points} points, {table.killed} of them kills; {table.broken} did not hold")
    return 1 if table.broken else 0


def rows(chain: Chain, every: Every) -> Iterator[tuple[str, Stage, Iterator[Trial]]]:
    """(title, stage, trials) of every row of the table."""
    processes = [(start, role) for start in chain.starts for role in start.traces]
    for start, role in processes:
        yield f"killed: {_called(start, role)}", start.stage, kills(chain, start, role, every)
    for title in ("score rollout", "score training", "compare", "seal"):
        start = chain.start(title)
        yield f"killed twice: {title}", start.stage, kills_of_kills(chain, start, every)
    for start, role in processes:
        yield f"refused: {_called(start, role)}", start.stage, refusals(chain, start, role, every)
    for code, which in ((errno.ENOSPC, FULL), (errno.EDQUOT, FULL), (errno.EROFS, READ_ONLY)):
        for start, role in processes:
            if any(each.name in which and not each.stream for each in start.traces[role]):
                title = f"{errno.errorcode[code]} from there on: {_called(start, role)}"
                yield title, start.stage, refused_from(chain, start, role, code, which, every)
    for start, role in processes:
        yield f"short, interrupted: {_called(start, role)}", start.stage, harmless(chain, start, role, every)
    for start in chain.starts:
        sizes, files = range(0, 6000, 400), range(3, 24)
        yield f"RLIMIT_FSIZE: {start.title}", start.stage, limits(chain, start, resource.RLIMIT_FSIZE, every(sizes))
        yield f"RLIMIT_NOFILE: {start.title}", start.stage, limits(chain, start, resource.RLIMIT_NOFILE, every(files))
    if mountable():
        last, sizes, files = chain.stages["seal"], range(24576, 150_000, 4096), range(4, 60, 2)
        yield "a small tmpfs, by bytes", last, small_disks(chain, every(sizes), "size")
        yield "a small tmpfs, by files", last, small_disks(chain, every(files), "nr_inodes")
    else:
        print("no tmpfs can be mounted here: those rows are left out")


def _called(start: Start, role: str) -> str:
    return f"{start.title}, the engine" if role == "child" else start.title


def mountable() -> bool:
    with tempfile.TemporaryDirectory() as place:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "none", place], capture_output=True).returncode == 0
        if mounted:
            subprocess.run(["umount", place], check=True)
    return mounted


if __name__ == "__main__":
    sys.exit(main())
