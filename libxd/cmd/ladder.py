"""xd-ladder: say whether training - rollout is rounding or a bug, from the same tokens in several dtypes."""

from __future__ import annotations

import click

from libxd import canon, console
from libxd.console import Console
from libxd.rundir import Attempt

EXAMPLES = """
# the rungs of an experiment that scored both sides in float32, float16 and bfloat16
xd-ladder runs/ladder/cases/*/a*

# which side is further from a float32 scorer of the same tokens; status 1 unless it all is rounding
xd-ladder --reference runs/smollm2-fp32/cases/c-0123456789abcdef/a0001 --exit-code runs/ladder/cases/*/a*
"""


@console.command("xd-ladder", EXAMPLES)
@click.argument("attempts", nargs=-1, metavar="[ATTEMPT]...")
@click.option("--json", "as_json", is_flag=True, help="Print each ladder as a line of JSON, not as text.")
@click.option(
    "--reference",
    metavar="ATTEMPT",
    help="Say how far each side is from the training side of this attempt, which computed in float32.",
)
@click.option("--exit-code", is_flag=True, help="Answer 1 unless there is a ladder and every answer is rounding.")
def cli(
    console: Console, attempts: tuple[str, ...], as_json: bool, reference: str | None, exit_code: bool
) -> None:
    """Climb the precision ladder: judged attempts (operands or stdin) whose sides computed in several dtypes.

    Attempts that are equal but for the two dtypes are a ladder. Rounding shrinks with the unit roundoff (bfloat16
    2^-8, float16 2^-11, float32 2^-24), a mistake does not. Each coarser rung gives a factor |training - rollout| / u:
    of averages the least counts, at least 8 nats, of largest differences the greatest, at least 64. It times 32 times
    2^-24 is what rounding may leave in float32. More than that, on average or at one token, is a bug; an average whose
    95 % interval holds the limit, or a ladder without float32 or without a coarser rung, is undecided. The slope is a
    fit over all rungs, and decides nothing. Nothing is written.
    """
    from libxd import ladder, ladder_text, schema

    opened = Attempt.open(reference) if reference is not None else None
    beside = ladder.Reference(opened) if opened else None
    rungs, unread = [], False
    for path in console.operands(attempts, "attempts"):
        rung = None
        with console.guard(path):
            rung = ladder.read(Attempt.open(path), beside)
        if rung is None:
            unread = True
        else:
            rungs.append(rung)
    found = ladder.ladders(rungs)
    if not found:
        console.info("no attempts, no ladder")
    for text in ladder_text.apart(ladder.apart(found), len(found)):
        console.info(text)
    for number, each in enumerate(found):
        if as_json:
            console.emit(canon.dumps(schema.validate("ladder", each.as_json(), str(each.rungs[0].attempt))))
            continue
        if number:
            console.emit("")
        for line in ladder_text.lines(each, found, console.paint):
            console.emit(line)
    if exit_code and (unread or not found or any(each.judgement.answer != "rounding" for each in found)):
        console.answer_no()


main = console.entry(cli)
