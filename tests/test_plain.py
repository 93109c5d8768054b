"""What a person reads: escaped, shortened at both ends, bounded in number; and time that grows as the input does."""

from __future__ import annotations

import os
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libxd import canon, resolution, schema, strictjson
from libxd.errors import MAX_COUNTED, MAX_ISSUES, Status, XdError, XdErrors, of_exception
from libxd.plain import WIDTH, Footnotes, leaves, number, plain, shortened, told_apart, wrapped
from libxd.plain import value as knob
from libxd.rundir import PAYLOADS

NASTY = "a\x1b]0;title\x07b\x9bc\u202ed\u2028e\udcff\r\n"


def test_nothing_that_a_terminal_acts_on_is_left():
    assert plain(NASTY) == r"a\x1b]0;title\x07b\x9bc\u202ed\u2028e\udcff\r\n"
    assert plain("run s/ü/模型") == "run s/ü/模型"


@given(st.text(st.characters(codec=None)))
def test_whatever_it_is(text):
    shown = plain(text)
    assert all(unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for char in shown)


@pytest.mark.parametrize("part", ["message", "where", "path", "found", "expected", "hint"])
def test_each_part_of_a_message_is_plain_and_bounded(part):
    for value in (NASTY, "x" * 10_000_000):
        parts = {"message": "what", part: value}
        message = parts.pop("message")
        line = XdError(message, **parts).line()
        assert line.isprintable() and len(line) < 4000
        assert all(len(str(item)) <= 2000 for item in XdError(message, **parts).record().values())


def test_both_ends_of_a_place_are_shown():
    line = XdError("no such file", where="/begin/" + "x" * 5000 + "/end.json").line()
    assert line.startswith("/begin/x") and "/end.json: no such file" in line
    assert shortened("abcdefghij", 7) == "abcd…ij" and len(shortened("abcdefghij", 7)) == 7


@pytest.mark.parametrize("place", [0, 60, 119, 200, 5000, 9999])
def test_found_and_expected_show_in_what_they_differ(place):
    wanted = "".join(chr(ord("a") + i % 26) for i in range(10_000))
    other = wanted[:place] + "#" + wanted[place + 1 :]
    found, expected = told_apart(other, wanted, 120)
    assert found != expected and "#" in found and max(len(found), len(expected)) <= 120
    line = XdError("differs", found=other, expected=wanted).line()
    assert "#" in line and len(line) < 300
    longer = XdError("differs", found=wanted + "y", expected=wanted)
    assert longer.record()["found"] != longer.record()["expected"]


def test_of_many_issues_the_first_few_are_said_and_how_many_more():
    for count, more in ((900, str(900 - MAX_ISSUES)), (10**9, f"at least {MAX_COUNTED}")):
        found = XdErrors(XdError(f"number {i}", status=Status.MISSING, where="f") for i in range(count))
        assert len(found.issues) == MAX_ISSUES + 1
        assert found.issues[-1].line() == f"f: and {more} more"
    assert found.status == found.issues[-1].status == Status.MISSING
    assert len(XdErrors(XdError("x") for _ in range(MAX_ISSUES)).issues) == MAX_ISSUES


@pytest.mark.parametrize(
    "read",
    [
        lambda: strictjson.loads("[" + ",".join(["NaN"] * 5000) + "]", "x"),
        lambda: schema.validate("plan_row", {"missing": [1] * 5000}, "x"),
    ],
)
def test_so_it_is_with_what_is_read(read):
    with pytest.raises(XdErrors) as caught:
        read()
    assert len(caught.value.issues) == MAX_ISSUES + 1
    assert "more" in caught.value.issues[-1].message


def test_a_repeated_key_is_found_in_one_pass(monkeypatch):
    """Comparisons of keys, counted: they grow as the keys do."""
    compared = 0

    class Key(str):
        __slots__ = ()

        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    pairs = [(Key(f"k{i}"), i) for i in range(3000)]
    marked = strictjson._object([*pairs, pairs[-1]])
    assert marked.key == "k2999"
    assert compared < 10 * len(pairs)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["fifo", "device"])
def test_what_has_no_end_is_no_file_of_a_checkpoint_or_tokenizer(tmp_path, make):
    for name, read in (("model.safetensors", resolution.checkpoint_files), ("config.json", resolution.checkpoint_files),
                       ("tokenizer.json", resolution.tokenizer_files)):  # fmt: skip
        directory = tmp_path / name
        directory.mkdir()
        make(directory / name)
        with pytest.raises(XdError) as caught:
            read(directory)
        assert (caught.value.status, caught.value.code) == (Status.INVALID, "not-a-file")
        assert name in caught.value.line()


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"schema_version": "xd.seal.v1", "experiment_id": "e", "case_id": "c-" + "0" * 16, "repeat": 0.0,
          "execution_key": "0" * 64, "files": {}}, "/repeat"),
    ],
)  # fmt: skip
def test_a_whole_number_with_a_fraction_is_another_kind_of_number(value, path):
    value["files"] = {name: {"blake3": "0" * 64, "bytes": 1} for name in PAYLOADS}
    schema.validate("seal", {**value, "repeat": 0}, "x")
    with pytest.raises(XdErrors) as caught:
        schema.validate("seal", value, "x")
    assert [(issue.code, issue.path) for issue in caught.value.issues] == [("wrong-type", path)]
    value["files"][PAYLOADS[0]]["bytes"] = 309.0
    with pytest.raises(XdErrors) as caught:
        schema.validate("seal", {**value, "repeat": 0}, "x")
    assert caught.value.issues[0].line().endswith("(found 309.0)")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("embedded null byte"), Status.INVALID),
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"), Status.INVALID),
        (OSError(36, "File name too long", "x" * 300), Status.MISSING),
        (PermissionError(13, "Permission denied", "f"), Status.MISSING),
        (OSError(28, "No space left on device", "f"), Status.CONFLICT),
        (MemoryError(), Status.RETRY),
        (UnicodeError("label empty or too long"), Status.BUG),  # as of idna: without any of the others' fields
        (ValueError("of xd's own"), Status.BUG),
    ],
)
def test_ordinary_errors_of_the_system_are_no_bugs(error, status):
    assert of_exception(error).status == status
    assert of_exception(error).line().isprintable()


def test_canonical_bytes_of_a_file_are_those_of_a_regular_one(tmp_path):
    (tmp_path / "f").write_bytes(b"x")
    assert canon.digest_file(tmp_path / "f") == canon.digest_bytes(b"x")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0, "0"),
        (2.134e-05, "2.13e-5"),
        (0.02713, "0.0271"),
        (12.345, "12.3"),
        (1e-12, "1.00e-12"),
        (0.12, "0.120"),
        (123.4, "123"),
    ],
)
def test_numbers_have_three_digits(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_wrapped_text_can_be_copied():
    """No word is broken, at a hyphen or anywhere; what a terminal acts on is escaped."""
    path = "/".join(["a-long-name"] * 14)
    lines = wrapped(f"{'word ' * 30}xd-doctor --rescore {path}\x1b[1m end", "  - ")
    assert lines[0].startswith("  - word") and all(line.startswith("    ") for line in lines[1:])
    assert any(path + r"\x1b[1m" in line for line in lines) and "xd-doctor" in " ".join(lines)
    assert max(len(line) for line in lines if path not in line) <= WIDTH
    assert wrapped("one two", "> ", "") == ["> one two"] and wrapped("") == []
    assert wrapped("word " * 40, "1. ", "   ")[1].startswith("   word")


def test_footnotes_stand_once():
    notes = Footnotes()
    assert [notes.mark(note) for note in ("b", "a", "b", "")] == [" [1]", " [2]", " [1]", ""]
    assert notes.lines() == ["[1] b", "[2] a"] and Footnotes().lines() == []


def test_leaves_of_a_value_with_their_paths():
    given = {"b": {"x": True, "y": None}, "a": ["one", "two"], "c": [1, {"d": 2}], "e\n": []}
    wanted = {"a": "one two", "b.x": "true", "b.y": "none", "c": '[1,{"d":2}]', r"e\n": "none"}
    assert dict(leaves(given)) == wanted
    assert [knob(True), knob(2), knob("a\x07")] == ["true", "2", r"a\x07"]
