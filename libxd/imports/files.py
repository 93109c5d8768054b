"""A foreign file's rows, by what kind of file its name says it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from libxd.errors import XdError
from libxd.imports import json_rows, table_rows, tensor_rows
from libxd.imports.rows import Notes, Row

JSON = (".json", ".jsonl", ".ndjson")
TENSORS = (".safetensors", ".pt", ".pth")
CSV = (".csv",)
PARQUET = (".parquet",)
_PICKLES = (".pkl", ".pickle")
_PICKLED = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))


def rows(
    path: Path, kinds: Sequence[str], notes: Notes, lead: Sequence[str] = (), inside: Sequence[str] = ()
) -> Iterator[Row]:
    """`kinds`: suffixes that may be. `lead`: columns that say how many rows a file of tensors has; `inside`: members of
    it that may hold them."""
    suffix = path.suffix.lower()
    if suffix in _PICKLES or (suffix not in TENSORS and _is_pickle(path)):
        raise XdError("a pickle, which can run code of its own, is not read", code="pickle", where=str(path),
                      hint="write JSONL or safetensors")  # fmt: skip
    if suffix not in kinds:
        raise XdError("is no kind of file that this format comes in", code="other-kind", where=str(path),
                      found=suffix or "no suffix", expected=" ".join(kinds))  # fmt: skip
    if suffix in JSON:
        return json_rows.rows(path, notes)
    if suffix in CSV:
        return table_rows.of_csv(path, notes)
    if suffix in PARQUET:
        return table_rows.of_parquet(path, notes)
    if suffix == ".safetensors":
        return tensor_rows.of_safetensors(path, lead, notes)
    return tensor_rows.of_torch(path, lead, inside, notes)


def _is_pickle(path: Path) -> bool:
    with json_rows.open_regular(path) as file:
        return file.read(2) in _PICKLED
