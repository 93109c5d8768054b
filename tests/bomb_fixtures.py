"""Small files that unfold: in memory, or in the time that somebody takes who walks them carelessly.

Each is made at a size that the caller names, so that the short form takes a second and the long one is as large as a
tool reads (dev/torture/fuzz.py).
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class Bomb:
    """codes: one of them its reader must answer with; of a large value a schema says less than of a small one."""

    name: str
    reader: str
    make: Callable[[int], bytes]
    codes: tuple[str, ...]


_OF_SCHEMA, _OF_TYPE = ("missing-field", "schema", "too-many"), ("wrong-type", "schema", "too-many")


def bombs() -> Iterator[Bomb]:
    """Those of the packages that are here."""
    yield from _OF_TEXT
    if find_spec("torch"):
        yield from _OF_TORCH
    if find_spec("pyarrow"):
        yield Bomb("a row that is all of a file", "import/parquet", _packed, ("too-large",))


def repeated(begin: bytes, part: bytes, end: bytes) -> Callable[[int], bytes]:
    """JSON of so many bytes that is mostly one part, again and again."""
    return lambda size: begin + part * max(1, (size - len(begin) - len(end)) // len(part)) + end


def _long_key(size: int) -> bytes:
    """A pointer to each of the values below a key of half the file."""
    return b'{"' + b"k" * (size // 2) + b'": [' + b'"",' * (size // 6 - 10) + b'""]}'


def _rows(part: bytes) -> Callable[[int], bytes]:
    """The same in one row of a dump."""
    return lambda size: b'{"token_ids": ' + repeated(b"[", part, part.rstrip(b",") + b"]")(size - 100) + b"}\n"


def _tensors(size: int) -> bytes:
    """A header of nothing but empty tensors."""
    size = min(size, 16 << 20)
    entry = '"%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = "{" + ",".join(entry % i for i in range((size - 20) // (len(entry) + 4))) + "}"
    return struct.pack("<Q", len(text)) + text.encode()


def _header(size: int) -> bytes:
    """One line of names, one of them twice."""
    return ",".join(f"c{i}" for i in range(size // 9)).encode() + b",c0\n1,2\n"


_OF_TEXT = (
    Bomb("empty lists", "plan-row", repeated(b"[", b"[],", b"[]]"), _OF_TYPE),
    Bomb("empty objects", "plan-row", repeated(b'{"a": [', b"{},", b"{}]}"), _OF_SCHEMA),
    Bomb("NaN", "plan-row", repeated(b"[", b"NaN,", b"NaN]"), ("not-finite",)),
    Bomb("numbers beyond a double", "plan-row", repeated(b"[", b"1e999,", b"1e999]"), ("not-finite",)),
    Bomb("a long key above many values", "plan-row", _long_key, _OF_SCHEMA),
    Bomb("a long key of a config", "experiment", lambda size: _long_key(min(size, (1 << 20) - 100)), _OF_SCHEMA),
    Bomb("wrong items", "plan-row", repeated(b'{"intervention": [', b"1,", b"1]}"), _OF_SCHEMA),
    Bomb("escapes", "plan-row", repeated(b'["', b"\\n", b'"]'), _OF_TYPE),
    Bomb("brackets in a text", "plan-row", repeated(b'["', b"[{", b'"]'), _OF_TYPE),
    Bomb("never closed", "plan-row", repeated(b"", b"[", b""), ("too-deep",)),
    Bomb("empty lists in a row", "import/jsonl.jsonl", _rows(b"[],"), ("bad-field",)),
    Bomb("NaN in a row", "import/jsonl.jsonl", _rows(b"NaN,"), ("not-finite",)),
    Bomb("a line without an end", "import/csv.csv", lambda size: b"a," * max(size // 2, 9 << 20), ("too-large",)),
    Bomb("a header without an end", "import/csv.csv", _header, ("not-csv",)),
    Bomb("a cell without an end", "columns.csv", lambda size: b'reward\n"' + b"1\n" * (size // 2), ("not-csv",)),
    Bomb("empty tensors", "safetensors", _tensors, ("foreign-file",)),
)


def _archive(pickled: bytes, how: int = zipfile.ZIP_STORED) -> bytes:
    """What torch.save writes, around a pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, held in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")):
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), held, how)
    return out.getvalue()


def _saved(value: Any) -> bytes:
    import torch

    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _row(**changed: Any) -> dict[str, Any]:
    return {"prompt_ids": [5], "prompt_mask": [1], "completion_ids": [6], "completion_mask": [1],
            "old_per_token_logps": [-1.0], "sampling_per_token_logps": [-1.0], **changed}  # fmt: skip


def _expanded(_: int) -> bytes:
    """Two rows of 10^9 ids, in one number."""
    import torch

    return _saved({**{name: torch.tensor([value]) for name, value in _row().items()},
                   "completion_ids": torch.zeros(1, dtype=torch.int64).expand(1, 10**9)})  # fmt: skip


def _laughs(_: int) -> bytes:
    """A list of ten lists that are one and the same, thirty deep."""
    value: Any = [1] * 10
    for _level in range(30):
        value = [value] * 10
    return _saved([_row(completion_ids=value)])


def _itself(_: int) -> bytes:
    """A list that holds itself."""
    value: list[Any] = []
    value.append(value)
    return _saved([_row(prompt_ids=value)])


def _deep(_: int) -> bytes:
    """Lists in lists, deeper than any stack."""
    name = b"X\x0a\x00\x00\x00prompt_ids"
    return _archive(b"\x80\x02]}" + name + b"]" * 50_000 + b"a" * 49_999 + b"sa.")


_OF_TORCH = (
    Bomb("a view of one number", "import/trl.pt", _expanded, ("too-large",)),
    Bomb("lists of one list", "import/trl.pt", _laughs, ("bad-field",)),
    Bomb("a list that holds itself", "import/trl.pt", _itself, ("bad-field",)),
    Bomb("lists deeper than a stack", "import/trl.pt", _deep, ("bad-field",)),
    Bomb("a compressed archive", "import/trl.pt",
         lambda _: _archive(b"\x80\x02]." + b"\0" * (1 << 26), zipfile.ZIP_DEFLATED), ("bad-torch-file",)),
)  # fmt: skip


def _written(column: Any, how: str) -> bytes:
    import pyarrow
    from pyarrow import parquet

    out = io.BytesIO()
    parquet.write_table(pyarrow.table({"token_ids": column}), out, compression=how)
    return out.getvalue()


def _packed(_: int) -> bytes:
    """A row of more zeros than are held together, in some hundred bytes."""
    import numpy as np
    import pyarrow

    count = (1 << 23) + 1
    values = pyarrow.array(np.zeros(count, np.int64))
    return _written(pyarrow.ListArray.from_arrays(pyarrow.array([0, count], pyarrow.int32()), values), "zstd")
