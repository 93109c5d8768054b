"""xd-seal: close whole attempts against change, or check that they were not changed."""

from __future__ import annotations

from pathlib import Path

import click

from libxd import console, publish, statement
from libxd import seal as seals
from libxd.console import Console
from libxd.rundir import Attempt

EXAMPLES = """
# the last stage of the chain
xd-compare runs/s0/cases/*/a0001 | xd-seal

# the attempts among these that are sealed and untouched; status 1 when one is not
xd-seal --verify runs/s0/cases/*/a*
"""


@console.command("xd-seal", EXAMPLES)
@click.argument("attempts", nargs=-1, metavar="[ATTEMPT]...")
@click.option(
    "--verify",
    is_flag=True,
    help="Write nothing; print the attempts that are as they were sealed, answer 1 when one is not.",
)
@click.option(
    "--statement",
    "state",
    is_flag=True,
    help="Write nothing into the attempts; print one in-toto Statement over all of them, to be signed.",
)
@click.option("--out", type=console.PATH, help="Write the statement to this file and print its path.")
def cli(console: Console, attempts: tuple[str, ...], verify: bool, state: bool, out: Path | None) -> None:
    """Seal attempts (operands or stdin): publish COMPLETE, with size and digest of every file and the set of names.

    An attempt must be whole and its files must belong together; a foreign file or a symlink is refused. Sealing again
    what was not changed is fine. --verify names every file that was changed, is missing, was added or became a
    symlink. A statement is of sealed, untouched attempts whose verdict follows from their files; if one is not, none is
    written.
    """
    if verify and state:
        raise click.UsageError("--verify and --statement exclude each other")
    if out is not None and not state:
        raise click.UsageError("--out says where a statement goes, and --statement is not given")
    if out is not None:
        publish.require_place(out)
    stated: list[statement.Stated] = []
    for path in console.operands(attempts, "attempts"):
        with console.guard(path):
            attempt = Attempt.open(path)
            if state:
                stated.append(statement.read(attempt))
                continue
            if not verify:
                seals.seal(attempt)
            elif problems := seals.verify(attempt):
                for problem in problems:
                    console.info(f"{attempt}: {problem}")
                console.answer_no()
                continue
            console.emit(path)
    if state and not console.status:
        _write(console, statement.dumps(stated), out)


def _write(console: Console, data: bytes, out: Path | None) -> None:
    if out is None:
        console.emit(data.removesuffix(b"\n"))
    else:
        publish.publish(out, data)
        console.emit(str(out))


main = console.entry(cli)
