"""Room for another engine: the decision, the measuring, and the order of things in a pipe."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest
from scoring_fixtures import Bench

from libxd.scoring import room
from libxd.scoring.intake import Intake
from libxd.scoring.room import has_room

PATIENCE_S = 60.0


@pytest.mark.parametrize(
    ("needed", "free", "releasing", "answer"),
    [(10, 10, 0, True), (11, 10, 0, False), (11, 10, 1, True), (12, 10, 1, False), (10**18, None, 0, True)],
)
def test_whether_there_is_room(needed, free, releasing, answer):
    assert has_room(needed, free, releasing) is answer


def test_lines_are_handed_on_as_they_come():
    taken = []

    def coming():
        for name in "abc":
            taken.append(name)
            yield name

    lines = iter(Intake(coming()))
    assert next(lines) == "a"
    assert taken == ["a"]


def test_reading_to_the_end_loses_nothing_and_keeps_the_order():
    intake = Intake(iter("abc"))
    seen = []
    for line in intake:
        if not seen:
            intake.read_to_end()
        seen.append(line)
    assert seen == ["a", "b", "c"]


def test_free_memory_is_the_least_of_machine_and_control_group(tmp_path, monkeypatch):
    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    monkeypatch.setattr(room, "MEMINFO", meminfo)
    monkeypatch.setattr(room, "CGROUP", group)
    assert room.free_bytes("cpu", sys.executable) is None
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    2000 kB\n")
    assert room.free_bytes("cpu", sys.executable) == 2000 * 1024
    group.mkdir()
    (group / "memory.current").write_text("900\n")
    (group / "memory.stat").write_text("anon 700\ninactive_file 200\n")
    (group / "memory.max").write_text("max\n")
    assert room.free_bytes("cpu", sys.executable) == 2000 * 1024
    (group / "memory.max").write_text("1000\n")
    assert room.free_bytes("cpu", sys.executable) == 300


def test_free_memory_of_a_device_that_is_not_there_is_unknown(tmp_path):
    nothing = tmp_path / "python"
    nothing.write_text("#!/bin/sh\nexit 1\n")
    nothing.chmod(0o755)
    assert room.free_bytes("cuda", str(nothing)) is None
    nothing.write_text("#!/bin/sh\necho 12345\n")
    assert room.free_bytes("cuda", str(nothing)) == 12345


@pytest.fixture
def bench(xd, tmp_path):
    return Bench(xd, tmp_path)


@pytest.fixture
def scorer(bench, root):
    """xd-score with its stdin in our hands; `log` says which engines were opened."""
    log = bench.place / "log"
    process = subprocess.Popen(
        [root / "tools" / "xd-score", "--side", "training"], cwd=bench.place, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, **bench.environment, "XD_PYTHON": sys.executable, "SCRIPTED_LOG": str(log)},
    )  # fmt: skip
    yield process, log
    process.kill()
    process.communicate()


def put(process, path):
    process.stdin.write(path + "\n")
    process.stdin.flush()


def speaks_first(process):
    """Which of its two streams has something to read; a failing test does not wait for ever."""
    ready, _, _ = select.select([process.stdout, process.stderr], [], [], PATIENCE_S)
    return ready[0] if len(ready) == 1 else ready


def test_an_engine_that_finds_no_room_waits_for_the_end_of_its_input(bench, scorer):
    process, log = scorer
    first, second = bench.materialize(bench.case("huge"), bench.case("huge", ("batch.size", 2)))
    put(process, first)
    assert speaks_first(process) is process.stderr
    assert "no room" in process.stderr.readline()
    put(process, second)
    assert not log.exists()
    out, err = process.communicate()
    assert (process.returncode, out.splitlines(), err) == (0, [first, second], "")
    assert log.read_text().splitlines() == ["training opens", "training closes"]


def test_an_engine_that_has_room_does_not_wait(bench, scorer):
    process, log = scorer
    first, second = bench.materialize(bench.case(), bench.case(change=("batch.size", 2)))
    put(process, first)
    assert speaks_first(process) is process.stdout
    assert process.stdout.readline().strip() == first
    assert log.read_text().splitlines() == ["training opens"]
    put(process, second)
    out, err = process.communicate()
    assert (process.returncode, out.splitlines(), err) == (0, [second], "")
