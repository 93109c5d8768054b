"""xd-resume: pass on the plan rows that no sealed attempt answers yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from libxd import canon, console, materialize, planner, publish, resume
from libxd.cmd.policy_options import policy_options
from libxd.console import Console
from libxd.policy import Policy
from libxd.rundir import RunDirectory

EXAMPLES = """
# what is left of an experiment, here and now (of the rows of task 3 of 64: --index 3 --stride 64)
xd-plan experiments/s0.json | xd-resume --runs runs --runtime cpu-smoke --allow-smoke-operators

# the attempts that answer it, wherever they were measured, as a table
xd-plan experiments/s0.json | xd-resume --runs runs --answers | xd-compare --table
"""


@console.command("xd-resume", EXAMPLES)
@click.argument("rows", nargs=-1, metavar="[FILE]...")
@click.option("--runs", required=True, type=console.PATH, help="The directory of all runs.")
@policy_options(required=False)
@click.option(
    "--answers",
    is_flag=True,
    help="Print the attempt of each row instead of pending rows: the one that answers it, else the one that was "
    "refused, else the newest that was begun and is no answer.",
)
@click.option(
    "--groups",
    type=console.PATH,
    help="Write the pending rows into DIR, a file for all that can share engines, and print these paths.",
)
@click.option(
    "--index",
    type=click.IntRange(min=0),
    metavar="I",
    help="Look at row I alone; the first is 0. Beyond the last there is nothing to do.",
)
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --index, which is then below N: every Nth row from there on. Tasks 0 to N-1 share all rows.",
)
@click.option("--exit-code", is_flag=True, help="Answer 1 when work is left.")
def cli(
    console: Console,
    rows: tuple[str, ...],
    runs: Path,
    policy: Policy | None,
    answers: bool,
    groups: Path | None,
    index: int | None,
    stride: int | None,
    exit_code: bool,
) -> None:
    """Read plan rows (files or stdin) and print those that no sealed attempt answers yet.

    An answer has the row's case and repeat and was measured with what the row would be measured with now: runtimes,
    operators, builds, environment of both interpreters. A row that was refused under the same conditions is withheld.
    Without --runtime (only with --answers) the conditions are not looked at.
    """
    if policy is None and not answers:
        raise click.UsageError("say with --runtime what the rows would be scored with")
    if groups is not None and answers:
        raise click.UsageError("--groups and --answers exclude each other")
    if stride is not None and (index is None or index >= stride):
        raise click.UsageError(f"of --stride {stride} an --index says which share to take: 0 to {stride - 1}")
    environments = policy.environments() if policy else None
    states: Counter[str] = Counter()
    given = 0
    grouped: dict[str, list[dict[str, Any]]] = {}
    otherwise: list[str] = []
    for where, line in _share(console.rows(rows, "plan rows"), index, stride):
        given += 1
        with console.guard(where):
            row = planner.read_row(line, where)
            plan = materialize.materialized(row, policy, environments) if policy else None
            found = resume.outcome(row, RunDirectory(runs, row["experiment_id"]), plan)
            states[found.state] += 1
            if found.otherwise is not None:
                otherwise.append(found.otherwise)
            for attempt, why in found.passed_over:
                console.info(f"{attempt}: passed over: {why}")
            if answers:
                if found.attempt is not None:
                    console.emit(str(found.attempt))
            elif found.state == "pending":
                if groups is None:
                    console.emit(line)
                else:
                    grouped.setdefault(materialize.group(plan), []).append(row)
    if groups is not None:
        for name, members in grouped.items():
            with console.guard(str(groups)):
                console.emit(_write_group(groups, name, members))
    if index is not None and not given and not console.status:
        console.info(f"nothing to do: there is no row {index}")
    elif not answers:
        console.info(_summary(states, failed=given - states.total()))
        if otherwise:
            console.info(f"{len(otherwise)} of them are sealed under other conditions: {otherwise[0]}")
    elif given and states["pending"] == given:
        console.info(f"no attempt under {runs} answers any of {given} rows")
    if exit_code and states["pending"]:
        console.answer_no()


def _share(rows: Iterable[tuple[str, bytes]], index: int | None, stride: int | None) -> Iterator[tuple[str, bytes]]:
    """The rows of one task. All are read, whichever are its own: who writes them into a pipe is not cut off."""
    for number, row in enumerate(rows):
        if index is None or number == index or (stride is not None and number % stride == index):
            yield row


def _summary(states: Counter[str], failed: int) -> str:
    done = f"{states['answered']} sealed, {states['refused']} refused" + (f", {failed} failed" if failed else "")
    if not states["pending"] and not failed:
        return f"nothing to score: {done}"
    return f"{states['pending']} to score; {done}"


def _write_group(directory: Path, name: str, members: list[dict[str, Any]]) -> str:
    """One group's rows, in a file whose name holds their digest: whoever writes the same rows writes the same file."""
    data = b"".join(canon.dumps(row) + b"\n" for row in members)
    path = directory / f"{name[:8]}-{canon.digest_bytes(data)[:8]}.jsonl"
    publish.directory(directory)
    publish.publish(path, data)
    return str(path)


main = console.entry(cli)
