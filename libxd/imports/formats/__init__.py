"""The formats that `xd-import` reads, a module a family; docs/import.md says what each field is and where it stands."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from libxd.errors import Status, XdError

if TYPE_CHECKING:
    from libxd.imports.formats.format import Format
    from libxd.imports.record import Record
    from libxd.imports.rows import Notes

#: format -> its module here; those of a table are three of one module
_MODULES = {
    **{name: name.replace("-", "_") for name in
       ("vllm", "openai", "sglang", "trl", "verl", "openrlhf", "slime", "prime-rl", "nemo-rl")},
    **dict.fromkeys(("csv", "parquet", "jsonl"), "columns"),
}  # fmt: skip
NAMES = tuple(_MODULES)


def named(name: str, mapping: Mapping[str, str], of_prompts: bool = False) -> Format:
    """The format of this name; `mapping` (target -> column) is for tables, `of_prompts` for engines. XdError 2."""
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    table = _MODULES[name] == "columns"
    of = module.formats(mapping)[name] if table else module.FORMAT
    if mapping and not table:
        raise XdError("--map is for csv, parquet and jsonl", status=Status.USAGE, code="usage", found=name)
    if not of_prompts:
        return of
    if of.of_prompts is None:
        raise XdError("--of-prompts is for vllm, openai and sglang", status=Status.USAGE, code="usage", found=name)
    return replace(of, parse=of.of_prompts)


def records(of: Format, paths: Sequence[Path], sides: Sequence[str], notes: Notes) -> Iterator[Record]:
    """The sequences of all files, one after another, read as they are asked for.

    XdError 2 where both sides are asked of a format whose entries hold one; 65 or 66, with file, line and field, for
    whatever is not as the format says: then nothing that follows is read.
    """
    if len(sides) > 1 and not of.sides:
        raise XdError(f"{of.name} holds one side's logprobs: say whose", status=Status.USAGE, code="usage",
                      hint="--side rollout, or --side training")  # fmt: skip
    return _records(of, paths, sides, notes)


def _records(of: Format, paths: Sequence[Path], sides: Sequence[str], notes: Notes) -> Iterator[Record]:
    from libxd.imports import files

    for path in paths:
        for entry in of.entries(files.rows(path, of.files, notes, of.lead, of.inside)):
            yield from of.parse(entry, sides)
