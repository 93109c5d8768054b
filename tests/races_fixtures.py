"""Many writers, and signals at any moment: runs of the chain, what they leave, and whether that is what it should be.

What `dev/torture/races.py` does at length, `tests/test_races.py` does in short. A function that tries something gives
the flaws it found, in words; none: it held.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conftest import ROOT, Tools
from scoring_fixtures import Bench

from libxd import canon, publish, seal
from libxd.rundir import ATTEMPT_ID, PAYLOADS, SEAL, Attempt
from libxd.tensors import TensorFile

PATIENCE_S = 300.0  # only what hangs waits so long
_POLL_S = 0.01
#: what must not depend on who scored it, when, or in which attempt
RESULTS = ("comparison.json", "token_diffs.safetensors", "actual.json", "score_rollout.safetensors",
           "score_training.safetensors")  # fmt: skip


class Place:
    """A directory with a scripted engine, rows for it, and a mark by which all processes started here are known."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory
        self.bench = Bench(Tools(directory), directory)
        self.log = directory / "log"
        os.mkfifo(directory / "gate")
        self.mark = f"XD_RACES={directory}"
        self.environment = {**os.environ, **self.bench.environment, "XD_PYTHON": sys.executable,
                            "XD_RACES": str(directory), "SCRIPTED_LOG": str(self.log)}  # fmt: skip

    def rows(self, count: int, script: str = "plain") -> Path:
        """A file of as many rows, of one engine."""
        path = self.path / "rows.jsonl"
        rows = [self.bench.case(script, ("batch.size", 1 + number)) for number in range(count)]
        path.write_bytes(b"".join(canon.dumps(row) + b"\n" for row in rows))
        return path

    def start(self, tool: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        """A tool with its streams where the options say."""
        variables = options.pop("variables", {})
        return subprocess.Popen(
            [ROOT / "tools" / tool, *map(str, arguments)], cwd=self.path, text=True,
            env={**self.environment, **variables}, preexec_fn=undisturbed, **options,
        )  # fmt: skip

    def ran(self, tool: str, *arguments: object, stdin: str = "", **variables: str) -> tuple[int, str, str]:
        """Status, stdout and stderr."""
        process = self.start(tool, *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             variables=variables)  # fmt: skip
        out, err = process.communicate(stdin, timeout=PATIENCE_S)
        return process.returncode, out, err

    def pipe(self, rows: str, runs: str) -> Pipe:
        """The whole chain over rows, started."""
        return Pipe(self, rows, runs)

    def alive(self) -> list[int]:
        """Every process that was started here and has not ended."""
        found = []
        for entry in os.scandir("/proc"):
            try:
                variables = Path(entry.path, "environ").read_bytes() if entry.name.isdecimal() else b""
            except OSError:  # gone, or being so
                continue
            if self.mark.encode() in variables.split(b"\0"):
                found.append(int(entry.name))
        return found


def undisturbed() -> None:
    """A runner in the background may have handed on ignored signals."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)


class Pipe:
    """The chain from `xd-materialize` to `xd-seal`, a process group of its own, as a shell starts it."""

    STAGES = (("xd-materialize", "--runs", "{runs}", "--runtime", "scripted"), ("xd-score", "--side", "rollout"),
              ("xd-score", "--side", "training"), ("xd-compare",), ("xd-seal",))  # fmt: skip

    def __init__(self, place: Place, rows: str, runs: str) -> None:
        self.place = place
        self.words = [place.path / f"stderr-{number}" for number in range(len(self.STAGES))]
        self.processes: list[subprocess.Popen[str]] = []
        coming: Any = subprocess.PIPE
        for stage, words in zip(self.STAGES, self.words, strict=True):
            tool, *arguments = (part.format(runs=runs) for part in stage)
            with open(words, "wb") as said:
                process = place.start(tool, *arguments, stdin=coming, stdout=subprocess.PIPE, stderr=said,
                                      process_group=self.processes[0].pid if self.processes else 0)  # fmt: skip
            if self.processes:
                coming.close()
            self.processes.append(process)
            coming = process.stdout
        assert self.processes[0].stdin is not None
        self.processes[0].stdin.write(rows)
        self.processes[0].stdin.close()

    def finish(self) -> tuple[list[int], list[str], str]:
        """Statuses of all stages, the lines of the last, and all that was said."""
        out = self.processes[-1].stdout.read()
        statuses = [process.wait(PATIENCE_S) for process in self.processes]
        return statuses, out.splitlines(), "".join(path.read_text() for path in self.words)


def until(holds: Callable[[], Any], what: str = "it did not come about") -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(_POLL_S)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


# -- what a run directory holds


def attempts(runs: Path) -> Iterator[Attempt]:
    """Every attempt below, whole or not."""
    for path in sorted(runs.glob("*/cases/*/*")):
        if ATTEMPT_ID.match(path.name):
            yield Attempt(path)


def results(runs: Path) -> dict[tuple[str, int], set[tuple[str, ...]]]:
    """(case, repeat) -> the digests of what its sealed attempts say; more than one where two of them disagree."""
    found: dict[tuple[str, int], set[tuple[str, ...]]] = {}
    for attempt in attempts(runs):
        if attempt.sealed:
            said = tuple(canon.digest_file(attempt.file(name)) for name in RESULTS)
            found.setdefault((attempt.case_id, attempt.requested()["repeat"]), set()).add(said)
    return found


def flaws(runs: Path, temporary: bool = False) -> list[str]:
    """What should stand in no run directory: broken files, foreign names, seals that do not hold.

    temporary: a process was killed outright, and its temporary file may have stayed.
    """
    found = []
    for attempt in attempts(runs):
        names = set(os.listdir(attempt.path))
        left = {name for name in names if name.startswith(publish.TEMPORARY_PREFIX)}
        if left and not temporary:
            found.append(f"{attempt}: {sorted(left)}")
        if foreign := names - left - {*PAYLOADS, SEAL}:
            found.append(f"{attempt}: {sorted(foreign)}")
        for name in names & {*PAYLOADS}:
            try:
                whole(attempt, name)
            except ValueError as error:
                found.append(f"{attempt}: {name}: {error}")
        if attempt.sealed:
            found += [f"{attempt}: {problem}" for problem in seal.verify(attempt)]
    return found


def whole(attempt: Attempt, name: str) -> None:
    """XdError for a file that is not what its name says."""
    if name.endswith(".json"):
        attempt.read(name)
        return
    TensorFile(attempt.file(name))


def snapshot(attempt: Attempt) -> dict[str, tuple[int, int, str]]:
    """Name -> inode, time of its last change, digest."""
    found = {}
    for name in sorted(os.listdir(attempt.path)):
        facts = os.lstat(attempt.file(name))
        found[name] = (facts.st_ino, facts.st_mtime_ns, canon.digest_file(attempt.file(name)))
    return found


# -- what is tried


def scorers_race(place: Place, writers: int, wobbles: int = 1) -> list[str]:
    """So many xd-score on one attempt, let go at once when all have come to score; they say `wobbles` different things.

    One wins. Who would have written the same has done its work (0), who would not is told (73); the file is a winner's.
    """
    row = place.bench.case("wobbles waits-at-the-gate")
    attempt, *controls = place.bench.materialize(*[row] * (1 + wobbles))
    gate = os.open(place.path / "gate", os.O_RDWR)
    processes = [
        place.start("xd-score", "--side", "rollout", attempt, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE, variables={"WOBBLE": str(number % wobbles)})
        for number in range(writers)
    ]  # fmt: skip
    until(lambda: lines(place.log).count("rollout waits") >= writers, "a scorer did not come to the gate")
    os.write(gate, b"." * writers)
    ended = [(*process.communicate(timeout=PATIENCE_S), process.returncode) for process in processes]
    os.write(gate, b"." * wobbles)
    for number, control in enumerate(controls):
        place.ran("xd-score", "--side", "rollout", control, WOBBLE=str(number))
    os.close(gate)
    name = "score_rollout.safetensors"
    said = [canon.digest_file(place.path / control / name) for control in controls]
    published = canon.digest_file(place.path / attempt / name)
    found = [] if len(set(said)) == wobbles else ["the controls do not differ"]
    if published not in said:
        return [*found, "the score file is nobody's"]
    for number, (out, err, status) in enumerate(ended):
        won = said[number % wobbles] == published
        expected = (0, f"{attempt}\n", 0) if won else (73, "", 1)
        if (status, out, len(err.splitlines())) != expected:
            found.append(f"writer {number}: status {status}, {out!r}, {err!r}")
    return found + flaws(place.path / "runs") + [f"left alive: {pid}" for pid in place.alive()]


def requeued(place: Place, differs: bool) -> list[str]:
    """A job that was held up comes to write when the same job, requeued, has sealed the attempt."""
    (attempt,) = place.bench.attempts("wobbles waits-at-the-gate")
    gate = os.open(place.path / "gate", os.O_RDWR)
    first = place.start("xd-score", "--side", "rollout", attempt, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE, variables={"WOBBLE": str(int(differs))})  # fmt: skip
    until(lambda: "rollout waits" in lines(place.log))
    found = []
    again = {"WOBBLE": "0", "GATE_IS_OPEN": "1"}
    for tool in (["xd-score", "--side", "rollout"], ["xd-score", "--side", "training"], ["xd-compare"], ["xd-seal"]):
        status, out, err = place.ran(*tool, attempt, **again)
        if (status, out) != (0, f"{attempt}\n"):
            found.append(f"{tool}: status {status}: {err}")
    before = snapshot(Attempt(place.path / attempt))
    os.write(gate, b".")
    out, err = first.communicate(timeout=PATIENCE_S)
    os.close(gate)
    if (first.returncode, out) != ((73, "") if differs else (0, f"{attempt}\n")):
        found.append(f"the late writer: status {first.returncode}, {out!r}, {err!r}")
    if snapshot(Attempt(place.path / attempt)) != before:
        found.append("the sealed attempt changed")
    for tool in (["xd-score", "--side", "training"], ["xd-compare"], ["xd-seal"]):  # the rest of the late job
        status, _, err = place.ran(*tool, attempt, **again)
        if status or snapshot(Attempt(place.path / attempt)) != before:
            found.append(f"{tool} once more: status {status}: {err}")
    return found + flaws(place.path / "runs")


def signalled(place: Place, rows: Path, signum: int, files: int, everybody: bool, expected: Any) -> list[str]:
    """The chain is sent a signal when so many files stand in its attempts; what it leaves is then resumed.

    everybody: all processes are sent it, as by a scheduler, and not those of the pipe's group alone, as by a terminal.
    expected: `results` of a run that was not disturbed.
    """
    runs = place.path / f"runs-{signum}-{files}-{int(everybody)}"
    pipe = place.pipe(rows.read_text(), runs.name)
    over = pipe.processes[-1]
    until(lambda: sum(1 for _ in runs.glob("*/cases/*/*/*")) >= files or over.poll() is not None)
    for pid in place.alive() if everybody else ():
        kill(os.kill, pid, signum)
    kill(os.killpg, pipe.processes[0].pid, signum)
    statuses, _, said = pipe.finish()
    allowed = {0, -signum, 128 + signum, 128 + signal.SIGPIPE}
    if everybody:  # a scorer's child may have been first, and its parent past the signal
        allowed |= {75}
    found = [f"status {status}" for status in statuses if status not in allowed]
    if "Traceback" in said or (said and not everybody and signum != signal.SIGKILL):
        found.append(f"said: {said!r}")
    until(lambda: not place.alive(), "somebody is left alive")
    found += flaws(runs, temporary=signum == signal.SIGKILL)
    status, left, err = place.ran("xd-resume", "-q", "--runs", runs.name, "--runtime", "scripted", rows)
    statuses, _, said = place.pipe(left, runs.name).finish()
    found += [f"resumed: {statuses}, {said!r} {err}"] if any((status, *statuses)) else []
    if results(runs) != expected:
        found.append("the verdicts are not those of an undisturbed run")
    return found + flaws(runs, temporary=signum == signal.SIGKILL)


def kill(how: Callable[[int, int], None], pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it had done its work
        how(pid, signum)


def closed_pipe(place: Place, rows: Path, stage: int, expected: Any) -> list[str]:
    """Whoever reads a stage's output goes away after its first line; what that leaves is resumed."""
    runs = place.path / f"runs-closed-{stage}"
    commands = [" ".join(part) for part in Pipe.STAGES[: stage + 1]]
    script = " | ".join(commands).format(runs=runs.name) + ' | head -n 1; echo "${PIPESTATUS[*]}"'
    done = subprocess.run(
        ["bash", "-c", script], input=rows.read_text(), capture_output=True, text=True, cwd=place.path,
        timeout=PATIENCE_S, env={**place.environment, "PATH": f"{ROOT / 'tools'}{os.pathsep}{os.environ['PATH']}"},
    )  # fmt: skip
    *out, statuses = done.stdout.splitlines()
    found = [f"status {status}" for status in statuses.split() if int(status) not in (0, 128 + signal.SIGPIPE)]
    if len(out) != 1 or done.stderr:
        found.append(f"{out}, said: {done.stderr!r}")
    until(lambda: not place.alive(), "somebody is left alive")
    found += flaws(runs)
    status, left, err = place.ran("xd-resume", "-q", "--runs", runs.name, "--runtime", "scripted", rows)
    resumed, _, said = place.pipe(left, runs.name).finish()
    found += [f"resumed: {resumed}, {said!r} {err}"] if any((status, *resumed)) else []
    if results(runs) != expected:
        found.append("the verdicts are not those of an undisturbed run")
    return found + flaws(runs)


def undisturbed_results(place: Place, rows: Path) -> Any:
    """`results` of the chain when nobody is in its way."""
    statuses, _, said = place.pipe(rows.read_text(), "runs-undisturbed").finish()
    assert not any(statuses), said
    return results(place.path / "runs-undisturbed")


def crowd(place: Place, scorers: int, devices: int = 4) -> list[str]:
    """Scorers of one, two and four devices, more than there are, while others hold all of these and are killed.

    No two engines are ever on one device: the scripted engine fails where it finds another that lives.
    """
    (place.path / "seats").mkdir()
    variables = {"XD_DEVICES": ",".join(map(str, range(devices))), "TMPDIR": str(place.path),
                 "SCRIPTED_WITNESS": str(place.path / "seats")}  # fmt: skip

    def start(attempt: str) -> subprocess.Popen[str]:
        return place.start("xd-score", "-q", "--side", "rollout", attempt, stdin=subprocess.DEVNULL,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, variables=variables)  # fmt: skip

    asked = [(1, 2, 1, devices)[number % 4] for number in range(scorers)]
    paths = place.bench.attempts(*[f"gpus:{devices // 2} waits-at-the-gate"] * 2, *(f"gpus:{n}" for n in asked))
    gate = os.open(place.path / "gate", os.O_RDWR)
    holders = [start(path) for path in paths[:2]]
    until(lambda: sum("waits on" in line for line in lines(place.log)) == 2)
    waiting = [start(path) for path in paths[2:]]
    directory = next(place.path.glob("xd-devices-*"))
    until(lambda: len(list(directory.glob("place-*"))) == scorers, "not all of them wait in line")
    opened = sum("opens" in line for line in lines(place.log))
    found = [] if opened == 2 else ["an engine was opened on a device in use"]
    for holder in holders:
        holder.kill()
        holder.communicate()
    for number, (path, process) in enumerate(zip(paths[2:], waiting, strict=True)):
        out, err = process.communicate(timeout=PATIENCE_S)
        if (process.returncode, out, err) != (0, f"{path}\n", ""):
            found.append(f"scorer {number}: status {process.returncode}, {err!r}")
    os.close(gate)
    until(lambda: not place.alive(), "somebody is left alive")
    found += [f"left in line: {path}" for path in directory.glob("place-*")]
    return found + flaws(place.path / "runs", temporary=True)
