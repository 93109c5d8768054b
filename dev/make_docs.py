"""Write docs/tools/<tool>.md from the tools' --help, docs/knobs.md from the catalog (`make docs`); tests compare."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from libxd import contract, knobs
from libxd.cmd import TOOLS

DOCS = Path(__file__).resolve().parent.parent / "docs"
DIRECTORY = DOCS / "tools"


def page(tool: str) -> str:
    """The page of one tool: its help as the terminal shows it, 100 columns wide."""
    module = importlib.import_module(f"libxd.cmd.{tool}")
    command: click.Command = module.cli
    context = click.Context(
        command, info_name=f"xd-{tool}", **{**command.context_settings, "max_content_width": 100, "terminal_width": 100}
    )
    summary = (module.__doc__ or "").strip().splitlines()[0]
    return f"# xd-{tool}\n\n{summary}\n\n```text\n{command.get_help(context).rstrip()}\n```\n\n{EXIT_STATUS}"


EXIT_STATUS = """## Exit status

0 done; 1 only as the answer "no" to a question that was asked; 2 usage; 65 invalid input; 66 input missing;
69 refused or unsupported here; 70 a bug; 73 the output exists with other content; 75 worth trying again;
128 + N a signal.
The [README](../../README.md#exit-status) has the whole table.
"""


KNOBS = """# The ten knobs

What an experiment may change, and nothing else. A path stands in a config's `interventions` with its values,
and in its `baseline` as nested objects. Aliases are read; rows and evidence hold the values. The lifecycle is
the least that is done anew when the knob changes: the next request, the engine (construction), or its process.

"""

CONTRACTS = """
## The numerical contracts

A config's `contract_source` names one of them, and with it, by the looser of the baseline's two dtypes, the
one threshold of an experiment: the largest |training - rollout| of an active token that is no mismatch, in
nats. They are files of `libxd/contracts/`, and their digest is part of every case id.

"""


def knobs_page() -> str:
    """docs/knobs.md: the catalog of knobs, and the numerical contracts with their thresholds."""
    lines = [KNOBS + "| path | values | aliases | lifecycle | meaning |", "|---|---|---|---|---|"]
    ranges = {"integer": f"1 to {knobs.MAX_INTEGER}", "boolean": "true, false", "name": "an operator's backend id"}
    for knob in knobs.CATALOG.values():
        values = ", ".join(f"`{value}`" for value in knob.values) or ranges[knob.type]
        aliases = ", ".join(f"`{alias}` = `{value}`" for alias, value in knob.aliases.items())
        lines.append(f"| `{knob.path}` | {values} | {aliases} | {knob.lifecycle} | {_cell(knob.meaning)} |")
    deferred = ", ".join(f"`{name}`" for name in knobs.DEFERRED)
    lines += ["", f"Refused by name, because the contract defers them: {deferred}."]
    lines += [CONTRACTS + f"| source | {' | '.join(knobs.DTYPES)} | meaning |", "|---" * (len(knobs.DTYPES) + 2) + "|"]
    for source in contract.sources():
        held = contract.lookup(source, "current")
        thresholds = " | ".join(f"{held.threshold(dtype):.6g}" for dtype in knobs.DTYPES)
        lines.append(f"| `{source}` | {thresholds} | {_cell(held.meaning)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    (DOCS / "knobs.md").write_text(knobs_page())
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for tool in TOOLS:
        (DIRECTORY / f"xd-{tool}.md").write_text(page(tool))


if __name__ == "__main__":
    main()
