"""A sealed attempt and the ways to touch one: what `xd-seal --verify` and `xd-resume` say of each."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from comparison_fixtures import floats, scored
from materialize_fixtures import environments, policy

from libxd import canon, comparison, materialize, planner, publish, resume, seal, strictjson
from libxd.errors import XdError
from libxd.rundir import PAYLOADS, SEAL, Attempt, RunDirectory

NAMES = (*PAYLOADS, SEAL)

NOTICED = "noticed"  # both tools say what is wrong, and nothing is answered
UNFINISHED = "unfinished"  # as if it had never been sealed: --verify says so, and nothing is answered
SAME = "the same"  # no byte of the evidence is another one: untouched to both


@dataclass(frozen=True)
class Seen:
    """What the tools say. verify, resume: a line for each thing that is wrong, [] where nothing is."""

    verify: list[str]
    resume: list[str]
    answered: bool

    def is_(self, expected: str) -> bool:
        lines = [*self.verify, *self.resume]
        if any("\n" in line or not line.isprintable() for line in lines):
            return False
        if expected == SAME:
            return self.answered and not lines
        return not self.answered and bool(self.verify) and (bool(self.resume) or expected == UNFINISHED)


class Ground:
    """A run directory with one sealed attempt that answers its row, and others elsewhere to take files from.

    twin: another attempt at the same row, of other numbers; stranger: one of another case.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.victim = sealed(root / "runs", -2.5)
        self.twin = sealed(root / "twin", -2.25)
        self.stranger = sealed(root / "stranger", -2.5, change=("batch.size", 1))
        self.row = self.victim.requested()
        self._now = materialize.materialized(self.row, policy(), environments())
        self._kept, self._turn = root / "kept", 0
        shutil.copytree(self.case, self._kept)

    @property
    def case(self) -> Path:
        return self.victim.path.parent

    def outside(self, name: str) -> Path:
        """A place beside the run directory, free to be used until the attempt is restored."""
        place = self.root / "outside" / str(self._turn) / name
        place.parent.mkdir(exist_ok=True, parents=True)
        return place

    def kept(self, name: str) -> Path:
        """A file of the attempt as it was sealed."""
        return self._kept / self.victim.attempt_id / name

    def restore(self) -> None:
        """The attempt as it was sealed."""
        if self.case.is_symlink():
            self.case.unlink()
        else:
            shutil.rmtree(self.case)
        shutil.copytree(self._kept, self.case)
        self._turn += 1

    def judge(self, row: dict[str, Any] | None = None) -> Seen:
        """What is said of the attempt as it lies there now. row: for which it would answer; its own by default."""
        row = row or self.row
        try:
            verify = [str(problem) for problem in seal.verify(Attempt.open(self.victim.path))]
        except XdError as error:
            verify = [error.line()]
        try:
            run = RunDirectory(self.root / "runs", row["experiment_id"])
            found = resume.outcome(row, run, self._now)
        except XdError as error:
            return Seen(verify, [error.line()], False)
        return Seen(verify, [why for _, why in found.passed_over], found.state == "answered")


def sealed(root: Path, rollout: float, change: tuple[str, Any] | None = None) -> Attempt:
    """An attempt whose second token scores as `rollout` on one side."""
    attempt = scored(root, floats(-1, rollout, -3, -4), floats(-1, -2, -3, -4), lengths=(3, 1), change=change)
    comparison.compare(attempt)
    seal.seal(attempt)
    return attempt


# -- ways


@dataclass(frozen=True)
class Way:
    """One way to touch a sealed attempt. kind: the line of the table that counts it."""

    kind: str
    name: str
    touch: Callable[[Ground], None]
    expected: str = NOTICED


def ways(ground: Ground) -> Iterator[Way]:
    """All ways but flipped bytes and closed modes."""
    for name in NAMES:
        yield from _ways_of_file(ground, name)
    yield from _ways_of_seal(ground)
    yield from _ways_of_set()
    yield from _ways_of_place()


def _ways_of_file(ground: Ground, name: str) -> Iterator[Way]:
    data = ground.victim.file(name).read_bytes()
    size = len(data)
    for kept in (size - 1, size // 2, 1, 0):
        yield Way("truncated", f"{name} to {kept} bytes", partial(_write, name, data[:kept]))
    for tail in (b"\n", b" ", b"\0", b"{}"):
        yield Way("appended to", f"{name} {tail!r}", partial(_write, name, data + tail))
    gone = UNFINISHED if name == SEAL else NOTICED
    yield Way("removed", name, partial(_remove, name), gone)
    for other in (f"{name}.bak", name.swapcase(), f".{name}"):
        yield Way("renamed", f"{name} to {other}", partial(_rename, name, other), gone)
    yield Way("a symlink", f"{name} to its own bytes", partial(_move_and, name, os.symlink))
    yield Way("a symlink", f"{name} to nothing", partial(_replace, name, partial(os.symlink, "nothing")))
    yield Way("a fifo", name, partial(_replace, name, os.mkfifo))
    yield Way("a directory", name, partial(_replace, name, os.mkdir))
    yield Way("a hard link", f"{name} to other bytes elsewhere", partial(_linked, name, data[::-1]))
    yield Way("a hard link", f"{name} to its own bytes", partial(_move_and, name, os.link), SAME)
    yield Way("a hard link", f"{name}, written to through the other name", partial(_through_link, name))
    yield Way("written anew", f"{name} with the same bytes", partial(_write, name, data), SAME)
    if name.endswith(".json") or name == SEAL:
        value = json.loads(data)
        texts = {"indented": json.dumps(value, indent=1) + "\n", "with blanks": json.dumps(value) + "\n"}
        for how, text in texts.items():
            yield Way("the same JSON, other bytes", f"{name} {how}", partial(_write, name, text.encode()))
    for whose, attempt in (("twin", ground.twin), ("stranger", ground.stranger)):
        if attempt.file(name).read_bytes() != data:
            yield Way("swapped between attempts", f"{name} with a {whose}'s", partial(_take, (name,), whose))
    after = NAMES[(NAMES.index(name) + 1) % len(NAMES)]
    yield Way("swapped within", f"{name} and {after}", partial(_swap, name, after))


def _ways_of_seal(ground: Ground) -> Iterator[Way]:
    value = json.loads(ground.victim.file(SEAL).read_bytes())
    for pointer, edited in edits(value):
        yield Way("the seal edited", pointer, partial(_write, SEAL, canon.dumps(edited) + b"\n"))


def _ways_of_set() -> Iterator[Way]:
    for name in ("notes.txt", ".hidden", "COMPLETE~", "score_rollout-00001-of-00002.safetensors", "näme"):
        yield Way("added", f"a file {name}", partial(_write, name, b"more"))
    yield Way("added", "a directory", partial(_make, "more", os.mkdir))
    yield Way("added", "a fifo", partial(_make, "more", os.mkfifo))
    yield Way("added", "a symlink to a file of it", partial(_make, "more", partial(os.symlink, "requested.json")))
    yield Way("a killed writer's rest", publish.TEMPORARY_PREFIX, partial(_write, publish.TEMPORARY_PREFIX + "x", b""),
              SAME)  # fmt: skip
    for whose in ("twin", "stranger"):
        yield Way("swapped between attempts", f"all but the seal with a {whose}'s", partial(_take, PAYLOADS, whose))
    yield Way("swapped between attempts", "the whole with a stranger's", partial(_take, NAMES, "stranger"))
    yield Way("swapped between attempts", "the whole with a twin's", partial(_take, NAMES, "twin"), SAME)


def _ways_of_place() -> Iterator[Way]:
    for what in ("attempt", "case"):
        yield Way("a symlink", f"the {what} to where it was moved", partial(_move_place, what, os.symlink))
    for make in (os.mkfifo, Path.touch):
        yield Way(f"a {'fifo' if make is os.mkfifo else 'file'}", "the attempt", partial(_move_place, "attempt", make))


def edits(value: Any, pointer: str = "") -> Iterator[tuple[str, Any]]:
    """(pointer, the whole value with one leaf another, one member left out, or one more) for every place of it."""
    if not isinstance(value, dict | list):
        yield pointer, _other(value)
        return
    places = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, item in places:
        place = strictjson.pointer_to(pointer, key)
        for where, edited in edits(item, place):
            changed = value.copy()
            changed[key] = edited
            yield where, changed
        less = value.copy()
        del less[key]
        yield f"{place} left out", less
    yield f"{pointer}/- added", {**value, "more": 1} if isinstance(value, dict) else [*value, 1]


def _other(value: Any) -> Any:
    """Another value of the same form, as a forger would choose it."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value[:-1] + ("0" if value[-1:] != "0" else "1")
    return 0


# -- what they do


def _write(name: str, data: bytes, ground: Ground) -> None:
    ground.victim.file(name).write_bytes(data)


def _remove(name: str, ground: Ground) -> None:
    ground.victim.file(name).unlink()


def _rename(name: str, other: str, ground: Ground) -> None:
    ground.victim.file(name).rename(ground.victim.file(other))


def _make(name: str, make: Callable[[Path], object], ground: Ground) -> None:
    make(ground.victim.file(name))


def _replace(name: str, make: Callable[[Path], object], ground: Ground) -> None:
    _remove(name, ground)
    _make(name, make, ground)


def _move_and(name: str, make: Callable[[Path, Path], object], ground: Ground) -> None:
    """The file lies elsewhere, and a link of some kind leads there."""
    ground.victim.file(name).rename(ground.outside(name))
    make(ground.outside(name), ground.victim.file(name))


def _linked(name: str, data: bytes, ground: Ground) -> None:
    ground.outside(name).write_bytes(data)
    _replace(name, partial(os.link, ground.outside(name)), ground)


def _through_link(name: str, ground: Ground) -> None:
    _move_and(name, os.link, ground)
    data = bytearray(ground.outside(name).read_bytes())
    data[len(data) // 2] ^= 1
    ground.outside(name).write_bytes(data)


def _take(names: tuple[str, ...], whose: str, ground: Ground) -> None:
    for name in names:
        shutil.copyfile(getattr(ground, whose).file(name), ground.victim.file(name))


def _swap(name: str, other: str, ground: Ground) -> None:
    one, two = ground.victim.file(name), ground.victim.file(other)
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)


def _move_place(what: str, make: Callable[..., object], ground: Ground) -> None:
    place = ground.victim.path if what == "attempt" else ground.case
    moved = ground.outside(place.name)
    place.rename(moved)
    make(moved, place) if make is os.symlink else make(place)


# -- permissions


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Root reads whatever its mode: as a nobody meanwhile, where this process is root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def modes() -> Iterator[Way]:
    """Ways to be judged `unprivileged`: what may not be read is not believed, and no other mode bit is evidence."""
    for name in NAMES:
        yield Way("a mode", f"{name} unreadable", partial(_chmod, name, 0))
        for mode in (0o444, 0o777):
            yield Way("a mode", f"{name} {mode:o}", partial(_chmod, name, mode), SAME)
    for mode in (0, 0o444):
        yield Way("a mode", f"the attempt {mode:o}", partial(_chmod, "", mode))
    yield Way("a mode", "the attempt 555", partial(_chmod, "", 0o555), SAME)


def _chmod(name: str, mode: int, ground: Ground) -> None:
    os.chmod(ground.victim.file(name), mode)


# -- bytes


def flips(ground: Ground, name: str, offsets: Iterable[int], mask: Callable[[int], int]) -> Iterator[tuple[int, Seen]]:
    """(offset, what is said) with the byte there another by `mask(offset)`, one byte at a time; restored afterwards."""
    data = ground.victim.file(name).read_bytes()
    with open(ground.victim.file(name), "r+b", buffering=0) as file:
        for offset in offsets:
            byte = data[offset]
            os.pwrite(file.fileno(), bytes([byte ^ mask(offset)]), offset)
            yield offset, ground.judge()
            os.pwrite(file.fileno(), bytes([byte]), offset)


# -- rows

#: of a row, what says nothing of what is measured: sizes beside the digest they follow from, and where files lay
NOT_MEASURED = ("/identity/sequences/num_active", "/identity/sequences/num_sequences", "/identity/sequences/num_tokens",
                "/locations/sequences")  # fmt: skip


def rows(ground: Ground) -> Iterator[tuple[str, bool]]:
    """(place, whether it held) for the plan row edited in every place: refused, or the attempt is no answer to it."""
    for pointer, edited in edits(ground.row):
        try:
            row = planner.read_row(canon.dumps(edited), "row")
        except XdError as error:
            yield pointer, all(issue.line().isprintable() for issue in error.issues)
        else:
            yield pointer, ground.judge(row).answered == (pointer in NOT_MEASURED)
