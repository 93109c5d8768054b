"""Mutations that know the form of what they spoil: JSON keeps being JSON, a safetensors file keeps its offsets.

Bytes that are flipped blindly end at the parser; what lies behind it is reached by a file of the right form that holds
the wrong things. Everything is drawn from one `random.Random`, so a seed is a case.
"""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

#: names that lead elsewhere, or that some system, terminal, page or shell takes for something else
NAMES = (
    "", ".", "..", "../../../../etc/passwd", "/etc/passwd", "/dev/zero", "a\0b", "a\nb", "a\rb", "C:\\windows\\x",
    "CON", "NUL.json", "aux", "x" * 300, "x/" * 200, "\u2028\u2029", "\u202etxt.exe", "\x1b[2J\x1b[31m", "\x07\x08",
    "<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "\"'><svg onload=alert(1)>", "{{7*7}}",
    "$(touch canary)", "`touch canary`", "%s%n", "-rf", "é\u0301", "\ufeff", "\U0010ffff", "__proto__", "__class__",
    "a0001", "c-0123456789abcdef", "xd", "__metadata__",
)  # fmt: skip
#: what a reader of numbers does not expect
NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 255, 2**31 - 1, 2**31, 2**53 - 1, -(2**53) + 1, 10**9, 10**15, 0.0, -0.0, 0.5, 1.0, -1e308, 1e-320,
    3e38, float("nan"), float("inf"), float("-inf"), 2**63, 2**64, -(2**63) - 1, 10**400, True, False,
)  # fmt: skip
_OTHERS: tuple[Callable[[], Any], ...] = (
    lambda: None, list, dict, lambda: [[]], lambda: [None], lambda: {"": {}}, lambda: [0] * 1000, lambda: nested(70),
    lambda: nested(20), lambda: {str(i): i for i in range(200)}, lambda: ["x", 1, None, {}, [], True, 0.5],
)  # fmt: skip
#: tensors' dtypes of a safetensors header, and sizes in bytes
_TAGS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4,
         "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}  # fmt: skip
_SHAPES = ([], [0], [1], [-1], [10**9] * 4, [2**53 - 1] * 16, [0] * 17, [1] * 17, [10**9, 0], [2, 2], [True], [1.0],
           [2**63], ["1"])  # fmt: skip
#: bytes of one value that mean something special to somebody
_CELLS = (b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7, struct.pack("<ff", float("nan"), float("inf")),
          struct.pack("<ff", float("-inf"), -0.0), struct.pack("<q", -1), struct.pack("<q", 2**62),
          struct.pack("<d", float("nan")), b"\x01" * 8, b"\x02" * 8, struct.pack("<ff", 3e38, -3e38))  # fmt: skip
_MOST = 1 << 16  # bytes of what is made
_NOT_OF_ITS_FORM = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError, EOFError,
                    NotImplementedError, struct.error, zlib.error, zipfile.BadZipFile)  # fmt: skip


def nested(depth: int) -> Any:
    """Lists and objects in turn, one in another."""
    value: Any = 0
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def mutate(data: bytes, form: str, draw: random.Random) -> bytes:
    """`data` with one to four mutations of its form ("json", "jsonl", "safetensors", "csv", "zip" or "bytes"), or, one
    time in six, of its bytes. What is not of its form is spoiled as bytes."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        change = flip if draw.random() < 1 / 6 else _FORMS[form]
        try:
            data = change(data, draw)[:_MOST]
        except _NOT_OF_ITS_FORM:
            data = flip(data, draw)[:_MOST]
    return data


def flip(data: bytes, draw: random.Random) -> bytes:
    """A byte set, a part removed, repeated, or replaced by a special one."""
    held = bytearray(data or b"\0")
    at = draw.randrange(len(held))
    length = min(len(held) - at, draw.choice((1, 1, 2, 8, 64, len(held))))
    way = draw.randrange(6)
    if way == 0:
        held[at] ^= 1 << draw.randrange(8)
    elif way == 1:
        held[at] = draw.randrange(256)
    elif way == 2:
        del held[at : at + length]
    elif way == 3:
        held[at:at] = held[at : at + length] * draw.choice((1, 1, 2, 50))
    elif way == 4:
        cell = draw.choice(_CELLS)
        held[at : at + len(cell)] = cell
    else:
        held[at:at] = draw.choice(NAMES).encode("utf-8", "surrogatepass")
    return bytes(held)


# -- JSON


class _Raw(str):
    """Text that stands in JSON as it is."""


def _json(data: bytes, draw: random.Random) -> bytes:
    text = _dumped(spoiled(json.loads(data), draw))
    if draw.random() < 0.1:  # a key twice, or another byte order or sign before all
        quoted = f'"{draw.choice(NAMES[:3])}":'
        keys = [part for part in text.split(",") if ":" in part and part.startswith('"')]
        text = text.replace("{", "{" + (draw.choice(keys) if keys else f"{quoted}1") + ",", 1)
    return text.encode("utf-8", "surrogatepass")


def spoiled(value: Any, draw: random.Random) -> Any:
    """A JSON value in which one place is another."""
    places = list(_places(value))
    if not places or draw.random() < 0.01:
        return hostile(draw)
    parent, key = draw.choice(places)
    way = draw.randrange(8)
    held = parent[key]
    if way <= 2:
        parent[key] = like(held, draw)
    elif way == 3:
        parent[key] = hostile(draw)
    elif way == 4:
        del parent[key]
    elif way == 5:
        other, at = draw.choice(places)
        if not _holds(other[at], parent):
            parent[key] = other[at]
    elif isinstance(parent, dict):
        name = draw.choice((*NAMES, *parent)) if way == 6 else draw.choice(NAMES)
        parent[name] = parent.pop(key) if way == 6 else hostile(draw)
    else:
        parent[key:key] = [held] * draw.choice((1, 2, 40))
    return value


def like(held: Any, draw: random.Random) -> Any:
    """A value of the same type, another one."""
    if isinstance(held, bool):
        return not held
    if isinstance(held, int | float):
        near = (held + 1, held - 1, -held, held * 2, float(held) if abs(held) < 2**53 else 0.5)
        return draw.choice((*near, *NUMBERS))
    if isinstance(held, str):
        name = draw.choice(NAMES)
        way = draw.randrange(5)
        if way == 0 and len(held) in (64, 18):  # a digest, a case id: another of its kind
            return held[:-1] + draw.choice("0123456789abcdef")
        at = draw.randrange(len(held) + 1)
        return (name, held + name, held[:at] + name + held[at:], held[:at], held.upper())[way]
    if isinstance(held, list):
        return draw.choice((list(held[:1]), list(held) * 2, list(reversed(held)), []))
    if isinstance(held, dict):
        return draw.choice(({}, {**held, draw.choice(NAMES): hostile(draw)}, dict(reversed(held.items()))))
    return draw.choice((0, "", False, [], {}))


def hostile(draw: random.Random) -> Any:
    kind = draw.randrange(4)
    if kind == 0:
        return draw.choice(NAMES)
    if kind == 1:
        return draw.choice(NUMBERS)
    if kind == 2:
        return draw.choice((_Raw("1e999"), _Raw("-1e999"), _Raw("9" * 5000), _Raw('"\\ud800"'), _Raw("1E+2"),
                            _Raw("0." + "1" * 500), _Raw('"\\u0000"'), _Raw("[" * 100 + "]" * 100)))  # fmt: skip
    return draw.choice(_OTHERS)()


def _dumped(value: Any) -> str:
    raw: list[str] = []

    def marked(item: Any) -> Any:
        if isinstance(item, _Raw):
            raw.append(item)
            return f"\1raw{len(raw) - 1}\1"
        if isinstance(item, dict):
            return {marked(key) if isinstance(key, _Raw) else key: marked(each) for key, each in item.items()}
        return [marked(each) for each in item] if isinstance(item, list) else item

    text = json.dumps(marked(value), ensure_ascii=False, separators=(",", ":"))
    for number, each in enumerate(raw):
        text = text.replace(f'"\\u0001raw{number}\\u0001"', each)
    return text


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every place in a JSON value."""
    if isinstance(value, dict | list):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from _places(item)


def _holds(value: Any, container: Any) -> bool:
    return value is container or any(parent[key] is container for parent, key in _places(value))


def _jsonl(data: bytes, draw: random.Random) -> bytes:
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    way = draw.randrange(8)
    if way == 0:
        lines[at:at] = [lines[at]] * draw.choice((1, 3))
    elif way == 1:
        del lines[at]
    elif way == 2:
        lines[at] += draw.choice((b"\r", b"\0", b" ", b"\n\n", b"}", b","))
    else:
        lines[at] = _json(lines[at], draw)
    return b"\n".join(lines)


# -- safetensors


def _safetensors(data: bytes, draw: random.Random) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    way = draw.randrange(8)
    if way <= 1 and "__metadata__" in header:
        about = header["__metadata__"]
        about["xd"] = _json(about["xd"].encode(), draw).decode("utf-8", "surrogatepass")
    elif way == 2:
        return assembled(spoiled(header, draw), bytes(body), draw)
    elif way == 3:
        return struct.pack("<Q", draw.choice((0, 7, length + 1, length - 1, 2**63, 2**64 - 1, 1 << 24))) + data[8:]
    else:
        tensors = {name: [entry["dtype"], entry["shape"], bytes(body[slice(*entry["data_offsets"])])]
                   for name, entry in header.items() if name != "__metadata__"}  # fmt: skip
        _spoil_tensors(tensors, draw)
        return whole(tensors, header.get("__metadata__"), draw)
    return assembled(header, bytes(body), draw)


def _spoil_tensors(tensors: dict[str, list[Any]], draw: random.Random) -> None:
    name = draw.choice(list(tensors))
    tag, shape, raw = tensors[name]
    way = draw.randrange(8)
    if way <= 2 and raw:  # values
        size = _TAGS[tag]
        cell = draw.choice(_CELLS)[:size]
        at = draw.randrange(len(raw) // size) * size
        tensors[name][2] = cell * (len(raw) // size) if draw.random() < 0.2 else raw[:at] + cell + raw[at + size :]
    elif way == 3:
        tensors[name][0] = draw.choice([other for other in _TAGS if _TAGS[other] == _TAGS[tag]])
    elif way == 4:  # of another length, the header saying so
        count = draw.choice((0, 1, len(raw) // _TAGS[tag] + 1))
        tensors[name][1:] = [[count], (raw * 2 + bytes(8 * 2))[: count * _TAGS[tag]]]
    elif way == 5:
        tensors[name][1] = draw.choice((*_SHAPES, [1, *shape], [*shape, 1], [*shape, 0]))
    elif way == 6:
        del tensors[name]
    else:
        tensors[draw.choice((*NAMES, *tensors))] = [tag, shape, raw]


def whole(tensors: dict[str, list[Any]], metadata: Any, draw: random.Random) -> bytes:
    """A file of these tensors [dtype tag, shape, bytes], without gaps."""
    header, body = {} if metadata is None else {"__metadata__": metadata}, b""
    for name, (tag, shape, raw) in tensors.items():
        header[name] = {"dtype": tag, "shape": shape, "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    return assembled(header, body, draw)


def assembled(header: Any, body: bytes, draw: random.Random) -> bytes:
    text = _dumped(header).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % draw.choice((8, 8, 8, 1)))
    return struct.pack("<Q", len(text)) + text + body


# -- tables and archives


def _csv(data: bytes, draw: random.Random) -> bytes:
    rows = [line.split(b",") for line in data.split(b"\n")]
    row = draw.choice(rows)
    at = draw.randrange(len(row))
    way = draw.randrange(6)
    if way == 0:
        row[at] = str(draw.choice(NUMBERS)).encode()
    elif way == 1:
        row[at] = draw.choice(NAMES).encode("utf-8", "surrogatepass")
    elif way == 2:
        row[at:at] = [row[at]] * draw.choice((1, 30))
    elif way == 3:
        del row[at]
    elif way == 4:
        row[at] = draw.choice((b'"', b'""', b'"a\nb"', b'"x', b"nan", b"1_0", b"0x1", b"\xff", b"1e999", b"-0", b" 1 "))
    else:
        rows.insert(draw.randrange(len(rows)), list(draw.choice(rows)))
    return b"\n".join(b",".join(cells) for cells in rows)


def _zip(data: bytes, draw: random.Random) -> bytes:
    """A member's bytes spoiled, its checksum right again; or another member, compressed or not."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        members = [(info.filename, old.read(info)) for info in old.infolist()]
        at = draw.randrange(len(members))
        for place, (name, held) in enumerate(members):
            if place == at:
                way = draw.randrange(6)
                if way == 0:
                    continue
                held = flip(held, draw) if way > 1 else held
                name = name.rpartition("/")[0] + "/" + draw.choice(NAMES[3:6]) if way == 1 else name
            how = zipfile.ZIP_DEFLATED if draw.random() < 0.05 else zipfile.ZIP_STORED
            new.writestr(zipfile.ZipInfo(name), held, how)
    return out.getvalue()


_FORMS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "json": _json, "jsonl": _jsonl, "safetensors": _safetensors, "csv": _csv, "zip": _zip, "bytes": flip,
}  # fmt: skip
