"""Write docs/tools/<tool>.md from the tools' own --help (`make docs`); a test compares them."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from libxd.cmd import TOOLS

DIRECTORY = Path(__file__).resolve().parent.parent / "docs" / "tools"


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


def main() -> None:
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for tool in TOOLS:
        (DIRECTORY / f"xd-{tool}.md").write_text(page(tool))


if __name__ == "__main__":
    main()
