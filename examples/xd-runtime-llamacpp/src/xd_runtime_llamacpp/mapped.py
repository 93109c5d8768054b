"""The weights in the engine's own memory: llama.cpp maps its file and computes from the mapped pages.

Where it had copied or repacked a tensor, the pages would not be mapped, and the tensor could not be seen here.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf

from libxd.errors import Status, XdError

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Tensor:
    """A tensor of a GGUF file: `offset`, `size` in bytes of the file, shape as the checkpoint has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Mapping:
    """Pages of a file in this process: bytes `offset` to `offset + size` of it, at `address`."""

    address: int
    offset: int
    size: int


def tensors(path: str | os.PathLike[str]) -> list[Tensor]:
    """What a GGUF file holds, in its order. XdError 69 for quantised tensors, which no checkpoint's digest is of."""
    found = []
    for tensor in gguf.GGUFReader(path).tensors:
        dtype = _DTYPES.get(tensor.tensor_type.name)
        if dtype is None:
            raise XdError("quantised weights are not supported", status=Status.REFUSED, code="quantised",
                          where=str(path), path=f"/{tensor.name}", found=tensor.tensor_type.name)  # fmt: skip
        shape = tuple(int(size) for size in reversed(tensor.shape))
        found.append(Tensor(tensor.name, dtype, shape, int(tensor.data_offset), int(tensor.n_bytes)))
    return found


def mappings(path: str | os.PathLike[str]) -> list[Mapping]:
    """Where this process has the file mapped, by device and inode (Linux)."""
    file = os.stat(path)
    wanted = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}", str(file.st_ino)
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, device, inode, *_ = line.split(maxsplit=5)
        if (device, inode) == wanted:
            first, end = (int(address, 16) for address in span.split("-"))
            found.append(Mapping(first, int(offset, 16), end - first))
    return found


def held(path: str | os.PathLike[str], known: list[Tensor]) -> Iterator[tuple[Tensor, bytes | None]]:
    """Each tensor's bytes as they are mapped now; None for one that is not mapped whole."""
    places = mappings(path)
    for tensor in known:
        place = next(
            (m for m in places if m.offset <= tensor.offset and tensor.offset + tensor.size <= m.offset + m.size), None
        )
        if place is None:
            yield tensor, None
        else:
            yield tensor, ctypes.string_at(place.address + tensor.offset - place.offset, tensor.size)
