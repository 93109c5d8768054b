"""xd-compare: judge attempts by their two score files, set attempts side by side, print the verdict table."""

from __future__ import annotations

from collections.abc import Iterator

import click

from libxd import canon, console
from libxd.console import Console
from libxd.rundir import Attempt

EXAMPLES = """
# judge every attempt that has both scores; offline, without torch or a model
xd-compare runs/s0/cases/*/a*

# the table of an experiment, a row for each of its plan; status 1 unless every verdict is PASS
xd-resume --runs runs --answers runs/s0/plan.jsonl | xd-compare --table --plan runs/s0/plan.jsonl --exit-code
"""


@console.command("xd-compare", EXAMPLES)
@click.argument("attempts", nargs=-1, metavar="[ATTEMPT]...")
@click.option(
    "--json", "as_json", is_flag=True, help="Print each comparison as a line of JSON, not the attempt's path."
)
@click.option(
    "--against",
    metavar="ATTEMPT",
    help="Judge nothing; print, as JSON lines, how far each side's logprobs are from this attempt's.",
)
@click.option(
    "--table", is_flag=True, help="Judge nothing; print the verdict table of attempts that were judged or refused."
)
@click.option(
    "--plan",
    metavar="FILE",
    help="With --table: the rows it must have, in this order; one without an attempt is there as missing.",
)
@click.option(
    "--exit-code",
    is_flag=True,
    help="Answer 1 unless there are verdicts and all are PASS; what was refused or left off is none.",
)
def cli(
    console: Console,
    attempts: tuple[str, ...],
    as_json: bool,
    against: str | None,
    table: bool,
    plan: str | None,
    exit_code: bool,
) -> None:
    """Judge attempts (operands or stdin): write actual.json, token_diffs.safetensors and comparison.json into each.

    A token is a mismatch when it is active and abs(training - rollout) > threshold, in float32; the threshold comes
    from the numerical contract alone. However large the drift, the status is 0 unless --exit-code asks.
    """
    if sum((as_json, against is not None, table)) > 1:
        raise click.UsageError("--json, --against and --table exclude one another")
    if against is not None and exit_code:
        raise click.UsageError("--against judges nothing, so --exit-code has no question to answer")
    if plan is not None and not table:
        raise click.UsageError("--plan says which rows a table has: give --table, too")
    opened = _opened(console, attempts)
    if table:
        passed = _table(console, opened, plan)
    elif against is not None:
        passed = True
        _against(console, opened, against)
    else:
        passed = _judge(console, opened, as_json)
    if exit_code and not passed:
        console.answer_no()


def _opened(console: Console, attempts: tuple[str, ...]) -> Iterator[tuple[str, Attempt | None]]:
    """(operand, the attempt there); None for one that is reported and not passed on."""
    for path in console.operands(attempts, "attempts"):
        attempt = None
        with console.guard(path):
            attempt = Attempt.open(path)
        yield path, attempt


def _judge(console: Console, attempts: Iterator[tuple[str, Attempt | None]], as_json: bool) -> bool:
    """Whether there were attempts and all of them are PASS."""
    from libxd import comparison

    verdicts = []
    for path, attempt in attempts:
        verdicts.append("")
        if attempt is None:
            continue
        with console.guard(path):
            result = comparison.compare(attempt)
            verdicts[-1] = result["status"]
            console.debug(f"{path}: {result['status']}")
            console.emit(canon.dumps(result) if as_json else path)
    return set(verdicts) == {"PASS"}


def _against(console: Console, attempts: Iterator[tuple[str, Attempt | None]], against: str) -> None:
    from libxd import effect, schema

    other = Attempt.open(against)
    for path, attempt in attempts:
        if attempt is None:
            continue
        with console.guard(path):
            line = schema.validate("effect", effect.effect(attempt, other), path)
            console.emit(canon.dumps(line))


def _table(console: Console, attempts: Iterator[tuple[str, Attempt | None]], plan: str | None) -> bool:
    """Whether the table has rows, each of the attempts and of the plan, and all of them are PASS."""
    from libxd import planner, table, table_text

    rows, unread = [], False
    for path, attempt in attempts:
        row = None
        with console.guard(path):
            row = table.read(attempt) if attempt is not None else None
        if row is None:
            unread = True
        else:
            rows.append(row)
    if plan is not None:
        planned = []
        for where, line in console.rows([plan], "plan rows"):
            with console.guard(where):
                planned.append(planner.read_row(line, where))
        rows = table.planned(rows, planned)
    if not rows:
        console.info("no attempts, no table")
    for number, each in enumerate(table.tables(rows)):
        if number:
            console.emit("")
        for line in table_text.lines(each, console.paint):
            console.emit(line)
    return bool(rows) and not unread and all(row.verdict == "PASS" for row in rows)


main = console.entry(cli)
