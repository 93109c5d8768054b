"""xd-plan: turn an experiment into plan rows, one case a line."""

from __future__ import annotations

from pathlib import Path

import click

from libxd import config, console, planner
from libxd.console import Console

EXAMPLES = """
# the cases of an experiment, by name
xd-plan experiments/s0.json | jq -r '[.case_id, (.intervention[] | .path, .value)] | @tsv'

# the plan put into the run directory, the baseline three times more for the noise floor
xd-plan experiments/smollm2.json --runs runs --repeats 3
"""


@console.command("xd-plan", EXAMPLES)
@click.argument("experiment", metavar="CONFIG", type=console.PATH)
@click.option("--runs", type=console.PATH,
              help="Put the plan into DIR/<experiment id>/, too, and point plan.jsonl there at it.", metavar="DIR")
@click.option("--repeats", type=click.IntRange(0, 1000), default=0, show_default=True,
              help="Score the baseline this many times more, for the noise floor.")
@click.option("--repeat-order", type=click.Choice(["canonical", "rotated"]), default="canonical", show_default=True,
              help="Order in which the repeats submit their samples; files stay in canonical order.")
@click.option("--toward", type=console.PATH, metavar="CONFIG",
              help="Plan a bisection instead: from the baseline to that of this config, for xd-bisect.")
def cli(
    console: Console, experiment: Path, runs: Path | None, repeats: int, repeat_order: str, toward: Path | None
) -> None:
    """Print one plan row a case: the baseline, its repeats, then the cases that CONFIG declares.

    All that is wrong with CONFIG is said at once. What CONFIG names and is not at hand (a checkpoint, a tokenizer,
    sequences) stays null, and the rows say that they cannot be run.
    """
    loaded = config.load(experiment)
    if toward is not None:
        loaded = loaded.toward(config.load(toward), str(toward))
    for reason in loaded.resolution.missing:
        console.info(f"{experiment}: not executable here: {reason}")
    parts = planner.Parts()
    encoded = list(planner.encode(planner.rows(loaded, repeats, repeat_order, parts), parts))
    if runs is not None:
        console.debug(f"plan in {planner.publish_plan(runs, loaded, encoded)}")
    for line in encoded:
        console.emit(line)


main = console.entry(cli)
