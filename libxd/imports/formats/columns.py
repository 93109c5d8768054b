"""Tables with named columns: CSV with a token a row, JSONL with a sequence a row, Parquet with either.

The names are those of TOKEN and SEQUENCE; where the table has others, a mapping target -> column says which is which.
A column that is mapped must be there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import numpy as np

from libxd.errors import Status, XdError
from libxd.imports.files import CSV, JSON, PARQUET
from libxd.imports.formats.format import Format, joined, unmasked, whole
from libxd.imports.record import Record
from libxd.imports.rows import Row
from libxd.imports.table_rows import Cell
from libxd.rundir import SIDES

#: columns of a table with a token a row; the rows of a sequence follow one another
TOKEN = ("sequence", "position", "token_id", "active", "logprob", "rollout_logprob", "training_logprob",
         "prompt", "advantage", "reward", "version")  # fmt: skip
#: columns of a table with a sequence a row
SEQUENCE = ("token_ids", "prompt_len", "active", "logprobs", "rollout_logprobs", "training_logprobs",
            "prompt", "advantage", "reward", "version")  # fmt: skip
#: what a token's columns are as fields of its sequence
_OF_TOKEN = {"token_id": "token_ids", "active": "active", "logprob": "logprobs", "rollout_logprob": "rollout_logprobs",
             "training_logprob": "training_logprobs", "advantage": "advantage"}  # fmt: skip
_OF_SEQUENCE = ("prompt", "reward", "version")
_INTEGERS = ("position", "token_id", "version")
_TRUTH = {"1": True, "0": False, "true": True, "false": False, "True": True, "False": False}


def mapping(pairs: Iterable[str]) -> dict[str, str]:
    """`target=column` pairs. XdError 2 for another form, a target that is none, or one that is given twice."""
    result: dict[str, str] = {}
    for pair in pairs:
        target, equals, column = pair.partition("=")
        if not equals or not column or target not in {*TOKEN, *SEQUENCE} or target in result:
            what = "is given twice" if target in result else "is not TARGET=COLUMN"
            raise XdError(f"--map {pair}: {what}", status=Status.USAGE, code="usage",
                          expected=" ".join(dict.fromkeys((*TOKEN, *SEQUENCE))))  # fmt: skip
        result[target] = column
    return result


def formats(columns: Mapping[str, str]) -> dict[str, Format]:
    """CSV, Parquet and JSONL, read by these columns."""
    about, unknown = "a table with named columns (--map)", "everything that has no column"
    table = _Table(columns)
    return {each.name: each for each in (
        Format("csv", f"{about}, a token a row", CSV, _parse, sides=SIDES, unknown=unknown, entries=table.of_tokens),
        Format("parquet", f"{about}, a token or a sequence a row", PARQUET, _parse, sides=SIDES, unknown=unknown,
               entries=table.of_either),
        Format("jsonl", f"{about}, a sequence a line", JSON, _parse, sides=SIDES, unknown=unknown,
               entries=table.of_sequences),
    )}  # fmt: skip


def _parse(row: Row, sides: Sequence[str]) -> Iterator[Record]:
    """Of an entry whose fields bear the names of SEQUENCE."""
    ids = row.ids("token_ids", "--map token_ids=COLUMN")
    logprobs = {side: row.floats(_field(row, side, sides), len(ids)) for side in sides}
    prompt_len = row.integer("prompt_len")
    if prompt_len is not None and not 0 <= prompt_len <= len(ids):
        raise row.error("prompt_len", "is not of these tokens", found=prompt_len, expected=f"0 to {len(ids)}")
    advantage = row.need("advantage") if "advantage" in row else None
    about = {
        "prompt": row.key("prompt"), "reward": row.number("reward"), "version": row.integer("version"),
        "advantage": row.floats("advantage", len(ids)) if isinstance(advantage, list) else row.number("advantage"),
    }  # fmt: skip
    if "active" not in row and prompt_len is None:
        yield unmasked(row, ids, logprobs, **about)
        return
    active = row.mask("active", len(ids)) if "active" in row else np.arange(len(ids)) >= prompt_len
    if prompt_len is None:
        yield whole(row, ids, active, logprobs, **about)
        return
    prompt, response = ids[:prompt_len], ids[prompt_len:]
    if active[:prompt_len].any():
        raise row.error("active", "is 1 within the prompt", at=int(np.argmax(active[:prompt_len])))
    yield joined(
        row, prompt, response, {side: values[prompt_len:] for side, values in logprobs.items()},
        active=active[prompt_len:], of_prompt={side: values[:prompt_len] for side, values in logprobs.items()}, **about,
    )  # fmt: skip


def _field(row: Row, side: str, sides: Sequence[str]) -> str:
    """The side's own column; a column of no side's is that of the one side that is asked for."""
    own = f"{side}_logprobs"
    return own if own in row or len(sides) > 1 else "logprobs"


class _Table:
    """What a table's columns are called."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._columns = columns

    def of_sequences(self, rows: Iterator[Row]) -> Iterator[Row]:
        for row in rows:
            yield Row(self._named(row, SEQUENCE), row.where, row.notes)

    def of_either(self, rows: Iterator[Row]) -> Iterator[Row]:
        first = next(rows, None)
        if first is not None:
            one = self._columns.get("token_ids", "token_ids") in first.names
            yield from (self.of_sequences if one else self.of_tokens)(chain([first], rows))

    def of_tokens(self, rows: Iterator[Row]) -> Iterator[Row]:
        """An entry for the rows of each sequence, which follow one another."""
        seen = set()
        for sequence, group in groupby(self._tokens(rows), lambda token: token.values["sequence"]):
            tokens = list(group)
            if sequence in seen:
                raise tokens[0].row.error(self._columns.get("sequence", "sequence"),
                                          "the rows of a sequence stand apart", found=sequence)  # fmt: skip
            seen.add(sequence)
            yield _gathered(tokens)

    def _tokens(self, rows: Iterator[Row]) -> Iterator[_Token]:
        for row in rows:
            values = self._named(row, TOKEN)
            for name in ("sequence", "token_id"):
                if values.get(name) is None:
                    column = self._columns.get(name, name)
                    row.need(column, "" if column in row.names else f"--map {name}=COLUMN")
            numbers = {name: self._number(row, name, value) for name, value in values.items() if name != "sequence"}
            if isinstance(values["sequence"], list | dict):
                raise row.error(self._columns.get("sequence", "sequence"), "is no number and no text that names one",
                                found=str(values["sequence"])[:60])  # fmt: skip
            yield _Token(row, {"sequence": values["sequence"], **numbers})

    def _named(self, row: Row, targets: Sequence[str]) -> dict[str, Any]:
        """The row's values by target. XdError 65 where a column that is mapped is not there."""
        found = {}
        for target in targets:
            column = self._columns.get(target, target)
            if column in row.names:
                found[target] = row.need(column) if column in row else None
            elif target in self._columns:
                row.need(column, f"it was given with --map {target}={column}")
        return found

    def _number(self, row: Row, target: str, value: Any) -> Any:
        """A cell's text as what the column holds; a value that is no text as it is."""
        if not isinstance(value, str) or target == "prompt":
            return value
        column = self._columns.get(target, target)
        if target == "active":
            if value not in _TRUTH:
                raise row.error(column, "is neither 0 nor 1", found=value)
            return _TRUTH[value]
        number = Cell(value).integer() if target in _INTEGERS else Cell(value).number()
        if number is None:
            raise row.error(column, "is no number" if target not in _INTEGERS else "is no integer", found=value[:60],
                            hint="leave a cell empty where there is no value")  # fmt: skip
        return number


@dataclass(frozen=True)
class _Token:
    """A row of a table of tokens, and what it says by target."""

    row: Row
    values: dict[str, Any]


def _gathered(tokens: Sequence[_Token]) -> Row:
    """The entry of a sequence: its tokens' values as lists; what is the sequence's own must be the same at each."""
    first = tokens[0]
    for index, token in enumerate(tokens):
        position = token.values.get("position")
        if position is not None and position != index:
            raise token.row.error("position", "does not count up from 0 within its sequence", found=position,
                                  expected=index)  # fmt: skip
        for name in _OF_SEQUENCE:
            if token.values.get(name) != first.values.get(name):
                raise token.row.error(name, "differs within one sequence", found=token.values.get(name),
                                      expected=first.values.get(name))  # fmt: skip
    fields: dict[str, Any] = {name: first.values.get(name) for name in _OF_SEQUENCE}
    for name, of_all in _OF_TOKEN.items():
        if name in first.values:
            fields[of_all] = [token.values[name] for token in tokens]
    if all(value is None for value in fields.get("advantage", ())):
        fields.pop("advantage", None)
    return Row(fields, first.row.where, first.row.notes)
