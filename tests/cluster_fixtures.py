"""A Slurm of one's own, tasks of it held at a chosen moment and ended there, and verdicts to set side by side."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libxd.rundir import SEAL

ROOT = Path(__file__).resolve().parent.parent
POLICY = "--runtime cpu-smoke"
#: what a verdict is: where these are equal, byte for byte, the same was found
JUDGED = ("comparison.json", "token_diffs.safetensors", "actual.json")
_PATIENCE_S = 600.0

#: an interpreter that waits, as the engine of a side, where $XD_GATES has a FIFO of its task and side
_HOLDING = """#!/bin/sh
side= last=
for word; do [ "$last" != --side ] || side=$word; last=$word; done
gate=$XD_GATES/$SLURM_ARRAY_TASK_ID.$side
case "$*" in *libxd.scoring.child*)
    if [ -p "$gate" ]; then echo "$PPID" > "$gate.scorer"; read -r _ < "$gate"; fi ;;
esac
exec "$XD_HELD_PYTHON" "$@"
"""


def tools_environment(**variables: str) -> dict[str, str]:
    """That of a shell in which the tools are on PATH, under the interpreter of the tests."""
    path = f"{ROOT / 'tools'}:{os.environ['PATH']}:/usr/sbin"
    return {**os.environ, "PATH": path, "XD_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables}


def shell(script: str, place: Path, env: dict[str, str], *words: str) -> str:
    """What a script of bash says on stdout. AssertionError, with its stderr, where it fails."""
    done = subprocess.run(["bash", "-o", "pipefail", "-c", script, "bash", *words], cwd=place, env=env,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, f"{script}\n{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def experiment(place: Path, cases: int) -> Path:
    """`array.json`: s0's baseline and as many cheap cases more as make `cases`, of which some differ in a dtype.

    At most 256: batch sizes, by themselves and crossed with what changes an engine.
    """
    config = json.loads((ROOT / "experiments" / "s0.json").read_text())
    config["identity"]["sequences"]["path"] = str(ROOT / "experiments" / "sequences" / "s0.safetensors")
    changes = {"rollout.dtype": ["bfloat16", "float16"], "training.compute_dtype": ["bfloat16"],
               "training.attention_backend": ["eager"], "rollout.enable_prefix_caching": [False]}  # fmt: skip
    each = sum(map(len, changes.values()))
    sizes = [size for size in range(1, 60) if size != config["baseline"]["batch"]["size"]]
    count, rest = divmod(cases - 1, each)
    assert rest == 0 and count <= len(sizes), "1 + a multiple of 5, at most 256"
    config |= {
        "experiment_id": "array", "strategy": "pairwise", "pairs": [["batch.size", path] for path in changes],
        "interventions": [{"path": "batch.size", "values": sizes[:count]},
                          *({"path": path, "values": values} for path, values in changes.items())],
    }  # fmt: skip
    path = place / "array.json"
    path.write_text(json.dumps(config))
    return path


def on_one_machine(plan: Path, runs: Path, **variables: str) -> None:
    """The chain, one pipe, undisturbed. $POLICY: what scores."""
    shell('xd-resume -q "$1" --runs "$2" $POLICY | xd-materialize -q --runs "$2" $POLICY | xd-score -q --side rollout |'
          " xd-score -q --side training | xd-compare -q | xd-seal -q > /dev/null",
          ROOT, tools_environment(**{"POLICY": POLICY, **variables}), str(plan), str(runs))  # fmt: skip


def verdicts(runs: Path) -> dict[tuple[str, int], tuple[str, ...]]:
    """(case, repeat) -> digests of JUDGED, of what is sealed under `runs`. AssertionError: two of one row differ."""
    found: dict[tuple[str, int], tuple[str, ...]] = {}
    for seal in sorted(runs.glob(f"*/cases/*/*/{SEAL}")):
        row = json.loads((seal.parent / "requested.json").read_text())
        digests = tuple(hashlib.sha256((seal.parent / name).read_bytes()).hexdigest() for name in JUDGED)
        assert found.setdefault((row["case_id"], row["repeat"]), digests) == digests, seal.parent
    return found


def untampered(runs: Path) -> int:
    """How many sealed attempts there are, each found to be what was sealed."""
    attempts = [str(seal.parent) for seal in sorted(runs.glob(f"*/cases/*/*/{SEAL}"))]
    done = subprocess.run(["xd-seal", "-q", "--verify"], input="\n".join(attempts), env=tools_environment(), text=True,
                          capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return len(attempts)


def block(page: str, mark: str) -> str:
    """The commands of a page under a mark."""
    return re.search(rf"^<!-- {mark} -->\n```sh\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)[1]


# -- held tasks


@dataclass(frozen=True)
class Held:
    """A task whose engine waits: the process id of its scorer."""

    task: int
    scorer: int


class Gates:
    """FIFOs at which tasks are held as the engine of a side starts, until they are ended or let through."""

    def __init__(self, place: Path, where: dict[int, str], runtime: str = "CPU_SMOKE") -> None:
        """where: task -> the side as whose engine it is held."""
        self._place = place
        place.mkdir()
        self._shut = dict(where)
        for task, side in where.items():
            os.mkfifo(place / f"{task}.{side}")
        interpreter = place / "python"
        interpreter.write_text(_HOLDING)
        interpreter.chmod(0o755)
        self.environment = {"XD_GATES": str(place), "XD_HELD_PYTHON": sys.executable,
                            f"XD_PYTHON_{runtime}": str(interpreter)}  # fmt: skip

    def each(self) -> Iterator[Held]:
        """Each held task once, as they come; it stays held until the consumer has ended it, and is then let through."""
        end = time.monotonic() + _PATIENCE_S
        while self._shut:
            for task, side in list(self._shut.items()):
                gate = self._place / f"{task}.{side}"
                try:
                    held = os.open(gate, os.O_WRONLY | os.O_NONBLOCK)  # refused until somebody waits there
                except OSError:
                    continue
                gate.unlink()  # whoever takes the task up again goes through
                del self._shut[task]
                try:
                    yield Held(task, int(Path(f"{gate}.scorer").read_text()))
                finally:
                    os.close(held)
                end = time.monotonic() + _PATIENCE_S
            assert time.monotonic() < end, f"tasks that never came: {sorted(self._shut)}"
            time.sleep(0.05)


# -- Slurm


def slurm_is_installed() -> bool:
    programs = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
    return all(shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") for program in programs)


class Slurm:
    """A controller and two node daemons, by dev/slurm-local."""

    def __init__(self, place: str) -> None:
        # a processor a node: who preempts one task preempts no other
        self.environment = tools_environment(SLURM_LOCAL=f"{place}/slurm", SLURM_LOCAL_CPUS="1")
        self.environment["SLURM_CONF"] = self._local("start").partition("=")[2].strip()

    def __call__(self, *words: object, place: Path = ROOT, **variables: str) -> str:
        """What one of its commands prints."""
        done = subprocess.run(list(map(str, words)), cwd=place, env={**self.environment, **variables},
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def wait(self, job: str) -> None:
        """Until a job, and each task of an array, has ended, however that was (`sbatch --wait` asks now and then)."""
        self("srun", "-Q", "-n1", f"--dependency=afterany:{job}", "true")

    def tasks(self, array: str) -> dict[int, dict[str, Any]]:
        """task -> what the controller remembers of it: JobState, Restarts, NodeList."""
        lines = self("scontrol", "show", "job", "-o", array).splitlines()
        records = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]
        return {int(each["ArrayTaskId"]): each for each in records if each["ArrayTaskId"].isdigit()}

    def stop(self) -> None:
        self._local("stop")

    def _local(self, what: str) -> str:
        command = [ROOT / "dev" / "slurm-local", what]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextlib.contextmanager
def slurm() -> Iterator[Slurm]:
    """One for as long as the block lasts. Its socket needs a short path, which everybody may enter."""
    with tempfile.TemporaryDirectory(prefix="xd-") as place:
        os.chmod(place, 0o755)
        started = Slurm(place)
        try:
            yield started
        finally:
            started.stop()


def disturb(slurm: Slurm, array: str, held: Held, how: str) -> None:
    """End a held task: `cancelled`, `killed` (its scorer, by SIGKILL), `requeued`, `preempted` (by an urgent job)."""
    name = f"{array}_{held.task}"
    if how == "cancelled":
        slurm("scancel", name)
    elif how == "killed":
        os.kill(held.scorer, signal.SIGKILL)
    elif how == "requeued":
        slurm("scontrol", "requeue", name)
    else:
        node = slurm("squeue", "-h", "-o", "%N", "-j", name)
        slurm("srun", "-p", "urgent", "-w", node, "--exclusive", "-n1", "true")


DISTURBANCES = ("cancelled", "killed", "requeued", "preempted")


def spread(tasks: int, every: int) -> tuple[dict[int, str], dict[int, str]]:
    """task -> how it is disturbed, and the side at which: every `every`-th, each way and each side in turn."""
    hit = range(every - 1, tasks, every)
    ways = dict(zip(hit, itertools.cycle(DISTURBANCES), strict=False))
    sides = {task: ("rollout", "training")[number // len(DISTURBANCES) % 2] for number, task in enumerate(hit)}
    return ways, sides
