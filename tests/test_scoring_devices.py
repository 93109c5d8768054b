"""Engines on devices, as xd-score places them: their slots, their turn, and a pipe of two sides on one device.

No GPU is needed: an engine of the scripted runtime says that it computes on some, and sees what it is given.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest
from scoring_fixtures import Bench

from libxd.devices import Device
from libxd.errors import Status, XdError
from libxd.runtimes.ranks.launch import Launch
from libxd.scoring import supervisor
from libxd.scoring.process import Child
from libxd.scoring.supervisor import Supervisor
from libxd.slots import Line

PATIENCE_S = 90.0
PIPE_BYTES = 4096  # the least that the kernel gives


class Scorers:
    """xd-score processes on the devices of a host of their own; `log` says which engine saw what."""

    def __init__(self, bench, root, place):
        self.bench, self.root = bench, root
        self.log = bench.place / "log"
        self.variables = {"TMPDIR": str(place), "SCRIPTED_LOG": str(self.log), "SCRIPTED_WITNESS": str(place)}
        self.started = []

    def score(self, *arguments, side="rollout", **variables):
        return self.bench.score(*arguments, side=side, **{**self.variables, **variables})

    def start(self, *arguments, side="rollout", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, **variables):
        process = subprocess.Popen(
            [self.root / "tools" / "xd-score", "--side", side, *arguments], cwd=self.bench.place, text=True,
            stdin=stdin, stdout=stdout, stderr=subprocess.PIPE,
            env={**os.environ, **self.bench.environment, "XD_PYTHON": sys.executable, **self.variables, **variables},
        )  # fmt: skip
        self.started.append(process)
        return process

    def engines(self):
        return self.log.read_text().splitlines()


@pytest.fixture
def scorers(xd, tmp_path, root):
    place = tmp_path / "host"
    place.mkdir()
    (tmp_path / "bench").mkdir()
    os.mkfifo(tmp_path / "bench" / "gate")
    made = Scorers(Bench(type(xd)(tmp_path / "bench"), tmp_path / "bench"), root, place)
    yield made
    for process in made.started:
        with process:  # closes its pipes
            process.kill()


def line_of(stream):
    """The next line; a failing test does not wait for ever."""
    assert select.select([stream], [], [], PATIENCE_S)[0], "nothing is said"
    return stream.readline().rstrip("\n")


def done(process):
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out.splitlines(), err


def test_an_engine_sees_its_slots_alone_and_one_on_a_cpu_takes_none(scorers):
    two, one, none = scorers.bench.attempts("gpus:2", "gpus:1", "plain")
    ran = scorers.score("-v", two, one, none, XD_DEVICES="3,5,7", CUDA_VISIBLE_DEVICES="3,4,5,7")
    assert (ran.status, ran.out.splitlines()) == (0, [two, one, none])
    assert [line for line in scorers.engines() if "opens" in line] == [
        "rollout opens on 3,5", "rollout opens on 3", "rollout opens"]  # fmt: skip
    assert f"{two}: scored by engine 1, case 1 on devices 3, 5" in ran.err


def test_more_devices_than_there_are_is_a_refusal_and_the_others_go_on(scorers):
    four, one = scorers.bench.attempts("gpus:4", "gpus:1")
    ran = scorers.score(four, one, XD_DEVICES="0,0,1,1")
    assert (ran.status, ran.out.splitlines(), len(ran.err.splitlines())) == (Status.REFUSED, [one], 1)
    assert f"xd-score: {four}: its engine needs more devices than there are" in ran.err
    assert 'found ["0", "1"], expected 4' in ran.err
    assert scorers.bench.files(four) == set()


def test_a_bad_variable_is_said_once_before_anything_is_scored(scorers):
    paths = scorers.bench.attempts("gpus:1", "plain")
    ran = scorers.score(*paths, XD_DEVICES="0,,1")
    assert (ran.status, ran.out, len(ran.err.splitlines())) == (Status.INVALID, "", 1)
    assert ran.err.startswith("xd-score: $XD_DEVICES: names no device")


def test_which_device_it_was_is_no_evidence(scorers):
    """Two scorers of one attempt, each on its device, must leave the same bytes."""
    row = scorers.bench.case("gpus:1")
    left, right = scorers.bench.materialize(row, row)
    for path, device in ((left, "0"), (right, "1")):
        assert scorers.score(path, XD_DEVICES=device).status == 0
        assert scorers.engines()[-1] == f"rollout closes on {device}"
    for name in scorers.bench.files(left):
        assert (scorers.bench.place / left / name).read_bytes() == (scorers.bench.place / right / name).read_bytes()


def test_who_waits_says_for_what_and_is_served_when_the_holder_is_killed(scorers):
    first, second = scorers.bench.attempts("gpus:1 waits-at-the-gate", "gpus:1")
    holder = scorers.start(first, XD_DEVICES="0")
    with open(scorers.bench.place / "gate", "wb"):  # its engine is there
        waiting = scorers.start(second, XD_DEVICES="0")
        assert line_of(waiting.stderr) == (
            f"xd-score: waits for device 0 (process {holder.pid} holds it): reading all attempts first")  # fmt: skip
        holder.send_signal(signal.SIGKILL)
        assert done(waiting) == (0, [second], "")
    assert scorers.engines() == [f"rollout {act} on 0" for act in ("opens", "waits", "opens", "closes")]


def test_a_device_named_twice_serves_two_engines_at_once(scorers):
    first, second = scorers.bench.attempts("gpus:1 waits-at-the-gate", "gpus:1")
    holder = scorers.start(first, XD_DEVICES="0,0", SCRIPTED_WITNESS="")
    with open(scorers.bench.place / "gate", "wb"):
        assert scorers.score(second, XD_DEVICES="0,0", SCRIPTED_WITNESS="").out == f"{second}\n"
    assert done(holder)[0] == 0


def test_the_witness_sees_two_engines_on_one_device(scorers):
    """Negative control of the seats that the other tests' engines take."""
    first, second = scorers.bench.attempts("gpus:1 waits-at-the-gate", "gpus:1")
    holder = scorers.start(first, XD_DEVICES="0,0")
    with open(scorers.bench.place / "gate", "wb"):
        assert "two engines on device 0" in scorers.score(second, XD_DEVICES="0,0").err
    assert done(holder)[0] == 0


def pipe():
    """Both ends of one that holds little."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reading, writing


def both_sides(scorers, stdin, **variables):
    """`xd-score --side rollout | xd-score --side training`."""
    reading, writing = pipe()
    rollout = scorers.start(side="rollout", stdin=stdin, stdout=writing, **variables)
    training = scorers.start(side="training", stdin=reading, **variables)
    for end in (reading, writing):
        os.close(end)
    return rollout, training


def test_two_sides_on_one_device_take_turns_also_with_more_rows_than_the_pipe_holds(scorers):
    row = scorers.bench.case("gpus:1")
    paths = [str(scorers.bench.place / path) for path in scorers.bench.materialize(*[row] * 60)]
    assert sum(map(len, paths)) > 1.5 * PIPE_BYTES
    (scorers.bench.place / "paths").write_text("".join(f"{path}\n" for path in paths))
    with open(scorers.bench.place / "paths") as stdin:
        rollout, training = both_sides(scorers, stdin, XD_DEVICES="0")
    status, out, err = done(training)
    assert (rollout.wait(PATIENCE_S), status, out) == (0, 0, paths)
    assert err == f"xd-score: waits for device 0 (process {rollout.pid} holds it): reading all attempts first\n"
    assert scorers.engines() == [f"{side} {act} on 0" for side in ("rollout", "training")
                                 for act in ("opens", "closes")]  # fmt: skip


def test_an_engine_that_waits_for_input_gives_its_device_to_who_writes_that_input(scorers):
    """The training side holds a device and waits for the rollout side, which now needs both."""
    one, two = scorers.bench.attempts("gpus:1", "gpus:2")
    rollout, training = both_sides(scorers, subprocess.PIPE, XD_DEVICES="0,1")
    rollout.stdin.write(one + "\n")
    rollout.stdin.flush()
    assert line_of(training.stdout) == one
    assert scorers.engines() == ["rollout opens on 0", "training opens on 1"]
    rollout.stdin.write(two + "\n")
    rollout.stdin.close()
    assert line_of(training.stderr) == (
        "xd-score: waits for the next attempt, and gives device 1 back that others wait for")  # fmt: skip
    status, out, _ = done(training)
    assert (rollout.wait(PATIENCE_S), status, out) == (0, 0, [two])
    assert scorers.engines()[-4:] == [f"{side} {act} on 0,1" for side in ("rollout", "training")
                                      for act in ("opens", "closes")]  # fmt: skip


def test_a_child_holds_its_slots_for_as_long_as_it_lives(tmp_path, monkeypatch):
    """One that is on its way out still has its memory on the device."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport os, sys\nfd = int(sys.argv[sys.argv.index('--fd') + 1])\n"
                      "os.write(fd, b'{}\\n')\nsys.stdin.read()\n")  # fmt: skip
    python.chmod(0o755)
    line = Line([Device("0", "key-0")], 1)
    with line:
        held = line.take()
    child = Child(str(python), "rollout", None, held)
    held.release()  # as the death of its parent would
    with line:
        assert line.take() is None
    child.close()
    with line:
        assert line.take() is not None


def test_an_engine_that_nobody_waits_for_is_kept_while_it_waits_for_input(monkeypatch):
    monkeypatch.setattr(supervisor, "IDLE_S", 0.01)
    asked, released = [], []

    class Slots:
        def wanted(self):
            asked.append(True)
            return len(asked) == 3

        def release(self):
            released.append(len(asked))

    scoring = Supervisor("rollout", None, say=lambda _: None)
    scoring.slots = Slots()

    def lines():
        while not released:
            signal.pause()
        yield "a"
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        yield "b"

    assert list(scoring.attending(lines())) == ["a", "b"]
    assert released == [3]


def task(**engine):
    return SimpleNamespace(plan={"engine": engine})


def test_under_a_launcher_each_rank_has_its_device_already(monkeypatch):
    launched = Supervisor("rollout", None, say=print, launched=Launch(0, 2, 0))
    monkeypatch.delenv("XD_DEVICES", raising=False)
    assert launched._slots_for(task(device="cuda", devices=2)) == 0
    monkeypatch.setenv("XD_DEVICES", "0,1")
    assert launched._slots_for(task(device="cpu")) == 0
    with pytest.raises(XdError, match="under a launcher"):
        launched._slots_for(task(device="cuda", devices=2))
    assert Supervisor("rollout", None, say=print)._slots_for(task(device="cuda", devices=2)) == 2
