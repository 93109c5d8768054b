"""Every reader of xd under a coverage-guided fuzzer (atheris), each in a process of its own with a cap on its memory.

    python -P dev/torture/fuzz.py [--seconds 60] [--keep DIR] [READER...]

tests/hostile_fixtures.py has the readers and what must hold of them, tests/mutation_fixtures.py the mutations, which
stand beside the fuzzer's own. A table says what was tried: executions, edges of libxd that were reached, and faults,
each kept as a file. The status is 0 only when there is none. tests/test_hostile.py is the short form.
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
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent / "tests")]

MEMORY_BYTES = 512 << 20  # that an input of at most MOST_BYTES may take, beyond what its reader's modules do
MOST_BYTES = 1 << 16
HANG_S = 30  # for one input, on a machine that has other things to do
_BLIND = 0.3  # of the mutations are the fuzzer's own
_DONE = re.compile(r"stat::number_of_executed_units: (\d+)")
_COVERED = re.compile(r"cov: (\d+) ft: (\d+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("readers", nargs="*", metavar="READER", help="beginnings of readers' names; by default all")
    parser.add_argument("--seconds", type=int, default=60, help="for each reader (default: 60)")
    parser.add_argument("--keep", type=Path, help="where inputs with a fault are left (default: a temporary directory)")
    parser.add_argument("--one", metavar="READER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("fuzz: atheris is not installed, and nothing was fuzzed: pip install -e '.[fuzz]'", file=sys.stderr)
        sys.exit(69)
    if arguments.one:
        fuzz(arguments.one, arguments.seconds, arguments.keep)
        return
    import hostile_fixtures

    keep = arguments.keep or Path(tempfile.mkdtemp(prefix="xd-fuzz-"))
    names = [name for name in hostile_fixtures.readers()
             if not arguments.readers or name.startswith(tuple(arguments.readers))]  # fmt: skip
    print(f"{'reader':<36} {'executions':>10} {'edges':>6} {'features':>8} {'faults':>6}", flush=True)
    faults = sum(tried(name, arguments.seconds, keep / name.replace("/", "-")) for name in names)
    print(f"{len(names)} readers, {faults} faults" + (f", under {keep}" if faults else ""))
    sys.exit(bool(faults))


def tried(name: str, seconds: int, keep: Path) -> int:
    """Fuzz a reader in a child, print its line of the table and return how many faults there are."""
    keep.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", __file__, "--one", name, "--seconds", str(seconds), "--keep", str(keep)]
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # in memory, where there is such a place
    with tempfile.TemporaryDirectory(prefix="xd-fuzz-", dir=shared) as scratch:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                              env={**os.environ, "TMPDIR": scratch})  # fmt: skip
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
    """Fuzz one reader in this process; every kind of fault that is found is left in `keep` with its traceback."""
    import atheris

    sys.argv[1:] = []
    instrumented = atheris.instrument_imports(include=["libxd"])
    instrumented.__enter__()  # for good: formats and runtimes are imported when they are asked for
    import hostile_fixtures
    import mutation_fixtures

    reader = hostile_fixtures.readers()[name]
    place = Path(tempfile.gettempdir())
    corpus = place / "corpus"
    corpus.mkdir()
    seeds = dict(reader.seeds())
    kept = hostile_fixtures.CORPUS / name
    seeds |= {path.name: path.read_bytes() for path in sorted(kept.iterdir())} if kept.is_dir() else {}
    for number, data in enumerate(seeds.values()):
        (corpus / f"seed-{number}").write_bytes(data)
        with contextlib.suppress(hostile_fixtures.Fault):  # the fuzzer begins with it, and says so
            hostile_fixtures.run(reader, data, place / "input")
    limit(MEMORY_BYTES)
    known: set[str] = set()

    def one(data: bytes) -> None:
        try:
            hostile_fixtures.run(reader, data, place / "input")
        except (hostile_fixtures.Fault, MemoryError, RecursionError) as error:
            kind = _kind(error)
            if kind not in known:
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
               "print_final_stats": 1, "verbosity": 1, "artifact_prefix": f"{keep}/", "seed": 1}  # fmt: skip
    atheris.Setup([sys.argv[0], *(f"-{key}={value}" for key, value in options.items()), str(corpus)], one,
                  custom_mutator=mutated)  # fmt: skip
    atheris.Fuzz()


def _kind(error: BaseException) -> str:
    """Where a fault comes about: two of one place are one."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if "libxd" in frame.filename]
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else str(cause)[:40]
    return f"{type(cause).__name__} {place}"


def limit(more_bytes: int) -> None:
    """Let this process map so much more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    held = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + more_bytes, held + more_bytes))


if __name__ == "__main__":
    main()
