"""xd-report as its users meet it: operands, formats by suffix, outputs that are kept, exit statuses."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from report_fixtures import LOGPROBS, judged, make, moved

from libxd import schema


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("runs"))


def test_a_run_on_the_terminal_and_its_attempts_by_pipe(xd, made):
    ran = xd("xd-report", made)
    assert ran.status == 0 and ran.out.startswith("test (test): contract ws1")
    assert ran.err == "xd-report: tokens are shown as ids: no tokenizer made them\n"
    attempts = sorted(map(str, made.glob("cases/*/a*")))
    piped = xd("xd-report", "-q", "--redact", stdin="".join(f"{path}\n" for path in attempts))
    assert (piped.status, piped.err) == (0, "") and "Which knob" in piped.out
    assert xd("xd-report", "-q", "--redact", *attempts).out == piped.out


def test_the_suffix_says_the_format_and_an_output_is_kept(xd, made, tmp_path):
    for name, begins in (("r.html", b"<!doctype html>"), ("r.txt", b"test (test)"), ("r.md", b"### test"),
                         ("r.json", b'{"answer"')):  # fmt: skip
        ran = xd("xd-report", "-q", made, "--out", name)
        assert (ran.status, ran.out) == (0, f"{name}\n")
        assert (tmp_path / name).read_bytes().startswith(begins)
    assert xd("xd-report", "-q", made, "--out", "r.html").status == 0  # the same bytes
    before = (tmp_path / "r.html").read_bytes()
    ran = xd("xd-report", "-q", made, "--redact", "--out", "r.html")
    assert (ran.status, ran.out) == (73, "") and "give another name" in ran.err
    assert (tmp_path / "r.html").read_bytes() == before
    printed = xd("xd-report", "-q", made, "--format", "json").out
    assert printed.encode() == (tmp_path / "r.json").read_bytes()
    schema.validate("report", json.loads(printed), "stdout")
    assert xd("xd-report", "-q", made, "--format", "md", "--out", "r.other").status == 0


@pytest.mark.parametrize(
    ("arguments", "status", "what"),
    [
        (("--out", "r.pdf"), 2, "names no format"),
        (("--format", "png"), 2, "give --out"),
        (("--tokenizer", "nowhere"), 66, "tokenizer.json"),
        (("--out", "nowhere/r.html"), 73, "no such directory"),
        (("--out", "/", "--format", "html"), 73, "is a directory"),
    ],
)
def test_what_cannot_be_asked(xd, made, tmp_path, arguments, status, what):
    ran = xd("xd-report", "-q", made, *arguments)
    assert (ran.status, ran.out) == (status, "") and what in ran.err and len(ran.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_run(xd, made, tmp_path):
    (tmp_path / "empty").mkdir()
    assert xd("xd-report", "nowhere").status == 66
    assert xd("xd-report", "empty").status == 65
    assert xd("xd-report", stdin="").status == 65
    other = judged(tmp_path / "other", LOGPROBS, moved(0.1), source="bitwise")
    ran = xd("xd-report", "-q", made, other)
    assert ran.status == 65 and "of one experiment" in ran.err
    named = next(made.glob("cases/*/a*")).parent.parent
    assert f"give the attempts of one: {named}/c-" in ran.err and f", or {other}" in ran.err
    ran = xd("xd-report", next(other.path.glob("score_*")))
    assert ran.status == 65 and "is a file, and a report is of attempts" in ran.err


def test_a_damaged_attempt_is_said_and_the_others_are_reported(xd, tmp_path):
    run = make(tmp_path / "runs")
    attempts = sorted(map(str, run.glob("cases/*/a*")))
    (Path(attempts[0]) / "requested.json").write_text("{")
    ran = xd("xd-report", "-q", "--redact", *attempts)
    assert ran.status == 65 and attempts[0] in ran.err and "Which knob" in ran.out


def test_without_matplotlib_a_picture_is_refused_and_nothing_written(xd, made, tmp_path):
    (tmp_path / "shadow" / "matplotlib").mkdir(parents=True)
    (tmp_path / "shadow" / "matplotlib" / "__init__.py").write_text("raise ImportError('none here')\n")
    ran = xd("xd-report", "-q", made, "--out", "r.png", env={"PYTHONPATH": str(tmp_path / "shadow")})
    assert ran.status == 69 and "xd[report]" in ran.err and not (tmp_path / "r.png").exists()


def test_a_picture(xd, made, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra report is not installed")
    for name in ("a.png", "b.png"):
        assert xd("xd-report", "-q", made, "--out", name).status == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_terminal_gets_colours_and_a_pipe_none(xd, made, root):
    """As xd-compare's table: by a pseudo-terminal, and NO_COLOR."""
    tool = [str(root / "tools" / "xd-report"), "-q", "--redact", str(made)]
    for extra, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        master, slave = pty.openpty()
        environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        environment |= {"XD_PYTHON": sys.executable, **extra}
        with subprocess.Popen(tool, stdout=slave, env=environment):
            os.close(slave)
            said = b""
            with contextlib.suppress(OSError):  # the end of a terminal
                while part := os.read(master, 1 << 16):
                    said += part
        os.close(master)
        assert (b"\x1b[1mWhich knob" in said) == coloured and (b"\x1b[33mMISMATCH" in said) == coloured
        assert b"Which knob" in said
    assert "\x1b" not in xd("xd-report", "-q", "--redact", made).out


def test_what_cannot_be_read_is_said_once(xd, tmp_path):
    ran = xd("xd-report", tmp_path / "nowhere", "--out", tmp_path / "x.html")
    assert (ran.status, ran.out, len(ran.err.splitlines())) == (66, "", 1) and "nowhere" in ran.err
    assert not (tmp_path / "x.html").exists()
