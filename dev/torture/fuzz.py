"""Every reader of xd under a coverage-guided fuzzer (atheris), each in a process of its own with a cap on its memory.

    python -P dev/torture/fuzz.py [--seconds 60] [--keep DIR] [READER...]

tests/hostile_fixtures.py has the readers and what must hold of them, tests/mutation_fixtures.py the mutations, which
stand beside the fuzzer's own. A table says what was tried: executions, edges of libxd that were reached, and faults,
each kept as a file. Another is of files that unfold (tests/bomb_fixtures.py), as large as a tool reads. The status is 0
only when all held. tests/test_hostile.py is the short form.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent / "tests")]

MOST_BYTES = 1 << 16  # of an input that the fuzzer makes
HANG_S = 30  # for one of them, on a machine that has other things to do
_BLIND = 0.3  # of the mutations are the fuzzer's own
_DONE = re.compile(r"stat::number_of_executed_units: (\d+)")
_COVERED = re.compile(r"cov: (\d+) ft: (\d+)")

BOMB_BYTES = 64 << 20
#: what a bomb may take: as many times its bytes as JSON may, and for so long
BOMB_MEMORY_BYTES, BOMB_CPU_S = 32 * BOMB_BYTES, 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("readers", nargs="*", metavar="READER", help="beginnings of readers' names; by default all")
    parser.add_argument("--seconds", type=int, default=60, help="for each reader (default: 60)")
    parser.add_argument("--keep", type=Path, help="where inputs with a fault are left (default: a temporary directory)")
    parser.add_argument("--fuzz", metavar="READER", help=argparse.SUPPRESS)
    parser.add_argument("--bomb", metavar="BOMB", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("fuzz: atheris is not installed, and nothing was fuzzed: pip install -e '.[fuzz]'", file=sys.stderr)
        sys.exit(69)
    if arguments.fuzz:
        fuzz(arguments.fuzz, arguments.seconds, arguments.keep)
    if arguments.bomb:
        sys.exit(explode(arguments.bomb))
    import bomb_fixtures
    import hostile_fixtures

    keep = arguments.keep or Path(tempfile.mkdtemp(prefix="xd-fuzz-"))
    begins = tuple(arguments.readers) or ""
    names = [name for name in hostile_fixtures.readers() if name.startswith(begins)]
    bombs = [bomb for bomb in bomb_fixtures.bombs() if bomb.reader.startswith(begins)]
    print(f"{'reader':<36} {'executions':>10} {'edges':>6} {'features':>8} {'faults':>6}", flush=True)
    faults = sum(tried(name, arguments.seconds, keep / name.replace("/", "-")) for name in names)
    print(f"\n{'what unfolds':<32} {'reader':<20} {'MiB':>5} {'CPU s':>6} {'peak MiB':>9}  answer", flush=True)
    faults += sum(child("--bomb", bomb.name).returncode != 0 for bomb in bombs)
    print(f"\n{len(names)} readers, {len(bombs)} bombs, {faults} faults" + (f", under {keep}" if faults else ""))
    sys.exit(bool(faults))


def child(*arguments: str, **how: int) -> subprocess.CompletedProcess[str]:
    """This program in a process of its own, whose temporary files are in memory where there is such a place."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="xd-fuzz-", dir=shared) as scratch:
        return subprocess.run([sys.executable, "-P", __file__, *arguments], text=True, errors="replace",
                              env={**os.environ, "TMPDIR": scratch}, **how)  # fmt: skip


def tried(name: str, seconds: int, keep: Path) -> int:
    """Fuzz a reader in a child, print its line of the table and return how many faults there are."""
    keep.mkdir(parents=True, exist_ok=True)
    done = child("--fuzz", name, "--seconds", str(seconds), "--keep", str(keep),
                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    executions, covered = _DONE.findall(done.stdout), _COVERED.findall(done.stdout)
    found = sorted(keep.glob("*.input"))
    died = done.returncode != 0 or not executions
    edges, features = covered[-1] if covered else ("-", "-")
    print(f"{name:<36} {executions[-1] if executions else '-':>10} {edges:>6} {features:>8} {len(found) + died:>6}",
          flush=True)  # fmt: skip
    for path in found:
        print(f"    {path}: {path.with_suffix('.txt').read_text().strip().splitlines()[-1][:200]}")
    if died:
        (keep / "log").write_text(done.stdout)
        print(f"    ended with {done.returncode}: {keep / 'log'}")
    return len(found) + died


def fuzz(name: str, seconds: int, keep: Path) -> None:
    """Fuzz one reader in this process, and end it; each kind of fault that is found is left in `keep` with its
    traceback."""
    import atheris

    instrumented = atheris.instrument_imports(include=["libxd"])
    instrumented.__enter__()  # for good: formats and runtimes are imported when they are asked for
    import hostile_fixtures
    import mutation_fixtures

    reader = hostile_fixtures.readers()[name]
    place = Path(tempfile.gettempdir())
    corpus = place / "corpus"
    corpus.mkdir()
    kept = hostile_fixtures.CORPUS / name
    held = [path.read_bytes() for path in sorted(kept.iterdir()) if path.is_file()] if kept.is_dir() else []
    for number, data in enumerate([*reader.seeds().values(), *held]):
        (corpus / f"seed-{number}").write_bytes(data)
        with contextlib.suppress(hostile_fixtures.Fault):  # the fuzzer begins with it, and says so
            hostile_fixtures.run(reader, data, place / "input")
    known: set[str] = set()

    def one(data: bytes) -> None:
        try:
            hostile_fixtures.run(reader, data, place / "input")
        except (hostile_fixtures.Fault, MemoryError, RecursionError) as error:
            if (kind := _kind(error)) not in known:
                known.add(kind)
                path = keep / f"{len(known):03d}.input"
                path.write_bytes(data)
                said = "".join(traceback.format_exception(error))
                path.with_suffix(".txt").write_text(said, encoding="utf-8", errors="backslashreplace")

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        draw = random.Random(seed)
        if draw.random() < _BLIND:
            return atheris.Mutate(data, most)
        return mutation_fixtures.mutate(data, reader.form, draw)[:most]

    options = {"max_total_time": seconds, "timeout": HANG_S, "max_len": MOST_BYTES, "rss_limit_mb": 0,
               "print_final_stats": 1, "artifact_prefix": f"{keep}/"}  # fmt: skip
    atheris.Setup([sys.argv[0], *(f"-{key}={value}" for key, value in options.items()), str(corpus)], one,
                  custom_mutator=mutated)  # fmt: skip
    with hostile_fixtures.capped(hostile_fixtures.MEMORY_BYTES):
        atheris.Fuzz()


def _kind(error: BaseException) -> str:
    """Where a fault comes about: two of one place are one."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if "libxd" in frame.filename]
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else str(cause)[:40]
    return f"{type(cause).__name__} {place}"


def explode(name: str) -> bool:
    """Give one bomb to its reader in this process, and print its line of the table. True: it did not hold."""
    import bomb_fixtures
    import hostile_fixtures

    bomb = next(bomb for bomb in bomb_fixtures.bombs() if bomb.name == name)
    reader = hostile_fixtures.readers()[bomb.reader]
    place = Path(tempfile.gettempdir()) / "input"
    for seed in reader.seeds().values():  # its modules are loaded before the cap is set
        hostile_fixtures.run(reader, seed, place)
    data = bomb.make(BOMB_BYTES)
    began = time.process_time()
    found = hostile_fixtures.outcome(reader, data, place, BOMB_MEMORY_BYTES, BOMB_CPU_S)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{bomb.name:<32} {bomb.reader:<20} {len(data) >> 20:>5} {time.process_time() - began:>6.1f} {peak:>9}  "
          f"{found.get('fault') or ' '.join(dict.fromkeys(found['codes']))}", flush=True)  # fmt: skip
    return not set(bomb.codes) & set(found.get("codes", ()))


if __name__ == "__main__":
    main()
