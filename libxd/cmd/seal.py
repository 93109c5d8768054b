"""xd-seal: close whole attempts against change, or check that they were not changed."""

from __future__ import annotations

import click

from libxd import console
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
def cli(console: Console, attempts: tuple[str, ...], verify: bool) -> None:
    """Seal attempts (operands or stdin): publish COMPLETE, with size and digest of every file and the set of names.

    An attempt must be whole and its files must belong together; a foreign file or a symlink is refused. Sealing again
    what was not changed is fine. --verify names every file that was changed, is missing, was added or became a
    symlink.
    """
    for path in console.operands(attempts, "attempts"):
        with console.guard(path):
            attempt = Attempt.open(path)
            if not verify:
                seals.seal(attempt)
            elif problems := seals.verify(attempt):
                for problem in problems:
                    console.info(f"{attempt}: {problem}")
                console.answer_no()
                continue
            console.emit(path)


main = console.entry(cli)
