"""The rows of tables: CSV, a text a cell, and Parquet, a batch of rows at a time."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from libxd.errors import Status, XdError
from libxd.imports.json_rows import open_regular
from libxd.imports.rows import Notes, Row

_MOST_CELL, _MOST_LINE = 1 << 20, 1 << 24  # characters
#: of a Parquet file: rows that are read together, bytes of values that are made Python's together, and of one row
_ROWS, _TOGETHER_BYTES, _ROW_BYTES = 1024, 1 << 24, 1 << 26
#: what reading may take: of any file, and of each byte of a larger one. A run of one value takes a few bytes in a file,
#: whatever its length; that of all columns of a dump no file is made of.
_MOST_BYTES, _MOST_UNFOLDED = 1 << 31, 64
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
        reader = csv.reader(_lines(text, path), strict=True)
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


def _lines(text: io.TextIOWrapper, path: Path) -> Iterator[str]:
    """The lines, with their ends. XdError 65 for one that is longer than any that is held."""
    for number, line in enumerate(iter(lambda: text.readline(_MOST_LINE + 1), ""), 1):
        if len(line) > _MOST_LINE:
            raise XdError("a line is too long", code="too-large", where=f"{path}:{number}",
                          expected=f"at most {_MOST_LINE} characters")  # fmt: skip
        yield line


def _header(cells: list[str], where: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
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
    pyarrow.allocate_buffer(1)  # its allocator sets aside room in steps of 1 GiB: the first one before there is a cap
    try:
        with parquet.ParquetFile(path, memory_map=True) as file:
            batches = file.iter_batches(batch_size=_ROWS, use_threads=False)
            while (batch := _next(batches, path)) is not None:
                for part in _parts(batch, path):
                    for fields in _of_batch(part):
                        yield Row(fields, f"{path}[{count}]", notes)
                        count += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise XdError("not a Parquet file, or damaged", code="not-parquet", where=str(path),
                      found=" ".join(str(error).split())[:200]) from error  # fmt: skip
    if not count:
        raise XdError("holds no rows", code="empty", where=str(path))


def _next(batches: Iterator[Any], path: Path) -> Any:
    """The next batch; None at the end. XdError 65 where it unfolds to more than a file of its size is made for.

    What a file says of itself is no bound: it may lie, and of damaged metadata the library makes an abort.
    """
    most = max(_MOST_BYTES, _MOST_UNFOLDED * path.stat().st_size)
    try:
        with _bounded(most):
            return next(batches, None)
    except MemoryError as error:
        raise _too_large(path, f"{most} bytes") from error


def _parts(batch: Any, path: Path) -> Iterator[Any]:
    """The batch in parts whose values can be held as Python's. XdError 65 for one row that is too large for that."""
    if batch.num_rows > 1 and batch.nbytes > _TOGETHER_BYTES:
        half = batch.num_rows // 2
        yield from _parts(batch.slice(0, half), path)
        yield from _parts(batch.slice(half), path)
    elif batch.num_rows == 1 and batch.nbytes > _ROW_BYTES:
        raise _too_large(path, f"{_ROW_BYTES} bytes a row")
    else:
        yield batch


def _too_large(path: Path, most: str) -> XdError:
    return XdError("unfolds to more than a file of its size is made for", code="too-large", where=str(path),
                   expected=f"at most {most}", hint="write a sequence a row, without compression")  # fmt: skip


@contextlib.contextmanager
def _bounded(more_bytes: int) -> Iterator[None]:
    """A MemoryError for what maps so much more than is mapped; where the system does not say how much that is, none."""
    try:
        held = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = held + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _of_batch(batch: Any) -> Iterator[dict[str, Any]]:
    """The batch's rows: a list column's values as a list, a number as one, None for null."""
    names = batch.schema.names
    columns = [column.to_pylist() for column in batch.columns]
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))
