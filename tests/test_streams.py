"""The seven tools with standard streams as nobody should hand them on: closed, full, a folder, in another encoding."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest
from comparison_fixtures import floats, scored
from scoring_fixtures import Bench

#: without what is read: operands are added, or stdin
TOOLS = {
    "xd-plan": ["xd-plan", "-q"],
    "xd-resume": ["xd-resume", "-q", "--runs", "runs", "--runtime", "scripted"],
    "xd-materialize": ["xd-materialize", "--runs", "runs", "--runtime", "scripted"],
    "xd-score": ["xd-score", "--side", "rollout"],
    "xd-compare": ["xd-compare"],
    "xd-seal": ["xd-seal"],
    "xd-rollout": ["xd-rollout", "--runtime", "scripted", "--model", "none", "--out", "out.safetensors"],
}
#: rollout needs a model to do more than fail
WORKING = [tool for tool in TOOLS if tool != "xd-rollout"]
READING = [tool for tool in TOOLS if tool != "xd-plan"]


class Place:
    """A directory with something for every tool to read; `run` is the tool under a shell's redirections."""

    def __init__(self, bench, root):
        self.bench, self.root = bench, root
        row = bench.case()
        (materialized,) = bench.materialize(row)
        attempt = str(scored(bench.place / "others", floats(-1, -2), floats(-1, -2)))
        rows = bench.place / "rows.jsonl"
        rows.write_bytes(b"".join(bench_rows(bench, 3)))
        self.operand = {
            "xd-plan": str(root / "experiments" / "s0.json"), "xd-resume": "rows.jsonl", "xd-materialize": "rows.jsonl",
            "xd-score": materialized, "xd-compare": attempt, "xd-seal": attempt,
        }  # fmt: skip

    def run(self, tool, redirections="", operand=True, **environment):
        words = [str(self.root / "tools" / tool), *TOOLS[tool][1:]]
        words += [self.operand[tool]] if operand else []
        return subprocess.run(
            ["bash", "-c", f"{shlex.join(words)} {redirections}"], capture_output=True, text=True, cwd=self.bench.place,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **self.bench.environment, "XD_PYTHON": sys.executable, **environment},
        )  # fmt: skip


def bench_rows(bench, count):
    from libxd import canon

    return [canon.dumps(bench.case(change=("batch.size", size))) + b"\n" for size in range(1, count + 1)]


@pytest.fixture
def place(xd, tmp_path, root):
    return Place(Bench(xd, tmp_path), root)


def one_line(done):
    return len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr


def test_a_stdin_that_is_closed_or_a_folder_is_66(place):
    for tool in READING:
        for way, what in (("<&-", "stdin: is closed"), ("< /", "stdin: is a directory")):
            done = place.run(tool, way, operand=False)
            assert (done.returncode, done.stdout, done.stderr) == (66, "", f"{tool}: {what}\n")
        assert place.run(tool, "<&- 2>&-", operand=False).returncode == 66


def test_what_is_not_needed_may_be_closed(place):
    """The work is done, with no pipe or file of the tool among the standard descriptors."""
    for tool in WORKING:
        done = place.run(tool, "<&- 2>&-")
        assert (done.returncode, done.stderr) == (0, ""), tool
        assert done.stdout
        full = place.run(tool, "2> /dev/full")
        assert (full.returncode, full.stdout == done.stdout) == (0, tool != "xd-materialize")


@pytest.mark.parametrize("way", [">&-", "<&- >&-"])
def test_a_closed_stdout_is_73_before_anything_is_made(place, way):
    before = sorted(place.bench.place.rglob("*"))
    for tool in TOOLS:
        done = place.run(tool, way, operand=tool != "xd-rollout")
        assert (done.returncode, done.stderr) == (73, f"{tool}: stdout: is closed\n")
        assert sorted(place.bench.place.rglob("*")) == before


def test_a_full_stdout_is_73_and_ends_the_tool(place):
    for tool in WORKING:
        before = len(list(place.bench.place.glob("runs/*/cases/*/a*")))
        done = place.run(tool, "<&- > /dev/full")
        assert (done.returncode, one_line(done)) == (73, True), done.stderr
        assert done.stderr.startswith(f"{tool}: stdout: cannot be written: No space left")
        made = len(list(place.bench.place.glob("runs/*/cases/*/a*"))) - before
        assert made == (1 if tool == "xd-materialize" else 0)  # of three rows
        assert place.run(tool, "> /dev/full 2>&1").returncode == 73


@pytest.mark.parametrize("way", ["2>&-", "2> /dev/full"])
def test_a_failure_that_nobody_hears_of_keeps_its_status(place, way):
    for tool in TOOLS:
        place.operand[tool] = "nowhere"
        heard = place.run(tool)
        assert heard.returncode not in (0, 1) and heard.stderr
        unheard = place.run(tool, way, XD_DEBUG="1")
        assert (unheard.returncode, unheard.stdout, unheard.stderr) == (heard.returncode, heard.stdout, "")


@pytest.mark.parametrize("way", ["2>&-", "2> /dev/full", "<&- >&- 2>&-"])
def test_a_broken_installation_is_70_even_when_it_cannot_be_said(place, way):
    site = place.bench.place / "broken"
    site.mkdir()
    (site / "click.py").write_text("raise RuntimeError('broken')\n")
    for tool in TOOLS:
        assert place.run(tool, way, operand=False, PYTHONPATH=str(site)).returncode == 70


@pytest.mark.parametrize("encoding", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}])
def test_paths_leave_as_they_came_whatever_text_is_encoded_in(xd, tmp_path, encoding):
    bench = Bench(xd, tmp_path)
    rows, runs = "".join(row.decode() for row in bench_rows(bench, 1)), "\u00fc \u4e2d x"
    environment = {**bench.environment, **encoding}
    made = xd("xd-materialize", "--runs", runs, "--runtime", "scripted", stdin=rows, env=environment)
    assert (made.status, made.err) == (0, "") and made.out.startswith(f"{runs}/")
    for tool in (["xd-score", "--side", "rollout"], ["xd-score", "--side", "training"], ["xd-compare"], ["xd-seal"]):
        done = xd(*tool, stdin=made.out, env=environment)
        assert (done.status, done.out, done.err) == (0, made.out, "")
    # and a message in any encoding is one
    assert xd("xd-seal", f"{runs}/none", env={**environment, "PYTHONIOENCODING": "ascii"}).err.count("\n") == 1


def test_help_is_printed_in_any_encoding(xd):
    for tool in TOOLS:
        done = xd(tool, "--help", env={"PYTHONIOENCODING": "ascii"})
        assert (done.status, done.err) == (0, "") and "Examples:" in done.out


def test_a_tool_leaves_nothing_open(xd, tmp_path):
    """Warnings of what was not closed are no part of what a tool says; here they would be."""
    bench = Bench(xd, tmp_path)
    environment = {**bench.environment, "PYTHONWARNINGS": "error", "PYTHONDEVMODE": "1"}
    row = bench_rows(bench, 1)[0].decode()
    made = xd("xd-materialize", "--runs", "runs", "--runtime", "scripted", stdin=row, env=environment)
    assert (made.status, made.err) == (0, "")
    for tool in (["xd-score", "--side", "rollout"], ["xd-score", "--side", "training"], ["xd-compare"], ["xd-seal"]):
        done = xd(*tool, stdin=made.out, env=environment)
        assert (done.status, done.out, done.err) == (0, made.out, "")
    answers = xd("xd-resume", "-q", "--runs", "runs", "--answers", stdin=row, env=environment)
    assert (answers.status, answers.out, answers.err) == (0, made.out, "")
    table = xd("xd-compare", "--table", stdin=made.out, env=environment)
    assert (table.status, table.err) == (0, "")
    (failing,) = bench.attempts("exits")
    failed = xd("xd-score", "--side", "rollout", failing, env=environment)
    assert (failed.status, len(failed.err.splitlines())) == (70, 1)


def test_a_stream_is_silenced_or_left_when_no_descriptor_is_free():
    code = (
        "import resource\nfrom libxd import streams\nresource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "streams.silence_stdout()\nprint('on')"
    )
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "on\n", "")
