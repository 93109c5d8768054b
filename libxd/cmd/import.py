"""xd-import: turn somebody else's dump of token ids and logprobs into an attempt, or into the other side of one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from libxd import console
from libxd.console import Console
from libxd.errors import Status, XdError
from libxd.imports import formats
from libxd.rundir import SIDES, Attempt

EXAMPLES = """
# what vLLM sampled beside what a trainer recomputed of the same tokens: an attempt, judged and sealed
xd-import vllm requests.json --side rollout --runs runs --experiment mine --dtype bfloat16 |
  xd-import csv trainer.csv --map logprob=logp --side training | xd-compare | xd-seal

# a dump that holds both sides; whose weights they were and what was done to the logits is declared
xd-import prime-rl token_exports/step_3/rank_0.jsonl --side both --runs runs --experiment mine --dtype bfloat16 \\
  --checkpoint models/mine --semantics temperature=0.8 --name 'step 3'
"""


@console.command("xd-import", EXAMPLES)
@click.argument("format", type=click.Choice(formats.NAMES), metavar="FORMAT")
@click.argument("files", nargs=-1, required=True, type=console.PATH, metavar="FILE...")
@click.option("--side", required=True, type=click.Choice([*SIDES, "both"]), help="Whose logprobs the files hold.")
@click.option("--runs", type=console.PATH, help="Make a new attempt under this directory.")
@click.option("--experiment", metavar="NAME", help="With --runs: the experiment that it is of.")
@click.option("--into", metavar="ATTEMPT", help="Add the side to this attempt; without --runs it is read from stdin.")
@click.option("--map", "mapped", multiple=True, metavar="TARGET=COLUMN",
              help="csv, parquet, jsonl: the column that holds what xd calls TARGET (several times).")
@click.option("--of-prompts", is_flag=True,
              help="vllm, openai, sglang: the sequences went in as prompts, to be scored; what was generated is left "
              "out, and the other side says which tokens count.")
@click.option("--name", default="imported", show_default=True, help="With --runs: what tables call it.")
@click.option("--dtype", "dtypes", multiple=True, metavar="[SIDE=]DTYPE",
              help="With --runs: what the sides computed in, by which the contract chooses the threshold; no default.")
@click.option("--checkpoint", metavar="DIR|DIGEST", help="With --runs: the weights that both sides held.")
@click.option("--tokenizer", type=console.PATH, help="With --runs: the tokenizer's directory, to show text by.")
@click.option("--semantics", metavar="raw|KEY=VALUE,…",
              help="With --runs: what was done to the logits on both sides: raw for nothing, else temperature, top_p, "
              "top_k, repetition, presence or frequency.")
@click.option("--rollout-mode", type=click.Choice(["decode", "prefill"]), help="With --runs: how the rollout scored.")
@click.option("--contract", default="ws1", show_default=True, help="With --runs: the numerical contract that judges.")
def cli(
    console: Console, format: str, files: tuple[Path, ...], side: str, runs: Path | None, experiment: str | None,
    into: str | None, mapped: tuple[str, ...], of_prompts: bool, **declared: Any,
) -> None:  # fmt: skip
    """Import the token ids and logprobs of a dump, strictly and without loss, and print the attempt's path.

    FORMAT is vllm, openai or sglang (what engines answer, one side), trl, verl, openrlhf, slime, prime-rl or nemo-rl
    (what trainers hold, either side or both), or csv, parquet or jsonl (a table with named columns).

    The first side makes an attempt (--runs, --experiment); the other is added to it, if its tokens and its mask are the
    same. What no dump holds (weights, knobs, what was done to the logits) stays unknown unless it is declared, and the
    verdict is then INVALID_IDENTITY, with all differences written. A missing logprob is NaN. Whatever is not as the
    format says is an error that names file, line and field; then nothing is written. docs/import.md has the fields.
    """
    if (runs is None) != (experiment is None):
        raise click.UsageError("--runs and --experiment go together")
    if runs is not None and into is not None:
        raise click.UsageError("--runs makes an attempt and --into takes one: give one of them")
    if runs is None and (said := _declared_in_vain(declared)):
        raise click.UsageError(f"{said} is declared when an attempt is made: with --runs")
    from libxd.imports import dump, publish
    from libxd.imports.formats import columns

    sides = SIDES if side == "both" else (side,)
    mapping = columns.mapping(mapped)
    begin = runs is not None and partial(publish.begin, runs, **_declared(str(experiment), **declared))
    for given in [None] if runs is not None else _attempt(console, into):
        with console.guard():
            target = Attempt.open(given) if given is not None else None
            read = dump.read(format, files, sides, mapping, of_prompts).masked_by(target)
            if begin:
                target = begin(batch=read.batch)
            _add(console, target, read)
            console.emit(str(target))


def _declared_in_vain(declared: dict[str, Any]) -> str | None:
    """The first option that only a new attempt can take and that stands on the command line."""
    context = click.get_current_context()
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if parameter.name in declared and source is click.core.ParameterSource.COMMANDLINE:
            return parameter.opts[0]
    return None


def _attempt(console: Console, into: str | None) -> Iterator[str]:
    """The attempt that is given, or the one on stdin. XdError 2 for several: a dump is of one."""
    paths = list(console.operands([into] if into is not None else [], "--into, or an attempt"))
    if len(paths) > 1:
        raise XdError("a dump is of one attempt", status=Status.USAGE, code="usage", where="stdin", found=len(paths),
                      expected=1, hint="import each with its own dump")  # fmt: skip
    if not paths:
        console.info("no attempt, nothing imported")
    yield from paths


def _declared(
    experiment: str, name: str, dtypes: tuple[str, ...], checkpoint: str | None, tokenizer: Path | None,
    semantics: str | None, rollout_mode: str | None, contract: str,
) -> dict[str, Any]:  # fmt: skip
    """What `publish.begin` is told beside the batch; said wrong, it is refused before minutes of reading."""
    from libxd.imports import declarations
    from libxd.imports.request import Declared

    computed, processed = declarations.dtypes(dtypes), declarations.semantics(semantics)
    judge = declarations.contract_source(contract)
    return {"experiment_id": declarations.experiment(experiment), "name": name,
            "declared": Declared(computed, checkpoint, tokenizer, processed, rollout_mode, judge)}  # fmt: skip


def _add(console: Console, attempt: Attempt, read: Any) -> None:
    from libxd.imports import publish

    for number, side in enumerate(read.batch.logprobs):
        for note in publish.add(attempt, side, read.batch, source=read.source(), extras=number == 0):
            console.info(note)
    for note in read.notes:
        console.info(f"{read.name}: {note}")
    console.info(f"{read.name}: {read.summary()}")
    console.info(f"not known from it: {read.unknown}")


main = console.entry(cli)
