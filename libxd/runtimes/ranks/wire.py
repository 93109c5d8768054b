"""What ranks say to each other, as bytes: JSON, and behind it the bytes of arrays. Nothing that is read runs anything.

A closed set of types goes over it: JSON's, tuples, sets, bytes, numeric arrays, and the dataclasses of the protocol.
What is none of them is a TypeError where it would be sent; what comes in another form is a ValueError.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from libxd.runtimes.protocol import EngineContext, Observation, ObservedInputs, Piece, Request, Scores
from libxd.runtimes.ranks.rank import Work
from libxd.sequences import Sequences

_RECORDS = {
    kind.__name__: kind
    for kind in (EngineContext, Observation, ObservedInputs, Piece, Request, Scores, Sequences, Work)
}
_GROUPS = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
_NUMERIC = "biuf"  # numpy's kinds of dtype: no objects, no text
_LENGTH_BYTES = 8


def dumps(value: Any) -> bytes:
    """Bytes of which `loads` makes an equal value: the length of the JSON, the JSON, all raw bytes in a row."""
    raw: list[bytes] = []
    text = json.dumps(_written(value, raw), separators=(",", ":")).encode()
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *raw])


def loads(data: bytes) -> Any:
    """The value of what `dumps` gave. Arrays are copies of their own, and may be written to."""
    begin = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    reader = _Reader(data, begin)
    value = reader.value(json.loads(data[_LENGTH_BYTES:begin]))
    if reader.at != len(data):
        raise ValueError(f"{len(data) - reader.at} bytes too many")
    return value


def _written(value: Any, raw: list[bytes]) -> Any:
    """JSON in which what JSON has no word for is [kind, …]; raw bytes are appended to `raw`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name = type(value).__name__
    if type(value) is bytes:
        raw.append(value)
        return [name, len(value)]
    if type(value) is np.ndarray and value.dtype.kind in _NUMERIC:
        raw.append(value.tobytes())
        return [name, value.dtype.str, list(value.shape)]
    if type(value) is _GROUPS.get(name):
        return [name, [_written(item, raw) for item in value]]
    if type(value) is dict:
        return [name, [[_written(key, raw), _written(item, raw)] for key, item in value.items()]]
    if type(value) is _RECORDS.get(name):
        fields = dataclasses.fields(value)
        return [name, {field.name: _written(getattr(value, field.name), raw) for field in fields}]
    raise TypeError(f"ranks do not send {name}")


class _Reader:
    """Values out of JSON, in the order in which they were written; `at` is where the next raw bytes begin."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self.at = data, at

    def value(self, told: Any) -> Any:
        if not isinstance(told, list):
            return told
        name, *rest = told
        if name == "bytes":
            return self._raw(rest[0])
        if name == "ndarray":
            dtype, shape = np.dtype(rest[0]), rest[1]
            if dtype.kind not in _NUMERIC:
                raise ValueError(f"an array of {dtype}")
            count = int(np.prod(shape, dtype=np.int64))
            return np.frombuffer(self._raw(count * dtype.itemsize), dtype).reshape(shape).copy()
        if name == "dict":
            return {self.value(key): self.value(item) for key, item in rest[0]}
        if name in _GROUPS:
            return _GROUPS[name](self.value(item) for item in rest[0])
        if name in _RECORDS:
            return _RECORDS[name](**{field: self.value(item) for field, item in rest[0].items()})
        raise ValueError(f"ranks do not send {name}")

    def _raw(self, size: int) -> bytes:
        begin, self.at = self.at, self.at + size
        if size < 0 or self.at > len(self._data):
            raise ValueError("bytes are missing")
        return self._data[begin : self.at]
