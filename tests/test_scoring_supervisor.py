"""The parent and its child: failures of an engine, signals, what an engine prints, and that nobody is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scoring_fixtures import Bench

from libxd.errors import Status, XdError
from libxd.scoring.process import Child, ChildDied
from libxd.scoring.scorer import as_xd_error
from libxd.scoring.supervisor import differences

#: how long a process may take to appear or to be gone; only a failing test waits so long
PATIENCE_S = 30.0


@pytest.fixture
def bench(xd, tmp_path):
    return Bench(xd, tmp_path)


def lines(text):
    return text.splitlines()


@pytest.mark.parametrize(
    ("act", "status", "words"),
    [
        ("raises", Status.BUG, "the engine failed: RuntimeError: the kernel did not launch"),
        ("fills-memory", Status.RETRY, "or plan a smaller batch.size"),
        ("one-score-short", Status.BUG, "found float32 [11], expected float32 [12]"),
        ("exits", Status.BUG, "the scorer ended with status 3"),
    ],
)
def test_a_failing_engine_is_one_line_and_publishes_nothing_and_the_others_go_on(bench, act, status, words):
    bad, good = bench.attempts(act, "plain")
    ran = bench.score(bad, good)
    assert (ran.status, lines(ran.out)) == (status, [good])
    assert len(lines(ran.err)) == 1
    assert lines(ran.err)[0].startswith(f"xd-score: {bad}: ")
    assert words in ran.err
    assert bench.files(bad) == set()


@pytest.mark.parametrize(("act", "fresh"), [("raises", True), ("fills-memory", True), ("refuses-to-score", False)])
def test_an_engine_that_failed_takes_its_process_along(bench, act, fresh):
    """What failed may have left a broken CUDA context, or memory that a traceback holds; a refusal has not."""
    before, bad, good = bench.attempts("plain", act, "plain")
    ran = bench.score(before, bad, good)
    assert lines(ran.out) == [before, good]
    first, last = (bench.open(path).readback("rollout")["reuse"] for path in (before, good))
    assert first == {"engine_serial": 1, "case_serial": 1}
    assert last == (first if fresh else {"engine_serial": 3, "case_serial": 3})


def test_an_engine_that_hangs_is_ended_when_a_limit_is_given(bench):
    sleeping, good = bench.attempts("sleeps", "plain")
    ran = bench.score("--timeout", "3", sleeping, good)
    assert (ran.status, lines(ran.out)) == (Status.RETRY, [good])
    assert f"xd-score: {sleeping}: the scorer took longer than 3 s" in ran.err
    assert bench.files(sleeping) == set()
    assert gone(int((bench.place / "pid").read_text()))


def test_the_traceback_comes_on_request(bench):
    (path,) = bench.attempts("raises")
    assert "Traceback" not in bench.score(path).err
    shown = bench.score(path, XD_DEBUG="1").err
    assert "misbehave" in shown
    assert "RuntimeError: the kernel" in shown


def test_what_an_engine_prints_and_reads_does_not_meet_the_protocol(bench):
    (path,) = bench.attempts("prints reads-stdin")
    ran = bench.score(path)
    assert (ran.status, ran.out, ran.err) == (0, f"{path}\n", "")


def test_chatter_is_shown_on_request_and_after_a_failure(bench):
    said = ["the engine prints", "straight to the descriptor", "and complains"]
    (quiet,) = bench.attempts("prints")
    ran = bench.score("-v", quiet)
    assert ran.out == f"{quiet}\n"
    assert {f"xd-score: {line}" for line in said} <= set(lines(ran.err))
    honest, failing = bench.attempts("plain", "prints raises")
    assert set(lines(bench.score(honest, failing).err)[:-1]) == {f"xd-score: engine: {line}" for line in said}
    assert len(lines(bench.score("-q", failing).err)) == 1


def test_messages_as_json(bench):
    (path,) = bench.attempts("prints raises")
    ran = bench.score("-v", "--log-json", path)
    records = [json.loads(line) for line in lines(ran.err)]
    assert records[-1]["code"] == "engine-error"
    assert (records[-1]["status"], records[-1]["where"]) == (Status.BUG, path)


# -- signals


class Running:
    """xd-score at work on an engine that sleeps; `child` is the process that holds it."""

    def __init__(self, bench, root):
        self.place = bench.place
        (self.path,) = bench.attempts("sleeps")
        self.process = subprocess.Popen(
            [root / "tools" / "xd-score", "--side", "rollout", self.path], cwd=bench.place, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            # a test runner in the background may have handed on an ignored Ctrl-C
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            env={**os.environ, **bench.environment, "XD_PYTHON": sys.executable},
        )  # fmt: skip
        noted = bench.place / "pid"
        eventually(lambda: noted.exists() and noted.read_text())
        self.child = int(noted.read_text())


def eventually(holds):
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def gone(pid):
    """Whether a process has ended; one that nobody has reaped yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def running(bench, root):
    held = Running(bench, root)
    yield held
    held.process.kill()
    held.process.communicate()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_parent_that_is_ended_takes_its_child_along(running, bench, signum):
    running.process.send_signal(signum)
    out, err = running.process.communicate(timeout=PATIENCE_S)
    assert (running.process.returncode, out, err) == (128 + signum, "", "")
    assert gone(running.child)
    assert bench.files(running.path) == set()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_killed_parent_leaves_no_orphan(running):
    assert not gone(running.child)  # negative control
    running.process.kill()
    eventually(lambda: gone(running.child))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])  # the second it catches, and cleans up
def test_a_child_killed_from_outside_is_one_line_and_worth_trying_again(running, bench, signum):
    os.kill(running.child, signum)
    out, err = running.process.communicate(timeout=PATIENCE_S)
    assert (running.process.returncode, out, len(lines(err))) == (Status.RETRY, "", 1)
    assert f"was killed by {signum.name} while scoring it; nothing was published" in err
    assert bench.files(running.path) == set()


def test_a_closed_pipe_is_no_traceback(bench, root):
    paths = bench.materialize(*(bench.case(change=("batch.size", size)) for size in (1, 2)))
    process = subprocess.Popen(
        [root / "tools" / "xd-score", "--side", "rollout", *paths], cwd=bench.place, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, **bench.environment, "XD_PYTHON": sys.executable, "SCRIPTED_LOG": str(bench.place / "log")},
    )  # fmt: skip
    process.stdout.close()
    assert (process.wait(PATIENCE_S), process.stderr.read()) == (128 + signal.SIGPIPE, "")
    process.stderr.close()


# -- the parts


def interpreter(tmp_path, script):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return str(python)


def test_a_child_that_does_not_start_says_why(tmp_path):
    with pytest.raises(XdError) as caught:
        Child(interpreter(tmp_path, "echo no module named libxd >&2; exit 1"), "rollout", None)
    assert (caught.value.status, caught.value.code) == (Status.BUG, "no-scorer")
    assert "no module named libxd" in caught.value.line()
    with pytest.raises(XdError) as caught:  # ended from outside: nothing is known to be wrong with the installation
        Child(interpreter(tmp_path, "kill -9 $$"), "rollout", None)
    assert (caught.value.status, "SIGKILL" in caught.value.line()) == (Status.RETRY, True)
    with pytest.raises(XdError) as caught:
        Child(str(tmp_path / "absent"), "rollout", None)
    assert caught.value.status == Status.MISSING


def child_that(tmp_path, *acts):
    """A child that says it is ready on `fd`, then does as told."""
    python = tmp_path / "python"
    lines = (f"#!{sys.executable}", "import os, subprocess, sys, time",
             "fd = int(sys.argv[sys.argv.index('--fd') + 1])", "os.write(fd, b'{}\\n')", *acts)  # fmt: skip
    python.write_text("\n".join(lines) + "\n")
    python.chmod(0o755)
    return Child(str(python), "rollout", None)


def test_a_child_that_lets_go_of_the_pipe_is_given_up(tmp_path):
    child = child_that(tmp_path, "os.close(fd)", "time.sleep(120)")
    with pytest.raises(ChildDied) as caught:
        child.ask({"attempt": "x"})
    assert caught.value.how == "was killed by SIGTERM"


@pytest.mark.parametrize("pipe", ["pass_fds=[fd]", ""], ids=["holding the pipe", "without it"])
def test_a_rank_that_its_child_leaves_behind_is_ended(tmp_path, pipe):
    noted = tmp_path / "rank"
    child = child_that(
        tmp_path, f"rank = subprocess.Popen(['sleep', '120'], {pipe})",
        f"open({str(noted)!r}, 'w').write(str(rank.pid))", "sys.stdin.readline()", "os._exit(4)",
    )  # fmt: skip
    with pytest.raises(ChildDied) as caught:
        child.ask({"attempt": "x"})
    assert caught.value.how == "ended with status 4"
    eventually(lambda: gone(int(noted.read_text())))


@pytest.mark.parametrize(("code", "how"), [(-9, "was killed by SIGKILL"), (-11, "was killed by SIGSEGV"),
                                           (3, "ended with status 3"), (-63, "was killed by signal 63"),
                                           (143, "was killed by SIGTERM"), (128, "ended with status 128"),
                                           (255, "ended with status 255")])  # fmt: skip
def test_how_a_child_died(code, how):
    assert ChildDied(code).how == how


def test_what_engines_raise():
    out_of_memory = [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried …"),
                     type("OutOfMemoryError", (RuntimeError,), {})("CUDA")]  # fmt: skip
    assert {as_xd_error(error).status for error in out_of_memory} == {Status.RETRY}
    assert as_xd_error(RuntimeError("shapes differ")).status == Status.BUG
    known = XdError("no such file", status=Status.MISSING)
    assert as_xd_error(known) is known


def test_differences_are_named_by_pointer():
    expected = {"a": 1, "b": {"c/d": [1, 2], "gone": 0}, "same": {}}
    found = {"a": 1, "b": {"c/d": [1, 3], "new": 5}, "same": {}}
    assert differences(expected, found) == [
        ("/b/c~1d", [1, 2], [1, 3]), ("/b/gone", 0, None), ("/b/new", None, 5)
    ]  # fmt: skip
    assert differences(expected, expected) == []
