"""What goes between ranks comes out as it went in; and what is none of it is refused, not run."""

from __future__ import annotations

import dataclasses
import json
import pickle

import numpy as np
import pytest
from materialize_fixtures import SEQUENCES

pytest.importorskip("torch")

from libxd.runtimes.protocol import EngineContext, Observation, ObservedInputs, Piece, Request, Scores
from libxd.runtimes.ranks import wire
from libxd.runtimes.ranks.rank import Work

ARRAY = np.array([[1.5, np.nan], [-0.0, np.inf]], np.float32)
OBSERVED = ObservedInputs(
    np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32), None, np.array([True, False, True]),
    np.zeros(3, bool), "kv_cache", [[Piece(0, 0, 2)], [Piece(0, 2, 1)]], frozenset({2**63 + 1, 7}),
)  # fmt: skip
VALUES = [
    None, True, 0, -(2**70), 0.1, 1e-320, "näme\n", "", b"", b"\0\xff", [], (), {}, set(), [[]], ((1,), [2, (3,)]),
    ("score", ("list", "dict")), {"a": [1, (2, {"b": None})]}, {("head", (0, 1)): "digest", 3: {4}, None: True},
    ["bytes", 3], frozenset({"a", "b"}), [b"one", ("x", b"two")], ARRAY, ARRAY.T, ARRAY[:, :0], np.array(3.0),
    np.array([2**63], np.uint64), ("open", ("hf", "rollout", {"engine": {}}, EngineContext({"a": 1}, {"b": None}))),
    Observation(None, {"ranks": [1]}), Request(4, "decode", "canonical", {"temperature": 1.0}), SEQUENCES,
    (Scores(np.array([np.nan, -1], np.float32), OBSERVED, None), Work(3, (1.0,), "d")),
]  # fmt: skip


def alike(one: object, other: object) -> bool:
    """Equal in value and type, arrays bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if dataclasses.is_dataclass(one):
        return all(alike(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(alike, one.items(), other.items()))
    return one == other


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_what_goes_in_comes_out(value):
    assert alike(wire.loads(wire.dumps(value)), value)


def test_values_can_be_told_apart():
    """The control: no two of them are alike, sent or not."""
    sent = [wire.loads(wire.dumps(value)) for value in VALUES]
    assert [(i, k) for i, one in enumerate(sent) for k, two in enumerate(VALUES) if i != k and alike(one, two)] == []


def test_an_array_that_came_may_be_written_to():
    array = wire.loads(wire.dumps(ARRAY))
    array[0, 0] = 3
    assert array[0, 0] == 3


class Reduced:
    """What pickle would run."""

    def __reduce__(self):
        return (print, ("ran",))


@pytest.mark.parametrize(
    "value", [Reduced(), print, object, np.array([None]), np.array(["a"]), np.float32(1), bytearray(b"a")]
)
def test_what_is_no_message_is_not_sent(value):
    with pytest.raises(TypeError, match="ranks do not send"):
        wire.dumps(["in", {"a": value}])


def message(told: object, raw: bytes = b"") -> bytes:
    text = json.dumps(told).encode()
    return len(text).to_bytes(8, "little") + text + raw


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Reduced()),
        message(["Reduced", {}]),
        message(["ndarray", "|O", [1]], bytes(8)),
        message(["ndarray", "<i4", [2]], bytes(4)),
        message(["bytes", 5], b"1234"),
        message(["bytes", -1], b"1234"),
        message(["bytes", 3], b"1234"),
        message(["object", []]),
        b"",
    ],
)
def test_what_is_no_message_is_not_read(data, capsys):
    with pytest.raises(ValueError):
        wire.loads(data)
    assert capsys.readouterr().out == ""


def test_a_message_of_the_same_making_is_read():
    """The control of the one above."""
    assert wire.loads(message(["bytes", 4], b"1234")) == b"1234"
    assert wire.loads(message(["ndarray", "<i4", [2]], bytes(8))).tolist() == [0, 0]
