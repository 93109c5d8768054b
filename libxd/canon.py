"""Canonical bytes and digests: RFC 8785 JSON, BLAKE3."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import rfc8785
from blake3 import blake3

from libxd.errors import XdError

_MAPPED_FROM_BYTES = 1 << 20  # below this, opening a map and a thread pool costs more than it saves
_WINDOW = 1 << 23  # bytes of a map that are resident at once; enough for all cores


def dumps(value: Any) -> bytes:
    """RFC 8785 bytes of a JSON value, without a newline. XdError for what canonical JSON cannot hold."""
    try:
        return rfc8785.dumps(value)
    except rfc8785.CanonicalizationError as error:
        raise XdError(f"not canonical JSON: {error}", code="not-canonical") from error


def join(members: Mapping[str, bytes]) -> bytes:
    """RFC 8785 bytes of an object whose members' values are canonical bytes already.

    The same bytes as `dumps` of the whole, without going through a member that many objects share again.
    """
    return b"{" + b",".join([prefix + members[name] for name, prefix in _layout(tuple(members))]) + b"}"


@lru_cache(maxsize=256)
def _layout(names: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """Names in canonical order (RFC 8785 section 3.2.3: by UTF-16 code units), each with its bytes and the colon."""
    return [(name, dumps(name) + b":") for name in sorted(names, key=lambda name: name.encode("utf-16-be"))]


def digest(value: Any) -> str:
    """BLAKE3 (64 hex digits) over the canonical bytes of a JSON value."""
    return blake3(dumps(value)).hexdigest()


def digest_bytes(data: bytes | memoryview) -> str:
    """BLAKE3 (64 hex digits) over bytes."""
    return blake3(data).hexdigest()


def digest_stream(chunks: Iterable[bytes | memoryview]) -> str:
    """BLAKE3 (64 hex digits) over chunks, in order."""
    hasher = blake3()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest()


def digest_file(path: str | os.PathLike[str]) -> str:
    """BLAKE3 (64 hex digits) over a regular file's bytes; large files by memory map on all cores, a window at a
    time.

    XdError 65 for what is none: a pipe or a device may have no end. OSError when it cannot be read.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise XdError("not a regular file", code="not-a-file", where=os.fspath(path))
        if about.st_size < _MAPPED_FROM_BYTES:
            return digest_bytes(file.read())
        hasher = blake3(max_threads=blake3.AUTO)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            for start in range(0, len(view), _WINDOW):
                hasher.update(view[start : start + _WINDOW])
                data.madvise(mmap.MADV_DONTNEED)
    return hasher.hexdigest()
