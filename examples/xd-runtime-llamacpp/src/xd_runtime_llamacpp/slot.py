"""What a slot of llama.cpp's server holds, as the server saves it: the ids, and the cache with its positions.

A slot file is (little-endian): magic, version and count of words, the words (a mark, a format, the number of ids, the
ids, the number of media), then the cache's state: streams, cells (position and sequences of each), and keys and values
layer by layer, each with its type; as xllamacpp 2026.10 writes it. It is read to its last byte; another layout is
refused, never guessed at.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from libxd.errors import Status, XdError

_MAGIC, _VERSION = 0x67677371, 4
_MARK, _FORMAT = -1, 1
#: types of the cache, by ggml's own numbers
_DTYPES = {0: "float32", 1: "float16", 30: "bfloat16"}


@dataclass(frozen=True)
class Slot:
    """token_ids int32 [N]; positions int32 [N], in the order of positions; dtypes of the cache's tensors."""

    token_ids: np.ndarray
    positions: np.ndarray
    dtypes: frozenset[str]
    layers: int


class _Reader:
    def __init__(self, raw: bytes) -> None:
        self._raw, self._at = raw, 0

    def take(self, form: str) -> tuple[int, ...]:
        """XdError 69 past the end."""
        size = struct.calcsize(f"<{form}")
        if self._at + size > len(self._raw):
            raise unreadable("it ends early")
        values = struct.unpack_from(f"<{form}", self._raw, self._at)
        self._at += size
        return values

    def skip(self, size: int) -> None:
        if not 0 <= size <= len(self._raw) - self._at:
            raise unreadable("it ends early")
        self._at += size

    @property
    def left(self) -> int:
        return len(self._raw) - self._at


def unreadable(why: str) -> XdError:
    return XdError(
        f"llama.cpp's slot file is of a layout that this adapter does not know: {why}",
        status=Status.REFUSED,
        code="unobservable",
        hint="use the release of xllamacpp named in the README",
    )


def read(raw: bytes) -> Slot:
    """A slot file of one stream and one sequence. XdError 69 for any other layout."""
    reader = _Reader(raw)
    magic, version, words = reader.take("III")
    if (magic, version) != (_MAGIC, _VERSION):
        raise unreadable(f"magic {magic:#x}, version {version}")
    if words > reader.left // 4:
        raise unreadable("it ends early")
    mark, form, count, *rest = (*reader.take(f"{words}i"), 0, 0, 0)[: max(words, 3)]
    if (mark, form) != (_MARK, _FORMAT) or words != count + 4 or rest[-1] != 0:
        raise unreadable("its list of ids")
    streams, cells = reader.take("II")
    if streams != 1:
        raise unreadable(f"{streams} streams")
    positions = np.array([_position(reader) for _ in range(cells)], np.int32)
    transposed, layers, *more = reader.take("IIII")
    if any(more):  # two words of this release, zero for a plain cache
        raise unreadable(f"words {more} before the layers")
    dtypes = set()
    for _ in range(layers):
        kind, row = reader.take("iQ")
        dtypes.add(_DTYPES.get(kind, f"ggml type {kind}"))
        reader.skip(row * cells)
    for _ in range(layers):
        if transposed:
            kind, width, rows = reader.take("iII")
            reader.skip(width * rows * cells)
        else:
            kind, row = reader.take("iQ")
            reader.skip(row * cells)
        dtypes.add(_DTYPES.get(kind, f"ggml type {kind}"))
    if reader.left:
        raise unreadable(f"{reader.left} bytes are left")
    return Slot(np.array(rest[:-1], np.int32), np.sort(positions), frozenset(dtypes), layers)


def _position(reader: _Reader) -> int:
    position, sequences = reader.take("iI")
    if sequences != 1 or reader.take("i") != (0,):
        raise unreadable("a cell that is not sequence 0's alone")
    return position
