"""xd-doctor: name candidate causes of a difference, most likely first, and what to try next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from libxd import canon, console
from libxd.cmd.difference_operands import given
from libxd.console import Console

if TYPE_CHECKING:
    from libxd.doctor.diagnosis import Diagnosis
    from libxd.doctor.evidence import Evidence

EXAMPLES = """
# two score files that a trainer wrote, with a model to compare both of them with
xd-doctor --rescore models/smollm2-135m-instruct score_rollout.safetensors score_training.safetensors

# the rungs of a ladder: bug or rounding, and of each attempt the causes; status 1 where there are any
xd-doctor --exit-code runs/ladder/cases/*/a*
"""


@console.command("xd-doctor", EXAMPLES)
@click.argument("operands", nargs=-1, metavar="[ATTEMPT]... | SCORES SCORES")
@click.option("--sequences", metavar="FILE", help="The frozen sequences; found from an attempt where they are there.")
@click.option("--tokenizer", metavar="DIR", help="A tokenizer's directory, for end, begin and padding ids and roles.")
@click.option("--model", metavar="DIR", help="A checkpoint directory, for its vocabulary and special ids.")
@click.option("--rescore", metavar="DIR", help="Score the tokens with this checkpoint in float32, too, and see what "
              "done otherwise makes a side of it; needs torch.")  # fmt: skip
@click.option("--reported", multiple=True, metavar="NAME=VALUE", help="A figure that somebody reports of this pair "
              "(mean_absolute, mean_signed, max_absolute, k1, k2, k3): is it that of the tokens? "
              "May be repeated.")  # fmt: skip
@click.option("--series", is_flag=True, help="The attempts are a run's steps: look for a jump. In the order of the "
              "steps that imports say; otherwise as they are given.")  # fmt: skip
@click.option("--rules", is_flag=True, help="Print each detector's rule, false alarms and smallest sample, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print each diagnosis (or rule) as a line of JSON, not as text.")
@click.option("--exit-code", is_flag=True, help="Answer 1 where something is found, or could not be read.")
def cli(
    console: Console, operands: tuple[str, ...], sequences: str | None, tokenizer: str | None, model: str | None,
    rescore: str | None, reported: tuple[str, ...], series: bool, rules: bool, as_json: bool, exit_code: bool,
) -> None:  # fmt: skip
    """Say why training - rollout differs: of attempts, or of two score files (operands or stdin).

    First: is it a bug or rounding? Attempts that are equal but for the two dtypes answer it, as xd-ladder does;
    otherwise the run that would is named. Then causes, most likely first, each with figures and places of tokens, and
    what to try; "Nothing wrong was found" where there is none. The number beside a cause orders them (0.95 a fact, 0.9
    fits a third scorer, 0.7 a shape, 0.4 a symptom, 0.2 a hint) and is no probability. Several attempts are also set
    beside one another: repeats, other batches. Nothing is written.
    """
    from libxd.doctor import at_hand, diagnosis, text

    if rules:
        _print_rules(console, as_json)
        return
    figures = at_hand.reported(reported)
    directories = [directory for directory in (model, tokenizer) if directory is not None]
    evidences, rungs, unread = [], [], False
    for evidence in _evidences(console, operands):
        read = False
        if evidence is not None:
            with console.guard(str(evidence.attempt or evidence.rollout.path)):
                known = at_hand.known(evidence, sequences=sequences, directories=directories, model=rescore or model,
                                      reported=figures, rescore=rescore is not None)  # fmt: skip
                evidence = evidence.with_known(known)
                rungs.append(diagnosis.rung(evidence))
                evidences.append(evidence)
                read = True
        unread |= not read
    if series:
        diagnosis.require_several(evidences)
    climbed = diagnosis.climbed(rung for rung in rungs if rung is not None)
    found: list[Diagnosis] = []
    for each in evidences:
        diagnosed = None
        with console.guard(str(each.attempt or each.rollout.path)):
            diagnosed = diagnosis.of_pair(each.aside(), climbed.get(str(each.attempt)))  # one at a time in memory
            found.append(diagnosed)
        unread |= diagnosed is None
    if len(evidences) > 1:
        with console.guard("several attempts"):
            found += filter(None, [diagnosis.together(evidences, series)])
    if not found and not unread:
        console.info("nothing to look at")
    for number, diagnosed in enumerate(found):
        if as_json:
            _emit_json(console, "diagnosis", diagnosed.as_json())
            continue
        for line in [""] * bool(number) + text.lines(diagnosed, console.verbose, console.paint):
            console.emit(line)
    if exit_code and (unread or not found or any(_something(each) for each in found)):
        console.answer_no()


def _something(diagnosed: Diagnosis) -> bool:
    answer = diagnosed.answer
    return bool(diagnosed.findings) or (answer is not None and answer.answer == "bug")


def _evidences(console: Console, operands: tuple[str, ...]) -> Iterable[Evidence | None]:
    """Of each operand; None for what cannot be read, which is reported."""
    from libxd import pairs
    from libxd.doctor.evidence import Evidence

    for operand in given(console, operands):
        evidence = None
        with console.guard(operand.where):
            attempt = operand.attempt()
            evidence = Evidence.of_pair(pairs.of_attempt(attempt)) if attempt else Evidence(*operand.scores())
        yield evidence


def _print_rules(console: Console, as_json: bool) -> None:
    from libxd.doctor import diagnosis, text

    if as_json:
        for rule in diagnosis.RULES:
            _emit_json(console, "doctor_rule", {"schema_version": "xd.doctor_rule.v1", **rule.as_json()})
        return
    for line in text.rules(diagnosis.RULES):
        console.emit(line)


def _emit_json(console: Console, name: str, value: dict[str, object]) -> None:
    from libxd import schema

    console.emit(canon.dumps(schema.validate(name, value, "xd-doctor --json")))


main = console.entry(cli)
