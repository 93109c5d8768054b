"""The rows of tables: CSV, a text a cell, and Parquet, a batch of rows at a time."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from libxd.errors import Status, XdError
from libxd.imports.json_rows import open_regular
from libxd.imports.rows import Notes, Row

_MOST_CELL = 1 << 20  # characters
_BATCH = 1024  # rows of a Parquet file that are held together
_LONG = 30  # characters; no integer that is asked for has as many


class Cell(str):
    """A cell of a CSV file: a number there is a text, which in JSON it must not be."""

    def number(self) -> float | None:
        """The number that stands there; None for what is none, or not finite."""
        if not self.isascii() or "_" in self:  # Python reads other digits, and 1_0
            return None
        try:
            number = float(self)
        except ValueError:
            return None
        return number if math.isfinite(number) else None

    def integer(self) -> int | None:
        digits = self.strip().removeprefix("-").removeprefix("+")
        return int(self) if digits.isascii() and digits.isdecimal() and len(digits) < _LONG else None


def of_csv(path: Path, notes: Notes) -> Iterator[Row]:
    """A row a line below the header, each cell a `Cell`, None where it is empty. UTF-8, commas.

    XdError 66 or 65: no such file, no header, a name twice in it, a row with another number of cells, no rows.
    """
    csv.field_size_limit(_MOST_CELL)
    with open_regular(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, strict=True)
        header: list[str] | None = None
        count = 0
        while True:
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise XdError(f"not CSV: {error}", code="not-csv", where=f"{path}:{reader.line_num}") from error
            except UnicodeDecodeError as error:
                raise XdError(f"not UTF-8, somewhere after line {reader.line_num}", code="not-utf8",
                              where=str(path)) from error  # fmt: skip
            if cells is None:
                break
            where = f"{path}:{reader.line_num}"
            if not cells:
                continue
            if header is None:
                header = _header(cells, where)
                continue
            if len(cells) != len(header):
                raise XdError("has another number of cells than the header", code="not-csv", where=where,
                              found=len(cells), expected=len(header),
                              hint="was the file still being written?")  # fmt: skip
            count += 1
            filled = (Cell(cell) if cell else None for cell in cells)
            yield Row(dict(zip(header, filled, strict=True)), where, notes)
    if not count:
        raise XdError("holds no rows", code="empty", where=str(path))


def _header(cells: list[str], where: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    for name in names:
        if names.count(name) > 1:
            raise XdError("a column stands twice in the header", code="not-csv", where=where, found=name)
    return names


def of_parquet(path: Path, notes: Notes) -> Iterator[Row]:
    """A row each. XdError 69 where pyarrow is not installed, 66 or 65 for no file, no Parquet, no rows."""
    open_regular(path).close()
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise XdError("needs pyarrow, which is not installed here", status=Status.REFUSED, code="no-pyarrow",
                      where=str(path), hint="pip install pyarrow, or write CSV or JSONL") from error  # fmt: skip
    count = 0
    try:
        with parquet.ParquetFile(path, memory_map=True) as file:
            for batch in file.iter_batches(batch_size=_BATCH):
                names = batch.schema.names
                for fields in _of_batch(batch, names):
                    yield Row(fields, f"{path}[{count}]", notes)
                    count += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise XdError("not a Parquet file, or damaged", code="not-parquet", where=str(path),
                      found=" ".join(str(error).split())[:200]) from error  # fmt: skip
    if not count:
        raise XdError("holds no rows", code="empty", where=str(path))


def _of_batch(batch: Any, names: list[str]) -> Iterator[dict[str, Any]]:
    """The batch's rows: a list column's values as a list, a number as one, None for null."""
    columns = [column.to_pylist() for column in batch.columns]
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))
