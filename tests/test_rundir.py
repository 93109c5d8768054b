"""Names under a run directory: what is accepted, what is taken, and by whom."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from libxd.errors import Status, XdError
from libxd.rundir import Attempt, RunDirectory

CASE = "c-0123456789abcdef"


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/abs", ".hidden", "a" * 101, "a\n", "a b", "ü", "-x"])
def test_bad_experiment_ids(tmp_path, name):
    with pytest.raises(XdError) as caught:
        RunDirectory(tmp_path, name)
    assert caught.value.code == "bad-id"


@pytest.mark.parametrize("name", ["../../x", "c-0123", "c-0123456789ABCDEF", "c-0123456789abcdef/..", CASE + "\n"])
def test_bad_case_ids(tmp_path, name):
    with pytest.raises(XdError) as caught:
        RunDirectory(tmp_path, "x").new_attempt(name)
    assert caught.value.code == "bad-id"
    assert list(tmp_path.iterdir()) == []


def test_attempts_count_up_and_are_listed_newest_first(tmp_path):
    run = RunDirectory(tmp_path, "x")
    made = [run.new_attempt(CASE).attempt_id for _ in range(11)]
    assert made == [f"a{n:04d}" for n in range(1, 12)]
    (run.case(CASE) / "a0099").write_text("a file bears the name")
    (run.case(CASE) / "notes").mkdir()
    (run.case(CASE) / "a0100").symlink_to(run.case(CASE) / "a0001")
    assert [a.attempt_id for a in run.attempts(CASE)] == made[::-1]
    assert run.new_attempt(CASE).attempt_id == "a0012"


TAKE = """
import sys
from libxd.rundir import RunDirectory
for _ in range(25):
    print(RunDirectory(sys.argv[1], "x").new_attempt(sys.argv[2]).attempt_id)
"""


def test_no_two_processes_share_an_attempt(tmp_path):
    processes = [
        subprocess.Popen([sys.executable, "-P", "-c", TAKE, tmp_path, CASE], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    taken = [name for process in processes for name in process.communicate(timeout=60)[0].split()]
    assert sorted(taken) == [f"a{n:04d}" for n in range(1, 101)]


def test_opening_refuses_what_is_no_attempt(tmp_path):
    attempt = RunDirectory(tmp_path, "x").new_attempt(CASE)
    link = tmp_path / CASE / "a0001"
    link.parent.mkdir()
    link.symlink_to(attempt.path)
    (tmp_path / "c-zz" / "a0001").mkdir(parents=True)
    (attempt.path.parent / "a0009").write_text("")
    for path, code in (
        (attempt.path.parent / "a0009", "bad-attempt"),
        (tmp_path / "nowhere", "missing"),
        (attempt.path.parent, "bad-id"),
        (attempt.path / "..", "bad-id"),
        (tmp_path / "c-zz" / "a0001", "bad-id"),
        (link, "symlink"),
        (attempt.path.parent / "a0002", "missing"),
    ):
        with pytest.raises(XdError) as caught:
            Attempt.open(path)
        assert caught.value.code == code
    assert Attempt.open(attempt.path).case_id == CASE


def test_a_read_only_place_is_one_line(tmp_path, monkeypatch):
    def refuse(*_arguments, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(XdError) as caught:
        RunDirectory(tmp_path, "x").new_attempt(CASE)
    assert (caught.value.status, caught.value.code) == (Status.CONFLICT, "cannot-write")


def test_a_symlink_for_a_file_is_refused(tmp_path):
    attempt = RunDirectory(tmp_path, "x").new_attempt(CASE)
    (tmp_path / "other.json").write_text("{}")
    attempt.file("requested.json").symlink_to(tmp_path / "other.json")
    with pytest.raises(XdError) as caught:
        attempt.requested()
    assert caught.value.code == "symlink"


def test_what_the_system_refuses_to_look_at_is_66(tmp_path):
    with pytest.raises(XdError) as caught:
        Attempt.open(tmp_path / ("n" * 300) / "c-0123456789abcdef" / "a0001")
    assert caught.value.status == Status.MISSING


def test_an_attempt_that_cannot_be_entered_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    attempt = RunDirectory(tmp_path, "e").new_attempt("c-" + "0" * 16)
    assert not attempt.has("requested.json")

    def lstat(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("libxd.rundir.os.lstat", lstat)
    with pytest.raises(XdError, match="Permission denied") as caught:
        attempt.has("requested.json")
    assert caught.value.status == Status.MISSING


def test_a_case_that_is_a_symlink_is_neither_written_nor_read_through(tmp_path):
    run, case = RunDirectory(tmp_path, "e"), "c-" + "0" * 16
    run.case(case).parent.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    run.case(case).symlink_to(tmp_path / "elsewhere")
    for work in (run.new_attempt, lambda name: list(run.attempts(name))):
        with pytest.raises(XdError, match="no symlink") as caught:
            work(case)
        assert caught.value.status == Status.INVALID
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_path_that_no_line_can_hold_is_no_attempt(tmp_path):
    with pytest.raises(XdError, match="no line"):
        Attempt.open(f"{tmp_path}/a\nb/c-{'0' * 16}/a0001")
