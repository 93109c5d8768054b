"""Spoil a file the way bad disks and bad programs do; for the black-box tests: python -P tests/spoil.py WHAT FILE."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from libxd.tensors import TensorFile, write


def rewrite(path: Path, change) -> None:
    """Write a score file anew after `change(arrays, metadata)`; the header stays well formed."""
    with TensorFile(path) as file:
        arrays = {name: np.array(file.array(name)) for name in file.names}
        metadata = file.metadata
    change(arrays, metadata)
    path.unlink()
    write(path, arrays, metadata)


def active_place(arrays) -> int:
    return int(np.flatnonzero(arrays["active_mask"])[1])


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def fill(value: float):
    def change(arrays, _metadata) -> None:
        arrays["logprobs"][active_place(arrays)] = value

    return lambda path: rewrite(path, change)


def changed(**changes):
    """Replace tensors: name -> function of the old array, or None to leave it out."""

    def change(arrays, _metadata) -> None:
        for name, function in changes.items():
            array = arrays.pop(name)
            if function is not None:
                arrays[name] = function(array)

    return lambda path: rewrite(path, change)


def foreign(path: Path) -> None:
    def change(_arrays, metadata) -> None:
        metadata["case_id"] = "c-" + "0" * 16

    rewrite(path, change)


WAYS = {
    "truncate": truncate,
    "flip": flip,
    "nan": fill(float("nan")),
    "inf": fill(float("-inf")),
    "foreign": foreign,
    "no-logprobs": changed(logprobs=None),
    "float64": changed(logprobs=lambda a: a.astype(np.float64)),
    "shorter": changed(logprobs=lambda a: a[:-1]),
    "no-active": changed(active_mask=np.zeros_like),
    "other-id": changed(token_ids=lambda a: a + 1),
}

if __name__ == "__main__":
    WAYS[sys.argv[1]](Path(sys.argv[2]))
