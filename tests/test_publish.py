"""A file appears whole or not at all, and is never replaced."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading

import pytest

from libxd import publish
from libxd.errors import Status, XdError


def test_written_then_identical_then_different(tmp_path):
    path = tmp_path / "x.json"
    assert publish.publish(path, b"one") is True
    inode = path.stat().st_ino
    assert publish.publish(path, [b"o", b"ne"]) is False
    with pytest.raises(XdError) as caught:
        publish.publish(path, b"two")
    assert (caught.value.status, caught.value.code) == (Status.CONFLICT, "output-differs")
    assert (path.read_bytes(), path.stat().st_ino) == (b"one", inode)
    assert os.listdir(tmp_path) == ["x.json"]


def test_same_length_and_prefix_do_not_pass_for_identical(tmp_path):
    path = tmp_path / "x"
    publish.publish(path, b"abc")
    for other in (b"abd", b"ab", b"abcd", b""):
        with pytest.raises(XdError):
            publish.publish(path, other)


@pytest.mark.parametrize("data", [b"one", [b"o", memoryview(b"ne")], [b"", b"one"]])
def test_what_stands_there_is_only_read(tmp_path, monkeypatch, data):
    """As in an archive where nothing can be written: an identical output passes, another one is told."""
    path = tmp_path / "x"
    publish.publish(path, b"one")
    monkeypatch.setattr(publish, "temporary", lambda path: pytest.fail("opened a file to write"))
    assert publish.publish(path, data) is False
    with pytest.raises(XdError, match="other content"):
        publish.publish(path, [b"on", b"f"])


@pytest.mark.parametrize("late", [b"two", b"one"])
def test_a_file_that_comes_up_meanwhile_is_kept(tmp_path, late):
    """Another writer was faster: nothing stood there when this one began."""
    path = tmp_path / "x"

    def chunks():
        yield b"t"
        path.write_bytes(late)
        yield b"wo"

    if late == b"two":
        assert publish.publish(path, chunks()) is False
    else:
        with pytest.raises(XdError, match="other content"):
            publish.publish(path, chunks())
    assert path.read_bytes() == late
    assert os.listdir(tmp_path) == ["x"]


def test_blocks_are_compared_across_the_chunks_that_they_come_in(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "_BLOCK", 4)
    path = tmp_path / "x"
    publish.publish(path, bytes(range(23)))
    assert publish.publish(path, [bytes(range(9)), bytes(range(9, 23))]) is False
    for other in (bytes(22), bytes(range(22)), bytes(range(24))):
        with pytest.raises(XdError):
            publish.publish(path, [other[:9], other[9:]])


def test_a_folder_under_the_name_is_told(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(XdError) as caught:
        publish.publish(tmp_path / "x", b"")
    assert caught.value.code == "output-differs"


def test_nothing_stays_behind_when_the_data_fails(tmp_path):
    def chunks():
        yield b"half"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        publish.publish(tmp_path / "x", chunks())
    assert os.listdir(tmp_path) == []


def test_the_mode_is_the_umasks(tmp_path):
    code = f"import os; os.umask(0o027); from libxd import publish; publish.publish({str(tmp_path / 'x')!r}, b'1')"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_a_symlink_is_neither_followed_nor_replaced(tmp_path):
    target = tmp_path / "elsewhere"
    target.write_bytes(b"same")
    (tmp_path / "x").symlink_to(target)
    with pytest.raises(XdError):
        publish.publish(tmp_path / "x", b"same")
    assert target.read_bytes() == b"same" and (tmp_path / "x").is_symlink()


def test_a_missing_directory_is_one_line(tmp_path):
    with pytest.raises(XdError) as caught:
        publish.publish(tmp_path / "none" / "x", b"1")
    assert caught.value.code == "cannot-write"


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    """RLIMIT_FSIZE makes write fail as a full disk does (EFBIG), in a process of its own."""
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "from libxd import publish\n"
        "from libxd.errors import XdError\n"
        "try:\n"
        f"    publish.publish({str(tmp_path / 'x')!r}, b'0' * 5000)\n"
        "except XdError as error:\n"
        "    print(int(error.status), error.code)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "73 cannot-write\n"
    assert os.listdir(tmp_path) == []


def test_of_many_writers_one_wins_and_none_is_lost(tmp_path):
    path = tmp_path / "x"
    results: list[str] = []

    def write(number: int) -> None:
        try:
            results.append(f"{publish.publish(path, b'%d' % (number % 2))}")
        except XdError as error:
            results.append(error.code)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count("True") == 1
    assert results.count("output-differs") == 8
    assert results.count("False") == 7


def test_what_is_not_canonical_is_said_of_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(publish.schema, "validate", lambda *_: None)  # of free JSON, such as an engine's evidence
    with pytest.raises(XdError, match="not canonical") as caught:
        publish.publish_json(tmp_path / "x.json", "effect", 2**53)
    assert caught.value.where.endswith("x.json")


# -- what must last before it is told


@pytest.fixture
def done(monkeypatch):
    """What is synced and linked, in order: ("fsync", the path), ("link", the name)."""
    calls = []
    link = os.link

    def linked(source, target, **options):
        link(source, target, **options)
        calls.append(("link", os.path.basename(target)))

    def synced(descriptor):
        calls.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).split("-")[0]))

    monkeypatch.setattr(publish.os, "link", linked)
    monkeypatch.setattr(publish.os, "fsync", synced)
    return calls


def test_bytes_are_synced_before_the_name_and_the_name_before_it_is_told(tmp_path, done):
    publish.publish(tmp_path / "x", b"1")
    assert done == [("fsync", ".tmp"), ("link", "x"), ("fsync", tmp_path.name.split("-")[0])]


def test_what_another_writer_has_named_is_synced_before_it_is_told(tmp_path, done):
    """It may have been ended, or not have come to it."""
    (tmp_path / "x").write_bytes(b"1")
    assert publish.publish(tmp_path / "x", b"1") is False
    assert done == [("fsync", tmp_path.name.split("-")[0])]


def test_a_link_is_synced_before_it_is_told(tmp_path, done):
    for _ in range(2):
        publish.point(tmp_path / "plan", tmp_path / "plans")
    assert done == [("fsync", tmp_path.name.split("-")[0])] * 2


def test_directories_are_synced_before_anything_is_made_in_them(tmp_path, monkeypatch):
    """And the last of those that are there: whoever made it may have been ended before that."""
    done = []
    mkdir = os.mkdir
    monkeypatch.setattr(os, "mkdir", lambda path, *mode: (mkdir(path, *mode), done.append(("mkdir", path.name))))
    monkeypatch.setattr(publish, "sync_directory", lambda path: done.append(("sync", path.name)))
    (tmp_path / "runs").mkdir()
    done.clear()
    publish.directory(tmp_path / "runs" / "s0" / "cases")
    assert done == [("sync", tmp_path.name), ("mkdir", "s0"), ("sync", "runs"), ("mkdir", "cases"), ("sync", "s0")]
    done.clear()
    publish.directory(tmp_path / "runs" / "s0" / "cases")
    assert done == [("sync", "s0")]


def test_a_parent_that_may_not_be_read_is_no_matter(tmp_path, monkeypatch):
    synced = publish.sync_directory

    def refuse(path):
        if path == tmp_path.parent:
            raise PermissionError(errno.EACCES, "Permission denied")
        synced(path)

    monkeypatch.setattr(publish, "sync_directory", refuse)
    publish.directory(tmp_path / "runs")
    assert (tmp_path / "runs").is_dir()


@pytest.mark.parametrize(("code", "passes"), [(errno.EINVAL, True), (errno.EROFS, True), (errno.EIO, False)])
def test_a_file_system_that_syncs_no_directories_is_taken_as_it_is(tmp_path, monkeypatch, code, passes):
    (tmp_path / "x").write_bytes(b"1")

    def refuse(_descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(publish.os, "fsync", refuse)
    if passes:
        assert publish.publish(tmp_path / "x", b"1") is False
    else:
        with pytest.raises(XdError, match="cannot be written: Input/output error"):
            publish.publish(tmp_path / "x", b"1")


@pytest.mark.parametrize(("code", "status"), [(errno.EIO, Status.MISSING), (errno.EMFILE, Status.RETRY)])
def test_what_cannot_be_read_is_not_said_to_be_other_content(tmp_path, monkeypatch, code, status):
    (tmp_path / "x").write_bytes(b"1")

    def refuse(*_arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(publish.os, "open", refuse)
    with pytest.raises(XdError) as caught:
        publish.publish(tmp_path / "x", b"1")
    assert (caught.value.status, caught.value.code) == (status, "unreadable")


@pytest.mark.parametrize(
    ("code", "status"),
    [(errno.ENOSPC, Status.CONFLICT), (errno.EDQUOT, Status.CONFLICT), (errno.EROFS, Status.CONFLICT),
     (errno.EMFILE, Status.RETRY), (errno.ENFILE, Status.RETRY), (errno.ENOMEM, Status.RETRY)],
)  # fmt: skip
def test_what_will_pass_by_itself_is_told_from_what_will_not(tmp_path, monkeypatch, code, status):
    def refuse(*_arguments, **_options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(publish.os, "link", refuse)
    with pytest.raises(XdError) as caught:
        publish.publish(tmp_path / "x", b"1")
    assert (caught.value.status, caught.value.code) == (status, "cannot-write")
    assert os.listdir(tmp_path) == []
