"""xd-report: say what an experiment found, on one page that opens anywhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from libxd import console
from libxd.console import Console

EXAMPLES = """
# on the terminal: what is wrong, which knob, how sure
xd-report runs/smollm2

# a page to look at and to pass on, without any text of a prompt or a response
xd-report runs/smollm2 --redact --out smollm2.html
"""
_BY_SUFFIX = {".html": "html", ".htm": "html", ".txt": "text", ".md": "md", ".json": "json", ".png": "png"}
FORMATS = ("html", "text", "md", "json", "png")


@console.command("xd-report", EXAMPLES)
@click.argument("runs", nargs=-1, metavar="[RUN|ATTEMPT]...")
@click.option("--out", type=console.PATH, help="Write the report to this file and print its path.")
@click.option(
    "--format", "form", type=click.Choice(FORMATS),
    help="What to write; by default what the suffix of --out says, and text on stdout. png needs matplotlib and --out.",
)  # fmt: skip
@click.option("--tokenizer", metavar="DIR", help="Where the tokenizer.json of these tokens lies, when it was moved.")
@click.option("--redact", is_flag=True, help="Leave out every token's text and id.")
def cli(
    console: Console, runs: tuple[str, ...], out: Path | None, form: str | None, tokenizer: str | None, redact: bool
) -> None:
    """Report on one experiment: a run directory, or attempts of one (operands or stdin). Nothing is re-judged.

    First what is wrong, which knob, and how sure that is; then the verdicts, what each change moved against the noise
    floor with a 95 % interval over sequences, how large the differences are and where they lie, the worst tokens,
    every knob as requested, materialised and shown, environments, and digests. An HTML report is one file that needs
    no network. The same evidence gives the same bytes.
    """
    from libxd import publish
    from libxd.report import content, formats, vocabulary

    form = form or (_BY_SUFFIX.get(out.suffix.lower()) if out else "text")
    if form is None:
        raise click.UsageError(f"the suffix of {out} names no format: give --format")
    if form == "png" and out is None:
        raise click.UsageError("a picture is no text: give --out")
    if out is not None:
        publish.require_place(out)
    rows = _rows(console, runs)
    if not rows and console.status:  # what could not be read was said
        return
    words = None
    if rows and not redact:
        words, why = vocabulary.find(rows[0].requested, tokenizer)
        if why:
            console.info(f"tokens are shown as ids: {why}")
    with _progress(console, len(rows)) as bar:
        report = content.read(rows, words, redact, lambda: bar.update())
    if out is not None:
        formats.write(out, formats.render(report, form))
        console.emit(str(out))
    else:
        console.emit(formats.render(report, form, console.paint).removesuffix(b"\n"))


def _rows(console: Console, runs: tuple[str, ...]) -> list[Any]:
    """The rows of the table that the operands name; what cannot be read is reported."""
    from libxd import table
    from libxd.report import run

    rows, plan = [], []
    for path in console.operands(runs, "run directories or attempts"):
        with console.guard(path):
            found = run.find(path)
            plan += found.plan
            for attempt, why in found.passed_over:
                console.info(f"{attempt}: passed over: {why}")
            for attempt in found.attempts:
                with console.guard(str(attempt)):
                    rows.append(table.read(attempt))
    return table.planned(rows, plan)


def _progress(console: Console, total: int) -> Any:
    """A bar on stderr, on a terminal only."""
    from tqdm import tqdm

    return tqdm(total=total, unit="case", file=sys.stderr, disable=True if console.quiet else None, leave=False)


main = console.entry(cli)
