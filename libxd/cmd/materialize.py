"""xd-materialize: say what the adapters will build for each plan row, in a new attempt."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click

from libxd import console, identity, materialize, planner
from libxd.cmd.policy_options import policy_options
from libxd.console import Console
from libxd.errors import Status, XdError
from libxd.policy import Policy
from libxd.rundir import Attempt, RunDirectory, refusal_text

EXAMPLES = """
# both sides on the synthetic model of the CPU smoke runtime
xd-plan experiments/s0.json | xd-materialize --runs runs --runtime cpu-smoke --allow-smoke-operators

# rollout and training in environments of their own, and why a row was refused
xd-materialize --runs runs --runtime-rollout vllm --python-rollout venv-vllm/bin/python --runtime-training hf plan.jsonl
"""


@console.command("xd-materialize", EXAMPLES)
@click.argument("rows", nargs=-1, metavar="[FILE]...")
@click.option("--runs", required=True, type=console.PATH, help="The directory of all runs.")
@policy_options()
def cli(console: Console, rows: tuple[str, ...], runs: Path, policy: Policy) -> None:
    """Read plan rows (files or stdin), take a new attempt for each and print its path.

    An attempt then holds requested.json, identity.json and materialized.json. A row that the runtimes or operators
    refuse keeps its attempt, with the reasons; it is reported and not passed on, and the status is 69. No engine is
    built.
    """
    environments = policy.environments()
    for where, line in console.rows(rows, "plan rows"):
        with console.guard(where):
            row = planner.read_row(line, where)
            value = materialize.materialized(row, policy, environments)
            attempt = _write(runs, row, value)
            if value["status"] == "refused":
                reasons = refusal_text(value["refusals"])
                raise XdError(f"refused: {reasons}", status=Status.REFUSED, code="refused", where=str(attempt))
            console.emit(str(attempt))


def _write(runs: Path, row: dict[str, Any], value: dict[str, Any]) -> Attempt:
    """A new attempt with its first three files. materialized.json comes last: with it the other two are there."""
    expected = identity.expected(row, value["sides"])
    attempt = RunDirectory(runs, row["experiment_id"]).new_attempt(row["case_id"])
    try:
        attempt.write_json("requested.json", row)
    except XdError:
        with contextlib.suppress(OSError):  # nothing was written: a full disk leaves no empty attempts behind
            attempt.path.rmdir()
        raise
    attempt.write_json("identity.json", expected)
    attempt.write_json("materialized.json", value)
    return attempt


main = console.entry(cli)
