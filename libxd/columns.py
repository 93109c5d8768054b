"""A number a sequence, or a token, from a table or a tensor, laid beside the tokens of two score files."""

from __future__ import annotations

import contextlib
import math
import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from libxd import scores, shards
from libxd.diagnostics import locate
from libxd.errors import Status, XdError
from libxd.imports import files, table_rows
from libxd.imports.rows import Notes, Row
from libxd.plain import shortened
from libxd.tensors import TensorFile

_MOST_INDEX = 2**63 - 1  # of an array("q")
_TABLES = (*files.JSON, *files.CSV, *files.PARQUET)
_TENSORS = ".safetensors"
#: beyond this no square or sum of squares would be left
LARGEST = 1e100


class Layout(NamedTuple):
    """Whose numbers they are: cu_seqlens int64 [B+1], active bool [T]."""

    cu_seqlens: np.ndarray
    active: np.ndarray

    @property
    def sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    def span(self, sequence: int) -> slice:
        return slice(int(self.cu_seqlens[sequence]), int(self.cu_seqlens[sequence + 1]))

    def lengths(self) -> np.ndarray:
        """int64 [B]: active tokens a sequence."""
        found = np.zeros(self.sequences, np.int64)
        for which in shards.whole_sequences(self.cu_seqlens, scores.BLOCK):
            bounds = self.cu_seqlens[which.start : which.stop + 1]
            places = np.flatnonzero(self.active[bounds[0] : bounds[-1]])
            found[which] = np.diff(np.searchsorted(places, bounds - bounds[0]))
        return found


@dataclass(frozen=True)
class Column:
    """values: float64 [B], or [T] where `level` is "token" (what stands at inactive tokens means nothing); finite
    and no larger than LARGEST wherever a token is active. groups: [B], what stood in the column of groups; None without
    one."""

    level: str
    values: np.ndarray
    groups: list[Any] | None = None


@dataclass
class _Rows:
    """The rows of a table: where each stands, its sequence and position (-1: not said), value and group."""

    wheres: list[str] = field(default_factory=list)
    sequences: array = field(default_factory=lambda: array("q"))
    positions: array = field(default_factory=lambda: array("q"))
    values: list[Any] = field(default_factory=list)
    groups: list[Any] = field(default_factory=list)


def read(path: str | os.PathLike[str], name: str, layout: Layout, *, group: str | None = None) -> Column:
    """The column `name` (or its plural) of a JSON, JSONL, CSV, Parquet or safetensors file, which its name ends in.

    A row may say whose it is by `sequence` (from 0), and a token's by `position` in its sequence; rows that do not are
    in order. B rows are the sequences'; T rows, or as many as there are active tokens, the tokens'. A JSONL row may
    hold a list instead, for the tokens of its sequence or for the active ones of them. A tensor has the shape [B], [T]
    or [active tokens]. group: a column to be read beside it. XdError 66 or 65, with the place.
    """
    path, form = Path(path), Path(path).suffix.lower()
    if form not in (*_TABLES, _TENSORS):
        raise XdError("is in no form that is read here", code="bad-column", where=str(path), found=form or "no suffix",
                      expected=" ".join((*_TABLES, _TENSORS)))  # fmt: skip
    column = _of_tensors(path, name, layout, group) if form == _TENSORS else _of_rows(path, name, layout, group)
    _require_finite(column, layout, path, name)
    return column


def _of_tensors(path: Path, name: str, layout: Layout, group: str | None) -> Column:
    with contextlib.ExitStack() as opened:
        held = [opened.enter_context(TensorFile(each, follow_symlinks=True)) for each in shards.beside(path)]
        name = _named(held[0].names, name, str(path))
        for file in held:
            if not file.dtype(name).startswith("float") or file.dtype(name).startswith("float8"):
                raise _bad(str(file.path), "is no tensor of float16, float32 or float64", path=f"/{name}",
                           found=file.dtype(name))  # fmt: skip
            if len(file.shape(name)) != 1:
                raise _bad(str(file.path), "is no flat tensor", path=f"/{name}", found=list(file.shape(name)))
        groups = None
        if group is not None:
            dtype, left = held[0].dtype(group), layout.sequences
            for file in held:
                own = left if file is held[-1] else file.shape("cu_seqlens")[0] - 1
                file.expect(group, dtype, (own,))
                left -= own
            groups = [key for file in held for key in file.array(group).tolist()]
        values = np.concatenate([np.asarray(file.array(name), np.float64) for file in held])
        return _laid(values, layout, str(path), groups)


def _of_rows(path: Path, name: str, layout: Layout, group: str | None) -> Column:
    rows = _Rows()
    for row in files.rows(path, _TABLES, Notes()):
        _take(rows, row, name, group)
    if any(isinstance(value, list) for value in rows.values):
        return _of_lists(rows, layout, str(path), group)
    if any(position >= 0 for position in rows.positions):
        return _of_places(rows, layout, str(path))
    values = np.array(rows.values, np.float64)
    if any(sequence >= 0 for sequence in rows.sequences) or len(values) == layout.sequences:
        order = _order(rows, layout, str(path))
        return Column("sequence", values[order], [rows.groups[i] for i in order] if group is not None else None)
    return _laid(values, layout, str(path), None)


def _take(rows: _Rows, row: Row, name: str, group: str | None) -> None:
    name = _named(row.names, name, row.where)
    value = row.need(name)
    if isinstance(value, list):
        value = [math.nan if each is None else _number(row, name, each, at) for at, each in enumerate(value)]
    rows.wheres.append(row.where)
    rows.values.append(value if isinstance(value, list) else _number(row, name, value))
    rows.sequences.append(_index(row, "sequence"))
    rows.positions.append(_index(row, "position"))
    if group is not None:
        key = row.need(group, "--group names the column that says the group")
        if isinstance(key, str) and not key.strip():
            raise row.error(group, "names no group", found=key)
        rows.groups.append(key)


def _named(names: Any, name: str, where: str) -> str:
    """`name` or its plural, whichever is there."""
    found = [each for each in (name, f"{name}s") if each in names]
    if len(found) != 1:
        raise _bad(where, f"holds no {name}" if not found else f"holds both {found[0]} and {found[1]}",
                   found=sorted(names)[:8], expected=f"{name} or {name}s")  # fmt: skip
    return found[0]


def _number(row: Row, name: str, value: Any, at: int | None = None) -> float:
    if isinstance(value, table_rows.Cell):
        value = value.number()
    if type(value) not in (int, float) or not abs(value) < math.inf:
        raise row.error(name, "is no finite number", at=at, found=_shown(value))
    if type(value) is int and abs(value) > LARGEST:  # an integer of JSON has any number of digits
        raise row.error(name, "is too large to reckon with", at=at, found=_shown(value),
                        expected=f"no more than {LARGEST:g}")  # fmt: skip
    return float(value)


def _index(row: Row, name: str) -> int:
    """A whole number from 0; -1 where the row says none."""
    if name not in row:
        return -1
    value = row.need(name)
    if isinstance(value, table_rows.Cell):
        value = value.integer()
    if type(value) is not int or not 0 <= value <= _MOST_INDEX:
        raise row.error(name, f"a {name} is a whole number from 0", found=_shown(value),
                        expected=f"at most {_MOST_INDEX}")  # fmt: skip
    return value


def _shown(value: Any) -> Any:
    """A value as an error shows it: a long one by its beginning."""
    text = str(value)
    return value if len(text) <= 60 else shortened(text, 60)


def _order(rows: _Rows, layout: Layout, path: str) -> list[int]:
    """Which row is that of each sequence."""
    if len(rows.values) != layout.sequences:
        raise _bad(path, "has another number of rows than there are sequences", found=len(rows.values),
                   expected=layout.sequences)  # fmt: skip
    if all(sequence < 0 for sequence in rows.sequences):
        return list(range(layout.sequences))
    order = [-1] * layout.sequences
    for row, sequence in enumerate(rows.sequences):
        if not 0 <= sequence < layout.sequences:
            raise _bad(rows.wheres[row], "is of no sequence there is", path="/sequence", found=max(sequence, 0),
                       expected=f"0 to {layout.sequences - 1}")  # fmt: skip
        if order[sequence] >= 0:
            raise _bad(rows.wheres[row], "is a second row of its sequence", path="/sequence", found=sequence)
        order[sequence] = row
    return order


def _of_lists(rows: _Rows, layout: Layout, path: str, group: str | None) -> Column:
    values = np.full(len(layout.active), np.nan)
    order = _order(rows, layout, path)
    for sequence, row in enumerate(order):
        given, span = rows.values[row], layout.span(sequence)
        if not isinstance(given, list):
            raise _bad(rows.wheres[row], "holds a number, and other rows lists")
        active = np.flatnonzero(layout.active[span])
        if len(given) == span.stop - span.start:
            values[span] = given
        elif len(given) == len(active):
            values[span.start + active] = given
        else:
            raise _bad(rows.wheres[row], "has a list of another length than its sequence", found=len(given),
                       expected=f"{span.stop - span.start} tokens or {len(active)} active ones")  # fmt: skip
    return Column("token", values, [rows.groups[i] for i in order] if group is not None else None)


def _of_places(rows: _Rows, layout: Layout, path: str) -> Column:
    values = np.full(len(layout.active), np.nan)
    for where, sequence, position, value in zip(rows.wheres, rows.sequences, rows.positions, rows.values, strict=True):
        span = layout.span(sequence) if 0 <= sequence < layout.sequences else slice(0, 0)
        if not 0 <= position < span.stop - span.start:
            raise _bad(where, "is of no token there is", found=f"sequence {sequence}, position {position}")
        if not math.isnan(values[span.start + position]):
            raise _bad(where, "is a second row of its token", found=f"sequence {sequence}, position {position}")
        values[span.start + position] = value
    return Column("token", values)


def _laid(values: np.ndarray, layout: Layout, where: str, groups: list[Any] | None) -> Column:
    """Numbers in order: of sequences or of tokens, as many as they are."""
    tokens, active = len(layout.active), int(np.count_nonzero(layout.active))
    if len(values) == layout.sequences:
        return Column("sequence", values, groups)
    if len(values) == tokens:
        return Column("token", values, groups)
    if len(values) == active:
        spread = np.full(tokens, np.nan)
        spread[np.flatnonzero(layout.active)] = values
        return Column("token", spread, groups)
    raise _bad(where, "has as many numbers as there are neither sequences nor tokens", found=len(values),
               expected=f"{layout.sequences} sequences, {tokens} tokens or {active} active ones")  # fmt: skip


def _require_finite(column: Column, layout: Layout, path: Path, name: str) -> None:
    large = np.abs(np.where(np.isfinite(column.values), column.values, 0)) > LARGEST
    if (large := large & layout.active if column.level == "token" else large).any():
        raise _bad(str(path), f"a {name} is too large to reckon with", found=column.values[large][0],
                   expected=f"no more than {LARGEST:g}")  # fmt: skip
    if column.level == "token":
        bad = np.flatnonzero(layout.active & ~np.isfinite(column.values))
        if bad.size:
            sequence, position = locate(int(bad[0]), layout.cu_seqlens)
            raise _bad(str(path), f"an active token has no finite {name}",
                       found=f"sequence {sequence}, position {position}: {column.values[bad[0]]}")  # fmt: skip
    elif (bad := np.flatnonzero(~np.isfinite(column.values))).size:
        raise _bad(str(path), f"a sequence has no finite {name}",
                   found=f"sequence {int(bad[0])}: {column.values[bad[0]]}")  # fmt: skip


def _bad(where: str, what: str, **facts: Any) -> XdError:
    return XdError(what, status=Status.INVALID, code="bad-column", where=where, **facts)
