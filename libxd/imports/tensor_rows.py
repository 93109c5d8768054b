"""The rows of files of tensors: safetensors, and what torch.save wrote of plain values.

A tensor [B, …] is a column of B rows, so is a list of B values; anything else is one value that holds for every row.
"""

from __future__ import annotations

import contextlib
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from libxd.errors import Status, XdError
from libxd.imports.json_rows import open_regular
from libxd.imports.rows import Misfit, Notes, Row
from libxd.strictjson import pointer_to
from libxd.tensors import TensorFile

#: values of a tensor that repeats what it is saved with: a view of one number may say that it has any shape
_MOST_EXPANDED = 1 << 24
_GLOBAL = re.compile(r"(?:GLOBAL|Unsupported class)\s+`?([\w.]+)")
_OWN_WORDS = "WeightsUnpickler error: "  # torch's, after much advice to read it unsafely


def of_safetensors(path: Path, lead: Sequence[str], notes: Notes) -> Iterator[Row]:
    """A row for each of the B of the tensor in `lead` that is there. XdError 66 or 65, also when none is."""
    with TensorFile(path, follow_symlinks=True) as file:
        columns = {name: _Lazy(file, name, path) for name in file.names}
        yield from _rows(columns, str(path), lead, notes)


def of_torch(path: Path, lead: Sequence[str], inside: Sequence[str], notes: Notes) -> Iterator[Row]:
    """The same of a file that torch.save wrote: a dict of columns or a list of rows, or a member `inside`
    that is one.

    torch.load with weights_only=True reads it, which builds tensors and plain values and runs nothing. XdError 69
    where torch is not installed, 65 for anything else than such values.
    """
    value = _load(path)
    if isinstance(value, Mapping):
        value = next((value[name] for name in inside if name in value), value)
    if isinstance(value, list):
        for index, row in enumerate(value):
            where = f"{path}[{index}]"
            if not isinstance(row, Mapping):
                raise XdError("holds something else than rows", code="not-an-object", where=where,
                              found=type(row).__name__)  # fmt: skip
            yield Row({name: _plain(item, where, name) for name, item in row.items()}, where, notes)
        return
    if not isinstance(value, Mapping):
        raise XdError("holds no dict of columns and no list of rows", code="not-columns", where=str(path),
                      found=type(value).__name__)  # fmt: skip
    where = str(path)
    yield from _rows({name: _plain(column, where, name) for name, column in value.items()}, where, lead, notes)


class _Lazy:
    """A tensor of a safetensors file, read a row at a time."""

    def __init__(self, file: TensorFile, name: str, path: Path) -> None:
        self.shape = file.shape(name)
        self._file, self._name, self._path = file, name, path

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> np.ndarray:
        dtype = self._file.dtype(self._name)
        if dtype.startswith("float8"):
            raise XdError(f"{dtype} is no dtype of token ids, masks or logprobs", code="bad-tensor",
                          where=str(self._path), path=f"/{self._name}")  # fmt: skip
        row = self._file.array(self._name)[index]
        return _of_bfloat16(row) if dtype == "bfloat16" else row


def _of_bfloat16(bits: np.ndarray) -> np.ndarray:
    """uint16 bit patterns as the float32 that they are."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rows(columns: Mapping[str, Any], where: str, lead: Sequence[str], notes: Notes) -> Iterator[Row]:
    first = next((name for name in lead if columns.get(name) is not None), None)
    if first is None or not _is_column(columns[first]):
        what = "lacks a column of token ids" if first is None else f"{first} is no column, a row a sequence"
        raise XdError(what, code="missing-field", where=where, found=sorted(map(str, columns))[:12],
                      expected=" or ".join(lead))  # fmt: skip
    count = len(columns[first])
    if not count:
        raise XdError("holds no entry", code="empty", where=where, path=f"/{first}")
    for index in range(count):
        yield Row(_Sliced(columns, index, count, first, where), where, notes, index=index)


class _Sliced(Mapping[str, Any]):
    """One row of all columns, cut where it is asked for."""

    def __init__(self, columns: Mapping[str, Any], index: int, count: int, lead: str, where: str) -> None:
        self._columns, self._index, self._count, self._lead = columns, index, count, lead
        self._where = where

    def __getitem__(self, name: str) -> Any:
        column = self._columns[name]
        if not _is_column(column):
            return column
        if len(column) != self._count:
            return Misfit(len(column), self._count, self._lead)
        return _plain(column[self._index], self._where, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def _is_column(value: Any) -> bool:
    if isinstance(value, np.ndarray | _Lazy):
        return len(value.shape) > 0
    return isinstance(value, list | tuple)


def _plain(value: Any, where: str, name: str) -> Any:
    """A torch tensor as an array of the same numbers; the rest as it is. XdError 65 for one that no array can hold."""
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        value = value.detach()
        try:
            if value.numel() > _MOST_EXPANDED and value.nbytes > value.untyped_storage().nbytes():
                raise XdError("is a view that repeats its values, larger than any that is unfolded", code="too-large",
                              where=where, path=pointer_to("", str(name)), found=list(value.shape),
                              expected=f"at most {_MOST_EXPANDED} values",
                              hint="save .contiguous() of it")  # fmt: skip
            return (value.float() if "bfloat16" in str(value.dtype) else value).numpy()
        except (RuntimeError, TypeError) as error:  # sparse, nested, without data, float8, quantised
            raise XdError("is no dense tensor of numbers", code="bad-tensor", where=where,
                          path=pointer_to("", str(name)), found=f"{value.dtype}, {value.layout}, {value.device}",
                          hint="save .to_dense() of it, or .float()") from error  # fmt: skip
    return value


def _load(path: Path) -> Any:
    with open_regular(path) as file:
        zipped = file.read(4) == b"PK\x03\x04"
    try:
        import torch
    except ImportError as error:
        raise XdError("needs torch, which is not installed here", status=Status.REFUSED, code="no-torch",
                      where=str(path), hint="install it, or save the tensors as safetensors") from error
    _require_stored(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pickle's age; what it means for us is said below
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # whatever a damaged or hostile file makes of the unpickler; nothing in it has run
        raise _refused(path, error) from error


def _require_stored(path: Path) -> None:
    """XdError 65 for an archive with a member that is compressed, which may be small and unfold to anything. torch.save
    compresses none."""
    members = []
    with contextlib.suppress(zipfile.BadZipFile, NotImplementedError, ValueError), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED:
            raise XdError("is an archive with compressed members, which torch.save writes none of", where=str(path),
                          code="bad-torch-file", found=member.filename)  # fmt: skip


def _refused(path: Path, error: Exception) -> XdError:
    text = " ".join(str(error).split()).partition(" Check the documentation")[0].rpartition(_OWN_WORDS)[2]
    if found := _GLOBAL.search(text):
        return XdError("a pickle of more than tensors, lists and numbers; it could run code and was not read",
                       code="pickle", where=str(path), found=found[1],
                       hint="save a dict of plain tensors, or safetensors")  # fmt: skip
    return XdError("is no file that torch.save wrote of plain values, or is damaged", code="bad-torch-file",
                   where=str(path), found=text[:100] or type(error).__name__)  # fmt: skip
