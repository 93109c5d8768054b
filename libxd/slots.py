"""Slots on devices: a kernel lock each, first come first served, with no daemon and nobody to clean up after.

A slot is a file in a directory of this user on this host, and is held by whoever has its flock. The kernel gives it
back when the last process that holds the open file is gone, however that ended: the scorer's child inherits it, so a
slot is free when the engine is. Who waits holds no slot but a place in line, the flock of a numbered file that says
which devices it wants. Only what no earlier one in line wants may be taken, and all of it at once: a request for four
devices is not overtaken for ever by requests for one, nor do two of them hold half of what each needs.

Processes that share devices must share TMPDIR. XDG_RUNTIME_DIR is not it: it goes with its owner's last login, under
the eyes of what still runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from libxd import publish
from libxd.devices import VISIBLE_VARIABLE, Device
from libxd.errors import Status, XdError

_POLL_S = 0.1
_PLACE, _SLOT = "place-", "slot-"


@dataclass
class Held:
    """Slots on as many different devices, until `release`; files: the descriptors that hold them."""

    devices: tuple[Device, ...]
    files: tuple[int, ...]

    @property
    def variables(self) -> dict[str, str]:
        """What makes an engine see these devices, and no other."""
        return {VISIBLE_VARIABLE: ",".join(device.name for device in self.devices)}

    def __str__(self) -> str:
        return ("device " if len(self.devices) == 1 else "devices ") + ", ".join(d.name for d in self.devices)

    def wanted(self) -> bool:
        """Whether somebody waits for one of these devices."""
        with _alone() as directory:
            return any(device.key in waiting.wants for waiting in _line(directory) for device in self.devices)

    def release(self) -> None:
        """Let go; a slot is free when no other process holds it, either."""
        for file in self.files:
            os.close(file)
        self.files = ()


#: descriptors of slots that this process was given by who started it
_kept: tuple[int, ...] = ()


def keep(files: Sequence[int]) -> None:
    """Hold these for whoever took them; processes that compute on their devices are to be given `kept`, too."""
    global _kept
    _kept = tuple(files)


def kept() -> tuple[int, ...]:
    """What `keep` was told."""
    return _kept


class Line:
    """A place in line for slots on `count` different ones of `devices`, of which one that occurs twice has two slots.

    As a context: the place is given up at the end.
    """

    def __init__(self, devices: Sequence[Device], count: int) -> None:
        """XdError 69 when there are fewer devices, so that nobody waits for what never comes."""
        self._slots = Counter(devices)
        self._count = count
        self._before: _Place | None = None
        #: why nothing could be taken, in words
        self.obstacle = ""
        if count > len(self._slots):
            raise XdError("its engine needs more devices than there are for engines here", status=Status.REFUSED,
                          code="too-few-devices", found=[device.name for device in self._slots], expected=count,
                          hint="XD_DEVICES or CUDA_VISIBLE_DEVICES names them")  # fmt: skip

    def __enter__(self) -> Line:
        wants = frozenset(device.key for device in self._slots)
        with _alone() as directory:
            number = 1 + max((waiting.number for waiting in _line(directory)), default=0)
            self._place = _Place(number, directory / f"{_PLACE}{number:012d}", wants)
            file = _lock(self._place.path)
            assert file is not None, "a number beyond all others is nobody's"
            with _closing_if_raised([file]):
                os.pwrite(file, json.dumps(sorted(wants)).encode(), 0)
            self._file = file
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(XdError), _alone():  # where it is refused, the next to come finds the place given up
            os.unlink(self._place.path)
        os.close(self._file)

    def take(self) -> Held | None:
        """All slots at once, on the devices that serve fewest; None while that cannot be."""
        taken: list[int] = []
        with _alone() as directory, _closing_if_raised(taken):
            earlier = [waiting for waiting in _line(directory) if waiting.number < self._place.number]
            rivals = [waiting for waiting in earlier if waiting.wants & self._place.wants]
            reserved = frozenset().union(*(waiting.wants for waiting in rivals))
            free, users = [], []
            for order, (device, slots) in enumerate(self._slots.items()):
                if device.key not in reserved:
                    file, held_by = _free_slot(directory, device, slots)
                    taken += [file] if file is not None else []
                    users += held_by
                    free += [(len(held_by), order, device, file)] if file is not None else []
            chosen = sorted(free)[: self._count] if len(free) >= self._count else []
            for slot in free:
                if slot not in chosen:
                    taken.remove(slot[3])
                    os.close(slot[3])
            self._before = rivals[-1] if rivals else None
            if not chosen:
                self.obstacle = _obstacle(users, len(rivals))
                return None
            for _, _, _, file in chosen:
                with contextlib.suppress(OSError):  # who holds it is said to those that wait, and else of no matter
                    os.ftruncate(file, 0)
                    os.pwrite(file, str(os.getpid()).encode(), 0)
            in_order = sorted(chosen, key=lambda slot: slot[1])
            return Held(tuple(slot[2] for slot in in_order), tuple(slot[3] for slot in in_order))

    def wait(self) -> Held:
        """`take`, as soon as it can be. Only the first in line looks again and again, the others wait for the one
        before them."""
        while (held := self.take()) is None:
            if self._before is not None:
                self._before.outlast()
            else:
                time.sleep(_POLL_S)
        return held

    def __str__(self) -> str:
        names = ", ".join(device.name for device in self._slots)
        return f"{self._count} of the devices {names}" if len(self._slots) > 1 else f"device {names}"


def _obstacle(users: list[str], rivals: int) -> str:
    """Who is in the way: processes that hold slots, and those that came earlier."""
    held = f"process {', '.join(dict.fromkeys(users))} holds it" if users else ""
    return "; ".join(filter(None, (held, f"{rivals} before it in line" if rivals else "")))


@dataclass(frozen=True)
class _Place:
    """Somebody's place in line, and the keys of the devices that may be taken for it."""

    number: int
    path: Path
    wants: frozenset[str]

    def outlast(self) -> None:
        """Wait until it is given up, or its owner is gone."""
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)


# -- files and locks


def directory() -> Path:
    """This user's directory of slots on this host, made where it is not there. XdError 73 when it cannot be one's own.

    Its name is known to all, and its parent may be written by all: what somebody else put there is not used.
    """
    host = os.uname().nodename.replace(os.sep, "_")
    path = Path(tempfile.gettempdir()) / f"xd-devices-{os.getuid()}-{host}"
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o700)
        found = os.lstat(path)
    except OSError as error:
        raise publish.cannot_write(path, error) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise XdError("is no directory of this user alone, so no slots of devices can be kept there",
                      status=Status.CONFLICT, code="cannot-write", where=str(path), hint="remove it")  # fmt: skip
    return path


@contextlib.contextmanager
def _alone() -> Iterator[Path]:
    """The directory, with nobody else looking into it or taking anything meanwhile: some microseconds."""
    path = directory()
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise publish.cannot_write(path, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield path
    except OSError as error:
        raise publish.cannot_write(path, error) from error
    finally:
        os.close(file)


@contextlib.contextmanager
def _closing_if_raised(files: list[int]) -> Iterator[None]:
    """A lock that its holder does not know of would keep that holder itself waiting for ever."""
    try:
        yield
    except BaseException:
        for file in files:
            os.close(file)
        raise


def _lock(path: Path) -> int | None:
    """An open file whose flock is ours; None when it is somebody else's."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with _closing_if_raised([file]):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                ours, is_it = True, os.path.samestat(os.fstat(file), os.stat(path))
            except BlockingIOError:
                ours, is_it = False, True
            except FileNotFoundError:  # a cleaner of temporary files was faster: then it is another file
                ours, is_it = True, False
        if ours and is_it:
            return file
        os.close(file)
        if not ours:
            return None


def _line(directory: Path) -> list[_Place]:
    """Those who wait, first come first; the places of the dead are removed."""
    found = []
    for path in sorted(directory.glob(f"{_PLACE}*")):
        if (file := _lock(path)) is not None:
            os.unlink(path)
            os.close(file)
        else:
            wants = frozenset(json.loads(path.read_bytes()))
            found.append(_Place(int(path.name.removeprefix(_PLACE)), path, wants))
    return found


def _free_slot(directory: Path, device: Device, slots: int) -> tuple[int | None, list[str]]:
    """A slot of a device, now ours, if one is free; and the processes that hold others of it."""
    taken: list[int] = []
    held_by = []
    with _closing_if_raised(taken):
        for number in range(slots):
            path = directory / f"{_SLOT}{device.key.replace(os.sep, '_')}-{number}"
            file = _lock(path)
            if file is None:
                held_by.append(path.read_text() or "?")
            elif not taken:
                taken.append(file)
            else:
                os.close(file)
    return (taken[0] if taken else None), held_by
