"""Many writers at once, late writers, signals and closed pipes at every stage: nothing lost, nothing double.

    python -P dev/torture/races.py [PROOF]…       # scorers, requeue, pipes, devices, signals, ended, make; none: all

One line a trial; exit 0 when all held. What each proves stands in docs/robustness.md; tests/test_races.py is the short
form, of the same functions.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tests"))

import makes_fixtures as makes  # noqa: E402
import races_fixtures as races  # noqa: E402

Trial = tuple[str, list[str]]

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL)
#: files in the attempts of three rows when a signal comes: the first of the first, …, the last seal of the last
FILES = (1, 3, 5, 8, 12, 17, 22, 27, 31, 33)


def make(directory: Path) -> Iterator[Trial]:
    """256 rows of s0 in 32 groups by `make -j32`, and 44 rows by two makes at once; beside a run of one pipe each."""
    for name, batch_sizes, knobs, repeats, at_once, jobs in (
        ("many", 17, list(makes.ENGINES), 17, 1, 32),
        ("twice", 10, ["rollout.dtype", "training.compute_dtype"], 3, 2, 8),
    ):
        place = directory / name
        place.mkdir()
        config = makes.smoke_experiment(place, name, batch_sizes, knobs)
        found, counts = makes.makes_at_once(place, config, at_once, jobs, repeats)
        rows, expected = makes.one_pipe(place, config, repeats)
        if counts["rows answered"] != rows or counts["not sealed"]:
            found.append(f"of {rows} rows: {dict(counts)}")
        if not rows <= counts["sealed"] <= at_once * rows:
            found.append(f"{counts['sealed']} attempts sealed by {at_once} of {rows} rows")
        if races.results(place / "runs") != expected:
            found.append("the verdicts are not those of one pipe")
        yield f"{at_once} x make -j{jobs}, {rows} rows: {counts['sealed']} attempts sealed", found


def scorers(directory: Path) -> Iterator[Trial]:
    """50 scorers come to score one attempt, and are let go at once."""
    for wobbles in (1, 3):
        said = "the same" if wobbles == 1 else f"{wobbles} different things"
        yield f"50 scorers of one attempt, {said}", races.scorers_race(races.Place(directory / said), 50, wobbles)


def requeue(directory: Path) -> Iterator[Trial]:
    """A job that was held up writes after the one that took its place has sealed."""
    for differs in (False, True):
        said = "something else" if differs else "the same"
        yield f"a requeued job, then the late one, {said}", races.requeued(races.Place(directory / said), differs)


def signals(directory: Path) -> Iterator[Trial]:
    """The chain of three rows is sent a signal at each of these moments, and resumed."""
    place = races.Place(directory / "chain")
    rows = place.rows(3)
    expected = races.undisturbed_results(place, rows)
    for signum in SIGNALS:
        for everybody in (False, True):
            found: list[str] = []
            for files in FILES:
                found += races.signalled(place, rows, signum, files, everybody, expected)
            to = "all processes" if everybody else "the pipe's group"
            yield f"{signum.name} to {to}, at {len(FILES)} moments, resumed", found


def ended(directory: Path) -> Iterator[Trial]:
    """`make -j4 run` is sent a signal, and run once more."""
    place = races.Place(directory / "make")
    config = makes.smoke_experiment(place.path, "ended", 2, ["rollout.dtype"])
    for signum in SIGNALS:
        for everybody in (False, True):
            to = "all processes" if everybody else "make's group"
            yield f"{signum.name} to {to}, run again", makes.make_ended(place, config, signum, 12, everybody)


def pipes(directory: Path) -> Iterator[Trial]:
    """The reader of each stage goes away after a line."""
    place = races.Place(directory / "chain")
    rows = place.rows(3)
    expected = races.undisturbed_results(place, rows)
    for stage, (tool, *_) in enumerate(races.Pipe.STAGES):
        yield f"the reader of {tool} (stage {stage + 1}) goes, resumed", races.closed_pipe(place, rows, stage, expected)


def devices(directory: Path) -> Iterator[Trial]:
    """Scorers of one, two and four devices wait for four devices whose holders are killed."""
    found = races.crowd(races.Place(directory / "host"), 24)
    yield "24 scorers of 1, 2 and 4 devices on 4, their holders killed", found


PROOFS = {proof.__name__: proof for proof in (scorers, requeue, pipes, devices, signals, ended, make)}


def main() -> int:
    """Try all that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("proofs", nargs="*", choices=[*PROOFS, []], metavar="PROOF")
    chosen = parser.parse_args().proofs or list(PROOFS)
    broken = 0
    for name in chosen:
        with tempfile.TemporaryDirectory(prefix="xd-races-") as directory:
            began = time.monotonic()
            for what, found in PROOFS[name](Path(directory)):
                broken += bool(found)
                print(f"{'held' if not found else 'BROKEN':<7} {what} ({time.monotonic() - began:.0f} s)", flush=True)
                for flaw in found:
                    print(f"        {flaw}", flush=True)
                began = time.monotonic()
    print("all held" if not broken else f"{broken} did not hold")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
