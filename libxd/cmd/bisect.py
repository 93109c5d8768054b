"""xd-bisect: find a smallest set of knobs between a good and a bad setting, from sealed attempts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from libxd import bisect, bisection, canon, console, materialize, planner, resume, schema, trial
from libxd.cmd.policy_options import policy_options
from libxd.console import Console
from libxd.policy import Policy
from libxd.resume import Outcome
from libxd.rundir import RunDirectory

EXAMPLES = """
# which knobs make the mean difference larger than a thousandth of a nat; scores what that takes, then says it
plan=runs/s0-bisect/plan.jsonl by="--by mean --above 1e-3" policy="--runs runs --runtime cpu-smoke"
xd-plan -q experiments/s0-bisect.json --runs runs > /dev/null; set -o pipefail
while xd-bisect --next $plan $by $policy > rows; do
xd-materialize $policy < rows | xd-score --side rollout | xd-score --side training |
xd-compare | xd-seal || [ $? = 69 ] || break
done; xd-bisect $plan $by $policy

# what has been found so far, of attempts measured anywhere, for a program
xd-bisect --json --by verdict --runs runs runs/s0-bisect/plan.jsonl | jq .answers
"""


@console.command("xd-bisect", EXAMPLES)
@click.argument("rows", nargs=-1, metavar="[FILE]...")
@click.option("--runs", required=True, type=console.PATH, help="The directory of all runs.")
@click.option("--by", required=True, type=click.Choice(trial.QUESTIONS),
              help="What says that a case is bad: a MISMATCH verdict, or a figure of its comparison.")
@click.option("--above", type=float, metavar="X",
              help="With a figure: bad is what lies above X, in nats or mismatches. No verdict changes by it.")
@click.option("--direction", type=click.Choice([*bisect.DIRECTIONS, "both"]), default="both", show_default=True,
              help="From the good setting, what breaks it; from the bad one, what repairs it.")
@click.option("--repeats", type=click.IntRange(0, 1000), default=1, show_default=True,
              help="Score both ends this many times more, for the noise floor, and what that leaves undecided.")
@click.option("--next", "as_rows", is_flag=True,
              help="Print the plan rows to be scored next; answer 1 when there are none.")
@click.option("-j", "--jobs", type=click.IntRange(1), metavar="N",
              help="With --next: up to N rows, ones among them that are needed only if others come out so.")
@click.option("--json", "as_json", is_flag=True, help="Print the bisection as a line of JSON, not as text.")
@click.option("--exit-code", is_flag=True, help="Answer 1 unless every direction has its set.")
@policy_options(required=False)
def cli(
    console: Console,
    rows: tuple[str, ...],
    runs: Path,
    policy: Policy | None,
    by: Any,
    above: float | None,
    direction: Any,
    repeats: int,
    as_rows: bool,
    jobs: int | None,
    as_json: bool,
    exit_code: bool,
) -> None:
    """Search between the two ends of a plan (files or stdin), one of strategy bisect or of xd-plan --toward.

    Of the knobs that differ it finds a smallest set that breaks the good setting, and one that repairs the bad one. A
    test is a sealed attempt, as xd-resume accepts it; what is refused or INVALID says nothing, and the search goes
    round it. The set is proven minimal by tests; docs/bisect.md says when it is a smallest one. Nothing is kept but the
    run directory, so the same command goes on. Without --runtime the conditions of the attempts are only held to be
    those of the baseline's.
    """
    if (above is None) != (by == "verdict"):
        raise click.UsageError("--above X goes with --by mean, p99, max or count, and with these alone")
    if above is not None and not (math.isfinite(above) and above >= 0):
        raise click.UsageError(f"--above {above}: a number that is not negative")
    if as_rows and policy is None:
        raise click.UsageError("say with --runtime what the rows would be scored with")
    if as_rows and (as_json or exit_code):
        raise click.UsageError("--next prints rows, and has a status of its own: without --json and --exit-code")
    if jobs is not None and not as_rows:
        raise click.UsageError("-j says how many rows --next prints")
    plan = [(where, planner.read_row(line, where)) for where, line in console.rows(rows, "plan rows")]
    if console.status:  # a file that could not be read, which was said
        return
    far = bisection.far_end(plan)
    directions = bisect.DIRECTIONS if direction == "both" else (direction,)
    run = RunDirectory(runs, far["experiment_id"])
    if not as_rows and not (run.path / "cases").is_dir():
        console.info(f"{run.path}: there is no attempt under it")
    look = _look(console, run, policy)
    found = bisection.examine(far, trial.Question(by, above), look, directions, repeats, jobs)
    if as_rows:
        for line in planner.encode(found.rows):
            console.emit(line)
        console.info(_summary(found))
        if not found.rows:
            console.answer_no()
        return
    if as_json:
        console.emit(canon.dumps(schema.validate("bisection", found.as_json(), str(runs))))
    else:
        from libxd import bisection_text

        for text in bisection_text.lines(found, console.paint):
            console.emit(text)
    if exit_code and not found.found:
        console.answer_no()


def _look(console: Console, run: RunDirectory, policy: Policy | None) -> Callable[[dict[str, Any]], Outcome]:
    """Finds the attempt of a row, as xd-resume does; what is passed over is said once."""
    environments = policy.environments() if policy else None
    said: set[str] = set()

    def look(row: dict[str, Any]) -> Outcome:
        found = resume.outcome(row, run, materialize.materialized(row, policy, environments) if policy else None)
        for attempt, why in found.passed_over:
            if str(attempt) not in said:
                said.add(str(attempt))
                console.info(f"{attempt}: passed over: {why}")
        return found

    return look


def _summary(found: bisection.Bisection) -> str:
    count = sum(not each.pending for each in found.tests)
    tested = "1 case tested" if count == 1 else f"{count} cases tested"
    if found.rows:
        return f"{len(found.rows)} to score; {tested}"
    return f"nothing to score: {tested}" + (f"; {found.why}" if found.why else "")


main = console.entry(cli)
