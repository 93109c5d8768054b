"""Files appear whole under their final name or not at all, and are never replaced.

A temporary name in the same directory, written, flushed and fsynced, is linked to the final name; link(2) fails when
that exists, so of two writers the first wins and the second learns whether it would have written the same. What stands
there already is compared as it would be written, and nothing is: so an archive that is only read can be judged again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from libxd import canon, schema
from libxd.errors import Status, XdError, is_scarce, of_exception

TEMPORARY_PREFIX = ".tmp-"
_BLOCK = 1 << 20


def publish(path: str | os.PathLike[str], data: bytes | Iterable[bytes | memoryview]) -> bool:
    """Write `data` to `path`. True: written. False: the same bytes stood there already.

    XdError 73 when other bytes stand there (they are kept), 73 too when the directory cannot be written or is full;
    66 when what stands there cannot be read; 75 for want of descriptors or memory.
    """
    path = Path(path)
    chunks = (data,) if isinstance(data, bytes | bytearray) else data
    with _system_errors(path):
        if os.path.lexists(path):
            if _holds(path, chunks):
                sync_directory(path.parent)  # whoever wrote it may have been ended before that
                return False
            raise _differs(path)
        with temporary(path) as file:
            for chunk in chunks:
                file.write(chunk)
            return commit(file, path)


def publish_json(path: str | os.PathLike[str], schema_name: str, value: Any) -> bool:
    """`publish` of a JSON value's canonical bytes and a newline, checked against its schema first."""
    schema.validate(schema_name, value, str(path))
    try:
        data = canon.dumps(value) + b"\n"
    except XdError as error:
        error.where = error.where or str(path)
        raise
    return publish(path, data)


def require_place(path: str | os.PathLike[str]) -> None:
    """XdError 73 for a place that cannot be written: before minutes of work, not after them."""
    if os.path.isdir(path):
        raise cannot_write(path, IsADirectoryError(errno.EISDIR, "is a directory"))
    parent = Path(path).parent
    if not os.access(parent, os.W_OK | os.X_OK):
        error = OSError(0, "permission denied" if os.path.isdir(parent) else "no such directory")
        raise cannot_write(path, error)


@contextlib.contextmanager
def temporary(path: Path) -> Iterator[BinaryIO]:
    """An open file under a temporary name beside `path`; the name is gone afterwards, whatever happened."""
    name = path.parent / f"{TEMPORARY_PREFIX}{path.name}-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        with open(name, "x+b") as file:  # the umask decides the mode
            yield file
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def commit(file: BinaryIO, path: Path) -> bool:
    """Give an open temporary file its final name. True: done. False: identical content was there. XdError 73: other."""
    file.flush()
    os.fsync(file.fileno())
    try:
        os.link(file.name, path, follow_symlinks=False)
    except FileExistsError:
        file.seek(0)
        if _holds(path, iter(lambda: file.read(_BLOCK), b"")):
            sync_directory(path.parent)
            return False
        raise _differs(path) from None
    sync_directory(path.parent)
    return True


def point(link: Path, target: Path) -> None:
    """Make `link` a relative symlink to `target`, in one step. XdError 73 when something else than a link is there."""
    if os.path.lexists(link) and not link.is_symlink():
        raise XdError(
            "is a file of its own, not a link, and was kept",
            status=Status.CONFLICT,
            code="output-differs",
            where=str(link),
            hint="move it away",
        )
    leads = os.path.relpath(target, link.parent)
    name = link.parent / f"{TEMPORARY_PREFIX}{link.name}-{os.getpid()}-{os.urandom(4).hex()}"
    with _system_errors(link):
        if link.is_symlink() and os.readlink(link) == leads:
            sync_directory(link.parent)
            return
        try:
            os.symlink(leads, name)
            os.replace(name, link)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        sync_directory(link.parent)


def directory(path: Path) -> None:
    """`mkdir -p`, durable, and whoever made them: each is synced in its parent before anything is made in it, so that
    of those that are there only the last may have been left unsynced.

    XdError 73 when one cannot be made, 75 for want of descriptors or memory.
    """
    places = [path, *path.parents]
    with _system_errors(path):
        there = next(number for number, place in enumerate(places) if os.path.isdir(place))
        with contextlib.suppress(PermissionError):  # a parent that may not be read
            sync_directory(places[there].parent)
        for place in reversed(places[:there]):
            place.mkdir(exist_ok=True)
            sync_directory(place.parent)


def settle(path: Path) -> None:
    """Make durable what stands in a directory, whoever wrote it there. XdError 73 or 75 where that fails."""
    with _system_errors(path):
        sync_directory(path)


def sync_directory(path: Path) -> None:
    """Make a directory's entries durable, as far as its file system knows of that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EROFS):  # an archive that is only read, some network file systems
            raise
    finally:
        os.close(descriptor)


def _holds(path: Path, chunks: Iterable[bytes | memoryview]) -> bool:
    """Whether the regular file at `path` (no symlink is followed) holds just these bytes. XdError: unreadable."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            for chunk in chunks:
                for start in range(0, len(block := memoryview(chunk).cast("B")), _BLOCK):
                    part = block[start : start + _BLOCK]
                    if file.read(len(part)) != part:
                        return False
            return not file.read(1)
    except OSError as error:
        raise of_exception(error, str(path)) from error


def _differs(path: Path) -> XdError:
    return XdError(
        "the output exists with other content and was kept",
        status=Status.CONFLICT,
        code="output-differs",
        where=str(path),
        hint="two runs that should agree did not; compare them, or take a new attempt",
    )


@contextlib.contextmanager
def _system_errors(path: Path) -> Iterator[None]:
    """A full, read-only or missing place, said in one line."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: str | os.PathLike[str], error: OSError) -> XdError:
    """The XdError for a failed write; nothing half written stays behind. 73 (sysexits' EX_CANTCREAT), or 75 where it
    was for want of descriptors or memory."""
    scarce = is_scarce(error)
    return XdError(
        f"cannot be written: {error.strerror or error}",
        status=Status.RETRY if scarce else Status.CONFLICT,
        code="cannot-write",
        where=str(path),
        hint=("" if scarce else "make the place writable and ") + "run the same command again",
    )
