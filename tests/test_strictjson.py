"""JSON that two readers could understand differently is refused, with the place."""

from __future__ import annotations

import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libxd import canon, strictjson
from libxd.errors import Status, XdError

BAD = {
    "duplicate key": (b'{"a": {"b": 1, "b": 2}}', "duplicate-key", "/a/b"),
    "duplicate key, equal values": (b'{"b": 1, "b": 1}', "duplicate-key", "/b"),
    "NaN": (b'{"a": [0, NaN]}', "not-finite", "/a/1"),
    "Infinity": (b'{"a": -Infinity}', "not-finite", "/a"),
    "overflow": (b'{"a": 1e999}', "not-finite", "/a"),
    "integer beyond doubles": (b'{"a": 9007199254740993}', "integer-too-large", "/a"),
    "endless integer": (b'{"a": ' + b"9" * 5000 + b"}", "integer-too-large", "/a"),
    "half a surrogate": (b'["\\ud800"]', "not-utf8", "/0"),
    "half a surrogate in a key": (b'{"x": {"\\ud800": 1}}', "not-utf8", "/x"),
    "not UTF-8": (b'{"a": "\xff"}', "not-utf8", ""),
    "truncated": (b'{"a": 1', "not-json", ""),
    "empty": (b"", "not-json", ""),
    "a byte order mark": (b"\xef\xbb\xbf{}", "not-json", ""),
    "two values": (b"{} {}", "not-json", ""),
    "deep": (b"[" * 70 + b"]" * 70, "too-deep", ""),
    "very deep": (b"[" * 200_000, "too-deep", ""),
    "deep objects": (b'{"a":' * 70 + b"1" + b"}" * 70, "too-deep", ""),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_with_the_place(name):
    data, code, path = BAD[name]
    with pytest.raises(XdError) as caught:
        strictjson.loads(data, "some.json")
    (issue,) = caught.value.issues
    assert (issue.code, issue.path, issue.where, issue.status) == (code, path, "some.json", Status.INVALID)
    assert "\n" not in issue.line()


def test_brackets_inside_strings_are_not_nesting():
    text = '["' + "[{" * 500 + '", "\\"[["]'
    assert strictjson.loads(text, "x") == ["[{" * 500, '"[[']


def test_more_lists_and_objects_than_there_is_room_for_are_refused(monkeypatch):
    monkeypatch.setattr(strictjson, "MAX_CONTAINERS", 100)
    within = '["[[[",' + "[]," * 98 + '"{"]'
    assert len(strictjson.loads(within, "x")) == 100
    with pytest.raises(XdError) as caught:
        strictjson.loads(within.replace('"{"', "{},[]"), "x")
    assert caught.value.code == "too-many"


def test_flaws_by_the_million_are_counted_up_to_a_thousand():
    with pytest.raises(XdError) as caught:
        strictjson.loads("[" + "NaN," * 5000 + "1]", "x")
    assert caught.value.issues[-1].message == "and at least 1000 more"


def test_every_flaw_is_reported():
    with pytest.raises(XdError) as caught:
        strictjson.loads('{"a": NaN, "b": {"c": 1, "c": 2}}', "x")
    assert [issue.path for issue in caught.value.issues] == ["/a", "/b/c"]


def test_pointers_are_escaped():
    with pytest.raises(XdError) as caught:
        strictjson.loads('{"a/b~c": NaN}', "x")
    assert caught.value.issues[0].path == "/a~1b~0c"


def test_a_file_over_the_cap_is_not_read_further(tmp_path):
    path = tmp_path / "big.json"
    with open(path, "wb") as file:
        file.truncate(1 << 26)  # sparse: 64 MiB that must not be read
    tracemalloc.start()
    try:
        with pytest.raises(XdError) as caught:
            strictjson.load(path, max_bytes=1 << 20)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.code == "too-large"
    assert peak_bytes < 1 << 22


def test_a_missing_file_a_directory_and_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, code, status in (
        ("none.json", "missing", Status.MISSING),
        (".", "missing", Status.MISSING),
        ("pipe", "not-a-file", Status.INVALID),  # and it does not wait for a writer
    ):
        with pytest.raises(XdError) as caught:
            strictjson.load(tmp_path / name)
        assert (caught.value.code, caught.value.status) == (code, status)


JSON = st.recursive(
    # floats whose canonical form is an integer beyond 2^53 - 1 are the one thing that is written and not read
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: abs(x) < 2**53 or abs(x) >= 1e21)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(JSON)
def test_canonical_bytes_read_back_and_stay(value):
    data = canon.dumps(value)
    assert canon.dumps(strictjson.loads(data, "x")) == data


@given(st.binary(max_size=200))
def test_any_bytes_give_a_value_or_one_line(data):
    try:
        strictjson.loads(data, "x")
    except XdError as error:
        assert all("\n" not in issue.line() for issue in error.issues)
