"""Whatever the bytes are, each reader reads them or says in one line what is wrong (at length: dev/torture/fuzz.py).

No exception but XdError with a status that blames the input, no hang, no memory beyond a cap, no file made elsewhere,
no process, no code of the input's, no text that a terminal or a page would act on.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import bomb_fixtures
import hostile_fixtures
import pytest
from hostile_fixtures import CORPUS, Fault, Reader, outcome, readers, run
from hypothesis import given, settings
from hypothesis import strategies as st

from libxd import schema, tensors
from libxd.errors import XdError

HERE = Path(__file__).resolve().parent
KEPT = sorted(path for path in CORPUS.rglob("*") if path.is_file())
#: readers of packages that are not everywhere -> the package
_OF_PACKAGE = {".pt": "torch", "parquet": "pyarrow"}
BOMBS = {bomb.name: bomb for bomb in bomb_fixtures.bombs()}
BOMB_BYTES = 1 << 19
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def reader_of(path: Path) -> str:
    return path.relative_to(CORPUS).parent.as_posix()


def missing(name: str) -> bool:
    return any(name.endswith(end) and name not in readers() for end in _OF_PACKAGE)


def first(codes: list[str]) -> str:
    return codes[0] if codes else "read"


def test_every_reader_has_a_corpus_and_every_corpus_a_reader():
    named = {reader_of(path) for path in KEPT}
    assert set(readers()) - named == set()
    assert [name for name in named - set(readers()) if not missing(name)] == []


def test_the_corpus_is_refused_as_it_was_under_a_cap():
    """Each file's name ends with the code that it gets first, or with `read`. Crashers are among them."""
    wanted = [path for path in KEPT if not missing(reader_of(path))]
    command = [sys.executable, "-P", HERE / "hostile_fixtures.py"]
    ran = subprocess.run([*command, *(text for path in wanted for text in (reader_of(path), str(path)))],
                         capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(HERE)})  # fmt: skip
    found = {Path(line["path"]): line for line in map(json.loads, ran.stdout.splitlines())}
    assert list(found) == wanted, ran.stderr
    assert [line for path, line in found.items() if "fault" in line or path.suffix[1:] != first(line["codes"])] == []


@pytest.mark.parametrize("name", readers())
def test_seeds_are_read(name, tmp_path):
    """The control: what the mutations begin with gets beyond parsers and schemas."""
    for seed, data in readers()[name].seeds().items():
        codes = run(readers()[name], data, tmp_path / "place")
        assert not {"not-json", "schema", "bad-safetensors", "not-parquet"} & set(codes), seed


@pytest.mark.parametrize("name", readers())
def test_mutations_are_read_or_refused(name, tmp_path):
    reader = readers()[name]
    slow = name.startswith("attempt/") or name == "plan-row"

    @settings(max_examples=5 if slow else 15, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 2**32 - 1).map(lambda seed: hostile_fixtures.example(reader, seed)))
    def mutated(data: bytes) -> None:
        run(reader, data, tmp_path / "place")

    @settings(max_examples=2 if slow else 8, deadline=None, derandomize=True, database=None)
    @given(st.binary(max_size=64) | JSON.map(lambda value: json.dumps(value).encode()))
    def anything(data: bytes) -> None:
        run(reader, data, tmp_path / "place")

    mutated()
    anything()


@pytest.mark.parametrize("name", BOMBS)
def test_what_is_small_does_not_unfold(name, tmp_path):
    bomb = BOMBS[name]
    reader = readers()[bomb.reader]
    for data in reader.seeds().values():  # its modules are loaded before the cap is set
        run(reader, data, tmp_path / "place")
    found = outcome(reader, bomb.make(BOMB_BYTES), tmp_path / "place", 128 << 20)
    assert "fault" not in found, found
    assert set(bomb.codes) & set(found["codes"])


# -- the checks find what they are for


def reads(function) -> Reader:
    return Reader("made", "bytes", lambda: {}, lambda data, place: function(place))


def escaping(place: Path) -> None:
    (place.parent / "escaped").write_text("")


def linked(place: Path) -> None:
    """By way of a directory that leads elsewhere."""
    (place / "link").symlink_to(place.parent)
    (place / "link" / "escaped").write_text("")


def unpickling(_place: Path) -> None:
    pickle.loads(b"cos\nsystem\n(S'true'\ntR.")


def raising(error: Exception):
    def read(_place: Path) -> None:
        with hostile_fixtures.refusing():
            raise error

    return read


def printing(text: str):
    return lambda _place: hostile_fixtures.shown([text])


def showing(html: str):
    return lambda _place: hostile_fixtures.page(f"<html><script></script>{html}</html>")


@pytest.mark.parametrize(
    "does",
    [
        escaping, linked, unpickling, lambda _: os.system("true"), lambda _: subprocess.run(["true"]),
        lambda place: os.rename(place, place.parent / "moved"), lambda place: (place.parent / "made").mkdir(),
        raising(KeyError("x")), raising(RecursionError()), raising(MemoryError()), raising(XdError("x", status=70)),
        printing("\x1b[31m"), printing("a\u2028b"), printing("\u202e"), showing("<img src=x onerror=alert(1)>"),
        showing("<script>alert(1)</script>"), showing("<p onclick=x>"), showing("</p>"), showing("\u2028"),
        showing('<link href="https://x">'),
    ],
)  # fmt: skip
def test_what_a_reader_must_not_do_is_found(does, tmp_path):
    with pytest.raises(Fault):
        run(reads(does), b"", tmp_path / "place")


def test_what_a_reader_may_do_is_no_fault(tmp_path):
    def careful(place: Path) -> None:
        (place / "made").write_text("")
        Path("/etc/hostname").exists()
        hostile_fixtures.shown(["é ≠ 1"])
        hostile_fixtures.page('<html><script></script><a href="#x">&lt;script&gt;</a></html>')
        with hostile_fixtures.refusing():
            raise XdError("no such file", status=66, code="missing")

    assert run(reads(careful), b"", tmp_path / "place") == ["missing"]


def test_memory_and_time_beyond_the_cap_are_found(tmp_path):
    def hungry(_place: Path) -> None:
        bytearray(256 << 20)

    def forever(_place: Path) -> None:
        while True:
            pass

    assert "out of memory" in outcome(reads(hungry), b"", tmp_path / "place", 128 << 20)["fault"]
    assert outcome(reads(hungry), b"", tmp_path / "place") == {"codes": []}
    with pytest.raises(Fault, match="computes for"), hostile_fixtures.capped(1 << 30, 0.05):
        run(reads(forever), b"", tmp_path / "place")


# -- kinds of fault that were found, each by itself


def test_of_a_large_value_the_first_error_alone_is_said(monkeypatch):
    """Each error of the validator holds a copy of what it is about."""
    small, large = ({"a": [{}] * count} for count in (10, schema._MOST_COPIED))
    issues = {}
    for name, value in (("small", small), ("large", large)):
        with pytest.raises(XdError) as caught:
            schema.validate("plan_row", value, "x")
        issues[name] = caught.value.issues
    assert len(issues["small"]) > 20
    assert [issue.code for issue in issues["large"]] == ["missing-field"]
    monkeypatch.setattr(schema, "_MOST_COPIED_ONCE", schema._MOST_COPIED)
    with pytest.raises(XdError, match="too large for it to be said where"):
        schema.validate("plan_row", large, "x")


def test_an_empty_tensor_has_sizes_that_an_array_can_have(tmp_path):
    for shape, sound in (([2**53 - 1, 2**53 - 1, 0], False), ([10**9, 0], True)):
        text = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
        path = tmp_path / f"{sound}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        if sound:
            assert tensors.TensorFile(path).array("a").shape == tuple(shape)
            continue
        with pytest.raises(XdError, match="larger than any array"):
            tensors.TensorFile(path)


def test_a_message_is_bounded_as_it_is_printed():
    """A character that does not print is written as up to ten."""
    long = "\U000e0001" * 5000
    line = XdError(long, where=long, path=long, found=long, expected=long, hint=long).line()
    assert line.isprintable() and len(line) < hostile_fixtures.MOST_LINE
    assert r"\U000e0001" in line


def test_the_long_form_says_when_its_fuzzer_is_not_there(root):
    program = "import runpy, sys; sys.modules['atheris'] = None; runpy.run_path(sys.argv.pop(), run_name='__main__')"
    command = [sys.executable, "-P", "-c", program, root / "dev/torture/fuzz.py"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (69, "")
    assert ran.stderr == "fuzz: atheris is not installed, and nothing was fuzzed: pip install -e '.[fuzz]'\n"
