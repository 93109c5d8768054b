"""A job array of 256 tasks on a real Slurm, some ended while they score: the verdicts of one machine, to the byte.

    python -P dev/torture/slurm.py [--tasks 256] [--every 8] [--at DIR]

Every eighth task is held as an engine starts, and there cancelled (scancel), its scorer killed (kill -9), the task
requeued, or preempted by an urgent job, each way in turn, at either side. Then the dependent job judges, xd-resume says
what is left, and a second array finishes it: the commands are those of examples/slurm/README.md.

Exit status 0: all held, or Slurm is not installed (then the one line begins with `skipped`); 1: something did not hold.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tests"))

import cluster_fixtures as cluster  # noqa: E402

EMPTY_TASKS = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=256, help="1 + a multiple of 5, at most 256")
    parser.add_argument("--every", type=int, default=8, help="which tasks are ended: every so manieth")
    parser.add_argument("--at", type=Path, help="keep everything here, in a new directory")
    arguments = parser.parse_args()
    if not cluster.slurm_is_installed():
        print("skipped: Slurm is not installed (apt-get install --no-install-recommends slurm-wlm munge)")
        return 0
    place = arguments.at or Path(tempfile.mkdtemp(prefix="xd-torture-"))
    place.mkdir(parents=True, exist_ok=True)
    try:
        held = torture(place, arguments.tasks, arguments.every)
    finally:
        if arguments.at is None:
            shutil.rmtree(place)
    print("all held" if held else "NOT all held")
    return 0 if held else 1


def torture(place: Path, tasks: int, every: int) -> bool:
    """Prints the table; whether all of it held."""
    config = cluster.experiment(place, tasks)
    for name in ("examples", "experiments"):
        if not (place / name).exists():
            (place / name).symlink_to(cluster.ROOT / name)
    checks: list[bool] = []

    def check(what: str, held: bool, detail: object) -> None:
        checks.append(held)
        print(f"{'held' if held else 'BROKEN':7} {what}: {detail}", flush=True)

    plan = place / "runs" / "array" / "plan.jsonl"
    cluster.shell('xd-plan -q "$1" --runs runs > /dev/null', place, cluster.tools_environment(), str(config))
    started = time.monotonic()
    cluster.on_one_machine(plan, place / "alone")
    alone = cluster.verdicts(place / "alone")
    print(f"        one machine, one pipe: {len(alone)} verdicts in {time.monotonic() - started:.0f} s", flush=True)
    check("every row has a verdict on one machine", len(alone) == tasks, len(alone))

    with cluster.slurm() as slurm:
        empty_s = _empty_array(slurm)
        print(f"        {EMPTY_TASKS} empty tasks: {1000 * empty_s / EMPTY_TASKS:.0f} ms a task", flush=True)
        ways, sides = cluster.spread(tasks, every)
        started = time.monotonic()
        gates = cluster.Gates(place / "gates", sides)
        environment = {"POLICY": cluster.POLICY, **gates.environment}
        array = slurm("sbatch", "--parsable", f"--array=0-{tasks - 1}", "--output=%A_%a.log",
                      "examples/slurm/array.sbatch", plan, place=place, **environment)  # fmt: skip
        for held in gates.each():
            cluster.disturb(slurm, array, held, ways[held.task])
        judge = slurm("sbatch", "--parsable", f"--dependency=afterany:{array}", "--output=judge.log",
                      "examples/slurm/judge.sbatch", plan, array, place=place)  # fmt: skip
        slurm.wait(judge)
        wall_s = time.monotonic() - started
        records = slurm.tasks(array)
        ended = Counter(each["JobState"] for each in records.values())
        restarts = sum(int(each["Restarts"]) for each in records.values())
        print(f"        array and judge: {wall_s:.0f} s, {wall_s / tasks:.1f} s a task; {dict(ended)}")
        count = Counter(ways.values())
        check("scancel cancelled", ended["CANCELLED"] == count["cancelled"], f"{ended['CANCELLED']} tasks")
        check("kill -9 failed", ended["FAILED"] == count["killed"], f"{ended['FAILED']} tasks")
        expected = count["requeued"] + count["preempted"]
        check("requeue and preemption started again", restarts == expected, f"{restarts} times")

        lost = {task for task, way in ways.items() if way in ("cancelled", "killed")}
        found = cluster.verdicts(place / "runs")
        check("the dependent job judged all others", len(found) == tasks - len(lost), f"{len(found)} of {tasks}")
        check("each is the one machine's, to the byte", found.items() <= alone.items(), len(found))

        started = time.monotonic()
        resumed = slurm("bash", "-euo", "pipefail", "-c", cluster.block("examples/slurm/README.md", "resume"),
                        place=place, RUNS="runs", PLAN=str(plan), POLICY=cluster.POLICY)  # fmt: skip
        left = len((place / "left.jsonl").read_text().splitlines())
        check("xd-resume names what was lost", left == len(lost), f"{left} rows")
        slurm.wait(resumed.split()[-1])
        print(f"        the rest: {time.monotonic() - started:.0f} s")
    found = cluster.verdicts(place / "runs")
    check("all verdicts are the one machine's, to the byte", found == alone, len(found))
    attempts = len(list((place / "runs").glob("array/cases/*/a*")))
    sealed = cluster.untampered(place / "runs")
    check("every seal holds; who was ended left an attempt that is not sealed", sealed == tasks < attempts,
          f"{sealed} sealed of {attempts} attempts")  # fmt: skip
    _control(place, plan, alone, check)
    return all(checks)


def _empty_array(slurm: cluster.Slurm) -> float:
    """Seconds that an array of empty tasks takes."""
    started = time.monotonic()
    slurm.wait(slurm("sbatch", "--parsable", f"--array=0-{EMPTY_TASKS - 1}", "--output=/dev/null", "--wrap=true"))
    return time.monotonic() - started


def _control(place: Path, plan: Path, alone: dict, check) -> None:
    """The comparison can tell: a row scored by other kernels of the processor has another verdict."""
    first = place / "first.jsonl"
    first.write_text(plan.read_text().partition("\n")[0] + "\n")
    cluster.on_one_machine(first, place / "other", ATEN_CPU_CAPABILITY="default")
    ((row, digests),) = cluster.verdicts(place / "other").items()
    check("control: other kernels give other bytes", row in alone and alone[row] != digests, row[0])


if __name__ == "__main__":
    sys.exit(main())
