"""The short forms of dev/torture/crash.py and power.py: a sample of their points, and what they break on purpose."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fault_fixtures import Operation
from power_fixtures import Disk, printed_at

ROOT = Path(__file__).resolve().parent.parent

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="the fault injector is a library of C for Linux"
)


def short_form(program: str) -> str:
    command = [sys.executable, "-P", ROOT / "dev" / "torture" / program, "--short"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@needs_compiler
def test_a_sample_of_crashes_and_refusals_loses_nothing():
    table = short_form("crash.py")
    assert len(re.findall(r"^killed: .* [1-9]\d* +\d+ +[1-9]", table, re.M)) >= 5
    assert len(re.findall(r"^refused: .* [1-9]\d* +\d+ +[1-9]", table, re.M)) >= 3
    assert len(re.findall("^control: .* found$", table, re.M)) == 3
    assert table.endswith(" 0 did not hold\n")


@needs_compiler
def test_a_sample_of_power_losses_loses_nothing():
    table = short_form("power.py")
    assert len(re.findall(r" yes$", table, re.M)) == 13
    assert len(re.findall("^control: .* found$", table, re.M)) == 3


# -- the file system that keeps only what was synced

TOP = "/root"


def after(*operations: tuple[str, ...]) -> tuple[Disk, list[str]]:
    """An empty disk after operations (name, path[, other path]), and what they did wrong."""
    disk, found = Disk(TOP, []), []
    for number, (name, path, *other) in enumerate(operations, 1):
        flaw = disk.do(Operation(number, name, f"{TOP}{path}", f"{TOP}{other[0]}" if other else "", 0))
        found += [flaw] if flaw else []
    return disk, found


WRITTEN = (("create", "/.tmp-x"), ("write", "/.tmp-x"))
NAMED = ("link", "/.tmp-x", "/x")


def test_what_is_synced_before_its_name_and_named_before_its_directory_is_synced_lasts():
    disk, flaws = after(*WRITTEN, ("fsync", "/.tmp-x"), NAMED, ("fsync", ""), ("unlink", "/.tmp-x"))
    assert (flaws, disk.not_lasting()) == ([], [])
    assert set(disk.top.lasting()) == {"x", ".tmp-x"}  # that it was removed was not synced


@pytest.mark.parametrize(
    "operations",
    [(*WRITTEN, NAMED, ("fsync", "/x"), ("fsync", "")),
     (*WRITTEN, ("fsync", "/.tmp-x"), ("write", "/.tmp-x"), NAMED, ("fsync", ""))],
)  # fmt: skip
def test_a_name_before_its_bytes_are_synced_is_found(operations):
    assert after(*operations)[1] == ["x gets its name before its bytes are synced"]


def test_a_name_that_is_not_synced_is_found():
    disk, _ = after(*WRITTEN, ("fsync", "/.tmp-x"), ("fsync", ""), NAMED)
    assert disk.not_lasting() == ["x"]
    assert set(disk.top.lasting()) == {".tmp-x"}


def test_a_directory_that_is_not_synced_takes_what_is_in_it():
    made = (("mkdir", "/d"), ("create", "/d/.tmp-x"), ("fsync", "/d/.tmp-x"), ("link", "/d/.tmp-x", "/d/x"))
    disk, _ = after(*made, ("fsync", "/d"))
    assert disk.not_lasting("d/x") == ["d", "d/x"] and disk.top.lasting() == {}
    disk, _ = after(*made, ("fsync", "/d"), ("fsync", ""))
    assert disk.not_lasting("d/x") == []


def test_lines_are_told_when_their_end_is_written():
    write = Operation(1, "write", "<stdout>", "", 3)
    assert printed_at(write, b"ab\ncd\n", 0) == (["ab"], 3)
    assert printed_at(write, b"abc\n", 0) == ([], 3)
    assert printed_at(Operation(2, "write", "<stdout>", "", 1), b"abc\n", 3) == (["abc"], 4)
