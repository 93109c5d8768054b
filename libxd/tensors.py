"""safetensors files, read strictly and written deterministically; no torch, and numpy only where arrays are asked for.

A file is: 8 bytes little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`, the tensors' raw
little-endian bytes without gaps. xd's own metadata is canonical JSON under the one header key "xd": the reference
implementation writes several keys in random order.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libxd import canon, publish, strictjson
from libxd.errors import Status, XdError, of_exception

if TYPE_CHECKING:
    import numpy as np

MAX_HEADER_BYTES = 16 << 20
MAX_DIMENSIONS = 16
METADATA = "__metadata__"
KEY = "xd"

#: the file's dtype tag -> (dtype name, bytes a value, numpy type its bytes are shown as)
_TAGS = {
    "BOOL": ("bool", 1, "|b1"),
    "U8": ("uint8", 1, "|u1"),
    "I8": ("int8", 1, "|i1"),
    "F8_E4M3": ("float8_e4m3fn", 1, "|u1"),
    "F8_E5M2": ("float8_e5m2", 1, "|u1"),
    "U16": ("uint16", 2, "<u2"),
    "I16": ("int16", 2, "<i2"),
    "F16": ("float16", 2, "<f2"),
    "BF16": ("bfloat16", 2, "<u2"),
    "U32": ("uint32", 4, "<u4"),
    "I32": ("int32", 4, "<i4"),
    "F32": ("float32", 4, "<f4"),
    "U64": ("uint64", 8, "<u8"),
    "I64": ("int64", 8, "<i8"),
    "F64": ("float64", 8, "<f8"),
}
_BY_NAME = {name: (tag, size) for tag, (name, size, _) in _TAGS.items()}
_BOOL_BLOCK = 1 << 22
_MOST_ADDRESSED = 2**63 - 1  # bytes that the sizes of an array may span, whichever of them are 0


@dataclass(frozen=True)
class _Entry:
    tag: str
    shape: tuple[int, ...]
    begin: int  # bytes into the file
    end: int


class TensorFile:
    """A safetensors file under a memory map; its header is checked whole before anything is handed out.

    XdError 66 when the file is not there, 65 when it is not a well-formed safetensors file or is a symlink (unless
    `follow_symlinks`). Arrays and raw views are read-only and stay valid after `close`.
    """

    def __init__(self, path: str | os.PathLike[str], *, follow_symlinks: bool = False) -> None:
        self.path = Path(path)
        self._map = _map(self.path, follow_symlinks)
        try:
            self._xd, self._entries = _parse(self._map, str(path))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the map; it is freed when the last view into it is."""
        with contextlib.suppress(BufferError):
            self._map.close()

    def release(self) -> None:
        """Give the pages touched so far back to the page cache: a pass over a large file stays small in memory.

        Arrays and raw views stay valid; what is touched again is mapped again.
        """
        self._map.madvise(mmap.MADV_DONTNEED)

    @property
    def names(self) -> list[str]:
        """The tensors' names, in the order of their bytes."""
        return list(self._entries)

    @property
    def metadata(self) -> Any:
        """The JSON value under the header key "xd", parsed strictly; the caller validates it."""
        if set(self._xd) != {KEY}:
            raise XdError(
                'the header holds no metadata of xd: exactly one key, "xd", is wanted', code="foreign-file",
                where=str(self.path), path=f"/{METADATA}", found=sorted(self._xd)[:8],
            )
        return strictjson.loads(self._xd[KEY], f"{self.path} (header key {KEY})")

    def dtype(self, name: str) -> str:
        """A dtype's name as torch says it: "float32", "bfloat16", "int64", "bool" …"""
        return _TAGS[self._entry(name).tag][0]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def raw(self, name: str) -> memoryview:
        """A tensor's little-endian bytes; needs no numpy."""
        entry = self._entry(name)
        return memoryview(self._map)[entry.begin : entry.end]

    def array(self, name: str) -> np.ndarray:
        """A tensor as a read-only numpy view into the map; bfloat16 as uint16 and float8 as uint8 bit patterns.

        XdError 65 when a byte of a bool tensor is neither 0 nor 1.
        """
        import numpy as np

        entry = self._entry(name)
        array = np.frombuffer(self.raw(name), dtype=_TAGS[entry.tag][2]).reshape(entry.shape)
        if entry.tag == "BOOL":
            flat = array.reshape(-1).view(np.uint8)
            for start in range(0, flat.size, _BOOL_BLOCK):
                if flat[start : start + _BOOL_BLOCK].max() > 1:
                    raise XdError("a bool tensor holds bytes other than 0 and 1", code="bad-tensor",
                                  where=str(self.path), path=f"/{name}")  # fmt: skip
                self.release()
        return array

    def expect(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> None:
        """XdError 65 unless the tensor is there with this dtype and shape (None: any length)."""
        found = self.shape(name)
        fits = len(found) == len(shape) and all(want in (None, have) for want, have in zip(shape, found, strict=True))
        if self.dtype(name) != dtype or not fits:
            raise XdError(
                "tensor of another dtype or shape", code="bad-tensor", where=str(self.path), path=f"/{name}",
                found=f"{self.dtype(name)} {list(found)}",
                expected=f"{dtype} {['any' if n is None else n for n in shape]}".replace("'", ""),
            )  # fmt: skip

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise XdError("the file lacks a tensor", code="missing-tensor", where=str(self.path),
                          path=f"/{name}") from None  # fmt: skip


@dataclass(frozen=True)
class Lazy:
    """A tensor that is written as it is made: `chunks` are arrays or bytes which, one after another, are its values.

    dtype is a name as `TensorFile.dtype` gives it; bfloat16 chunks are arrays of uint16 bit patterns.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: Iterable[Any]


def write(path: str | os.PathLike[str], tensors: dict[str, np.ndarray | Lazy], metadata: Any) -> bool:
    """Publish a safetensors file. True: written. False: the same bytes were there. XdError 73: other bytes were.

    The bytes depend on the arguments alone. Tensors are laid out, and lazy ones consumed, in the order given, so that a
    later one may depend on what an earlier one's chunks computed; give the widest dtypes first to keep all aligned.
    """
    return publish.publish(path, serialise(tensors, metadata))


def serialise(tensors: dict[str, np.ndarray | Lazy], metadata: Any) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, chunk by chunk, as `write` publishes them."""
    lazies = {name: value if isinstance(value, Lazy) else _lazy(value) for name, value in tensors.items()}
    header: dict[str, Any] = {METADATA: {KEY: canon.dumps(metadata).decode()}}
    offset = 0
    for name, lazy in lazies.items():
        tag, size = _BY_NAME[lazy.dtype]
        end = offset + size * math.prod(lazy.shape)
        header[name] = {"dtype": tag, "shape": list(lazy.shape), "data_offsets": [offset, end]}
        offset = end
    data = canon.dumps(header)
    data += b" " * (-len(data) % 8)
    yield struct.pack("<Q", len(data)) + data
    for name, lazy in lazies.items():
        wanted, written = _BY_NAME[lazy.dtype][1] * math.prod(lazy.shape), 0
        for chunk in lazy.chunks:
            view = raw_bytes(chunk)
            written += len(view)
            yield view
        assert written == wanted, f"chunks of {name!r} hold {written} bytes, its shape says {wanted}"


def _lazy(array: np.ndarray) -> Lazy:
    return Lazy(array.dtype.name, array.shape, [array])


def raw_bytes(chunk: Any) -> memoryview:
    """The little-endian C-order bytes of an array or of anything with a buffer."""
    if hasattr(chunk, "dtype"):
        import numpy as np

        chunk = np.ascontiguousarray(chunk, dtype=chunk.dtype.newbyteorder("<"))
        chunk = chunk.reshape(-1).view(np.uint8)
    return memoryview(chunk).cast("B")


def _map(path: Path, follow_symlinks: bool) -> mmap.mmap:
    where = str(path)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_symlinks else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise XdError("no such file", status=Status.MISSING, code="missing", where=where) from error
    except OSError as error:
        if path.is_symlink():
            raise XdError("is a symlink, which is not followed here", code="symlink", where=where) from error
        raise of_exception(error, where) from error
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise XdError("not a regular file", code="not-a-file", where=where)
        if about.st_size < 8:
            raise _malformed(where, "is too short for a safetensors file", found=f"{about.st_size} bytes")
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)


def _parse(data: mmap.mmap, where: str) -> tuple[dict[str, str], dict[str, _Entry]]:
    (length,) = struct.unpack("<Q", data[:8])
    if length > MAX_HEADER_BYTES:
        raise _malformed(where, "header is too long", found=f"{length} bytes", expected=f"at most {MAX_HEADER_BYTES}")
    start = 8 + length
    if start > len(data):
        raise _malformed(where, "truncated in its header", found=f"{len(data)} bytes", expected=f"at least {start}")
    header = strictjson.loads(data[8:start], f"{where} (header)", max_bytes=MAX_HEADER_BYTES)
    if not isinstance(header, dict):
        raise _malformed(where, "header is not a JSON object")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _malformed(where, "header metadata is not a map of strings", path=f"/{METADATA}")
    entries = {name: _parse_entry(name, value, start, where) for name, value in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    position = start
    for name, entry in entries.items():
        if entry.begin != position:
            what = "overlap" if entry.begin < position else "leave a gap"
            raise _malformed(where, f"tensors {what}", path=f"/{name}/data_offsets/0", found=entry.begin - start,
                             expected=position - start)  # fmt: skip
        position = entry.end
    if position != len(data):
        what = "truncated" if position > len(data) else "bytes after the last tensor"
        raise _malformed(where, what, found=f"{len(data)} bytes", expected=position)
    return metadata, entries


def _parse_entry(name: str, value: Any, start: int, where: str) -> _Entry:
    path = strictjson.pointer_to("", name)
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _malformed(where, "a tensor's entry needs dtype, shape and data_offsets alone", path=path, found=value)
    tag, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(tag, str) or tag not in _TAGS:
        raise _malformed(where, "dtype is not known", path=f"{path}/dtype", found=tag, expected=" ".join(_TAGS))
    if not _sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise _malformed(where, f"shape is no list of at most {MAX_DIMENSIONS} sizes", path=f"{path}/shape",
                         found=shape)  # fmt: skip
    if not _sizes(offsets) or len(offsets) != 2:
        raise _malformed(where, "data_offsets are not two offsets", path=f"{path}/data_offsets", found=offsets)
    begin, end = offsets
    if _TAGS[tag][1] * math.prod(size for size in shape if size) > _MOST_ADDRESSED:  # an empty one, too
        raise _malformed(where, "shape is larger than any array", path=f"{path}/shape", found=shape)
    wanted = _TAGS[tag][1] * math.prod(shape)
    if end - begin != wanted:
        raise _malformed(where, "data_offsets do not span dtype times shape", path=f"{path}/data_offsets",
                         found=f"{end - begin} bytes", expected=wanted)  # fmt: skip
    return _Entry(tag, tuple(shape), start + begin, start + end)


def _sizes(value: Any) -> bool:
    """Whether this is a list of non-negative integers (true is none)."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _malformed(where: str, what: str, **facts: Any) -> XdError:
    return XdError(what, code="bad-safetensors", where=where, **facts)
