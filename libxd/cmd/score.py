"""xd-score: have one side's engine score the frozen tokens of attempts, and keep what the engine showed."""

from __future__ import annotations

import os

import click

from libxd import canon, console, devices, environment, shards
from libxd.console import Console
from libxd.rundir import SIDES
from libxd.runtimes.ranks import launch
from libxd.scoring.intake import Intake
from libxd.scoring.supervisor import Supervisor
from libxd.scoring.task import Task

EXAMPLES = """
# both sides of what was just materialised
xd-materialize --runs runs --runtime cpu-smoke plan.jsonl | xd-score --side rollout | xd-score --side training

# one side of one attempt, by another environment's interpreter
xd-score --side rollout --python ~/vllm/bin/python runs/s2/cases/c-0123456789abcdef/a0001
"""


@console.command("xd-score", EXAMPLES)
@click.argument("attempts", nargs=-1, metavar="[ATTEMPT]...")
@click.option("--side", type=click.Choice(SIDES), help="Which of the two scorers to be.")
@click.option("--python", metavar="PATH",
              help="Interpreter of the engine. Default: $XD_PYTHON_<RUNTIME> (as XD_PYTHON_CPU_SMOKE), else this one.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
              help="End an engine that takes longer for one attempt. Default: wait.")
@click.option("--shard-tokens", type=click.IntRange(1), metavar="N", default=shards.SHARD_TOKENS, show_default=True,
              help="Write scores of more than N tokens in shards of whole sequences, up to N tokens each.")
@click.option("--describe", is_flag=True, help="Print what that interpreter computes with, as JSON; score nothing.")
def cli(
    console: Console, attempts: tuple[str, ...], side: str | None, python: str | None, timeout: float | None,
    shard_tokens: int, describe: bool,
) -> None:  # fmt: skip
    """Score materialised attempts (operands, or paths on stdin) and print each path as soon as its scores stand.

    Under torchrun or srun, rank 0's xd-score does all of this, with the others as the ranks of its engine.

    An engine is kept while the next attempt can use it. What it really uses is read back before and right after
    scoring; nothing is scored, or nothing is published, where that is not what was materialised.

    On GPUs an engine takes a slot of each device it computes on, and waits for its turn. XD_DEVICES names the devices
    (0,1; a device named twice serves two engines at once); without it, all visible ones serve one engine each.
    """
    if describe:
        if attempts or side:
            raise click.UsageError("--describe takes neither --side nor attempts")
        console.emit(canon.dumps(environment.of(python)))
        return
    if side is None:
        raise click.UsageError("say which side: --side rollout or --side training")
    launched = launch.of(os.environ)
    if launched:
        os.environ.update(launched.variables)
        if launched.rank > 0:  # rank 0 reads, prints and publishes; this process becomes one of its ranks
            interpreter = environment.interpreter(python)
            os.execv(interpreter, [interpreter, "-P", "-m", "libxd.runtimes.ranks.worker", "--side", side])
    intake = Intake(console.operands(attempts, "attempts"))
    follow = console.debug if console.verbose else console.info if os.environ.get("XD_DEBUG") == "1" else None
    devices.named(os.environ)  # what is wrong with it is said once, and not of every attempt

    with Supervisor(
        side, python, say=console.info, follow=follow, timeout_s=timeout, launched=launched
    ) as supervisor:  # fmt: skip
        for path in supervisor.attending(intake):
            with console.guard(path):
                task = Task.read(path, side, shard_tokens)
                if task.answered():
                    console.debug(f"{path}: scored already")
                else:
                    reuse = supervisor.score(task, intake.read_to_end)
                    on = f" on {supervisor.slots}" if supervisor.slots else ""
                    console.debug(f"{path}: scored by engine {reuse['engine_serial']}, case {reuse['case_serial']}{on}")
                console.emit(path)


main = console.entry(cli)
