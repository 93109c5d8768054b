"""Names under a run directory: runs/<experiment>/cases/<case>/<attempt>/."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libxd import publish, schema, shards, strictjson
from libxd.errors import Status, XdError, of_exception
from libxd.knobs import SIDES

EXPERIMENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
CASE_ID = re.compile(r"c-[0-9a-f]{16}\Z")
ATTEMPT_ID = re.compile(r"a[0-9]{4,}\Z")

SEAL = "COMPLETE"
#: what a sealed attempt holds beside its seal, in the order in which the tools write it; a score file may be in shards
PAYLOADS = (
    "requested.json",
    "identity.json",
    "materialized.json",
    "readback_rollout.json",
    "score_rollout.safetensors",
    "readback_training.json",
    "score_training.safetensors",
    "actual.json",
    "token_diffs.safetensors",
    "comparison.json",
)
_SCHEMAS = {
    "requested.json": "plan_row",
    "identity.json": "identity",
    "materialized.json": "materialized",
    "readback_rollout.json": "readback",
    "readback_training.json": "readback",
    "actual.json": "actual",
    "comparison.json": "comparison",
    SEAL: "seal",
}


def payloads(names: Iterable[str]) -> tuple[str, ...]:
    """`PAYLOADS`, with the shards of a side's scores in the place of its one file where `names` has any of them."""
    names = list(names)
    scores = {shards.whole(side): shards.wanted(names, side) for side in SIDES}
    return tuple(name for payload in PAYLOADS for name in scores.get(payload, (payload,)))


#: the files that may say so, in the order in which they are written
_REFUSING = ("materialized.json", *(f"readback_{side}.json" for side in SIDES))


@dataclass(frozen=True)
class Refusal:
    """A file of an attempt that says it was refused: its name, and its reasons as they stand there."""

    file: str
    reasons: list[dict[str, Any]]

    @property
    def unsupported(self) -> bool:
        """Whether all of it is what cannot be done here."""
        return bool(self.reasons) and all(reason.get("status") == "unsupported" for reason in self.reasons)

    def text(self) -> str:
        """The reasons, each once, with side and knob."""
        return refusal_text(self.reasons)

    def error(self, attempt: Attempt, what: str) -> XdError:
        """The XdError 69 of a tool that has nothing to do with a refused attempt."""
        return XdError(f"was refused, {what}: {self.text()}", status=Status.REFUSED, code="refused", where=str(attempt),
                       path=f"/{self.file}", hint="a retry takes a new attempt")  # fmt: skip


def refusal_text(reasons: list[dict[str, Any]]) -> str:
    """The reasons of a materialisation or a readback that was refused: each once, with side and knob."""
    return "; ".join(dict.fromkeys(map(_reason, reasons))) or "no reason is given"


def _reason(refusal: dict[str, Any]) -> str:
    side, knob = refusal.get("side"), refusal["knob"]
    named = knob is not None and side is not None and knob.startswith(side)  # the knob's name says the side, too
    place = " ".join(part for part in (None if named else side, knob) if part)
    return f"{place}: {refusal['reason']}" if place else refusal["reason"]


class Attempt:
    """One case of one experiment, tried once. Reads its JSON files strictly and against their schemas."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Attempt:
        """An existing attempt, from a tool's operand. Refuses what is not of the form …/c-<16 hex>/a<number>."""
        attempt = cls(path)
        if any(char in str(path) for char in "\n\r\0"):
            raise XdError("no line of a pipe can hold this path", code="bad-path", where=str(path))
        if not os.fspath(path):
            raise XdError("an empty path is no attempt", status=Status.USAGE, code="bad-path", where="''")
        absolute = Path(os.path.abspath(attempt.path))  # not resolved: a symlink for an attempt is refused below
        try:
            os.lstat(absolute)
        except FileNotFoundError:
            raise XdError("no such attempt", status=Status.MISSING, code="missing", where=str(path)) from None
        except OSError as error:  # a name too long, a folder that may not be entered
            raise of_exception(error, str(path)) from error
        for name, pattern, what in (
            (absolute.name, ATTEMPT_ID, "attempt"),
            (absolute.parent.name, CASE_ID, "case"),
        ):
            if not pattern.match(name):
                raise XdError(f"not an attempt directory: bad {what} id", code="bad-id", where=str(path), found=name)
        for place in (absolute, absolute.parent):
            if place.is_symlink():
                raise XdError("an attempt is no symlink", code="symlink", where=str(place))
        if not absolute.is_dir():
            raise XdError("an attempt is a directory", code="bad-attempt", where=str(path))
        return attempt

    @staticmethod
    def is_named_by(path: str | os.PathLike[str]) -> bool:
        """Whether a path ends as an attempt's does, whatever lies there."""
        absolute = Path(os.path.abspath(path))
        return bool(ATTEMPT_ID.match(absolute.name) and CASE_ID.match(absolute.parent.name))

    @property
    def attempt_id(self) -> str:
        return os.path.abspath(self.path).rsplit(os.sep, 1)[-1]

    @property
    def case_id(self) -> str:
        return Path(os.path.abspath(self.path)).parent.name

    def file(self, name: str) -> Path:
        return self.path / name

    def has(self, name: str) -> bool:
        """Whether the file is there. XdError 66 where that cannot be known: an attempt that may not be entered."""
        try:
            os.lstat(self.path / name)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise of_exception(error, str(self.path)) from error
        return True

    def names(self) -> list[str]:
        """What lies there, sorted, without what a killed writer may have left. XdError when it cannot be listed."""
        try:
            return sorted(name for name in os.listdir(self.path) if not name.startswith(publish.TEMPORARY_PREFIX))
        except OSError as error:
            raise of_exception(error, str(self.path)) from error

    def scored(self, side: str) -> bool:
        """Whether a side's scores are there: all shards of them."""
        names = self.names()
        return set(shards.wanted(names, side)) <= set(names)

    def scores(self, side: str) -> tuple[Path, ...]:
        """The files of a side's scores, in order: one (there or not), or all shards. XdError as `shards.complete`."""
        return tuple(self.path / name for name in shards.complete(self.names(), side, str(self.path)))

    @property
    def sealed(self) -> bool:
        return self.has(SEAL)

    def read(self, name: str) -> Any:
        """One of the attempt's JSON files, validated, and about this case."""
        path = self.file(name)
        if path.is_symlink():
            raise XdError("a file of an attempt is no symlink", code="symlink", where=str(path))
        value = schema.validate(_SCHEMAS[name], strictjson.load(path), str(path))
        if value.get("case_id") != self.case_id:
            raise XdError(
                "belongs to another case",
                code="foreign-file",
                where=str(path),
                path="/case_id",
                found=value.get("case_id"),
                expected=self.case_id,
            )
        return value

    def requested(self) -> dict[str, Any]:
        return self.read("requested.json")

    def identity(self) -> dict[str, Any]:
        return self.read("identity.json")

    def materialized(self) -> dict[str, Any]:
        return self.read("materialized.json")

    def readback(self, side: str) -> dict[str, Any]:
        return self.read(f"readback_{side}.json")

    def comparison(self) -> dict[str, Any]:
        return self.read("comparison.json")

    def refusal(self) -> Refusal | None:
        """The first of its files that says it was refused; None while none does."""
        for name in _REFUSING:
            if self.has(name) and (value := self.read(name))["status"] == "refused":
                return Refusal(name, value["refusals"])
        return None

    def write_json(self, name: str, value: Any) -> bool:
        """Publish one of the attempt's JSON files; a sealed attempt does not grow."""
        self.refuse_growth(name)
        return publish.publish_json(self.file(name), _SCHEMAS[name], value)

    def refuse_growth(self, name: str) -> None:
        """XdError 73 when a file would be added to a sealed attempt."""
        if self.sealed and not self.has(name):
            raise XdError(
                f"the attempt is sealed and would grow by {name}",
                status=Status.CONFLICT,
                code="sealed",
                where=str(self.path),
                hint="take a new attempt",
            )


class RunDirectory:
    """One experiment's directory under a root (`runs/`)."""

    def __init__(self, root: str | os.PathLike[str], experiment_id: str) -> None:
        if not EXPERIMENT_ID.match(experiment_id):
            raise XdError(
                "bad experiment id",
                code="bad-id",
                where=str(root),
                found=experiment_id,
                expected="letters, digits, '.', '_', '-'; no leading '.'",
            )
        self.path = Path(root) / experiment_id

    def case(self, case_id: str) -> Path:
        if not CASE_ID.match(case_id):
            raise XdError("bad case id", code="bad-id", where=str(self.path), found=case_id, expected="c- + 16 hex")
        return self.path / "cases" / case_id

    def sequences(self, digest: str) -> Path:
        """Where imported tokens lie, frozen, for whoever scores them again; digest: of their identity."""
        return self.path / "sequences" / f"{digest[:16]}.safetensors"

    def _own(self, case_id: str) -> None:
        """XdError 65 for a case that is a symlink: what leads elsewhere is neither written through nor believed."""
        case = self.case(case_id)
        if case.is_symlink():
            raise XdError("a case is no symlink", code="symlink", where=str(case))

    def new_attempt(self, case_id: str) -> Attempt:
        """Take the next free attempt id; mkdir is exclusive, so two processes never share one."""
        case = self.case(case_id)
        try:
            self._own(case_id)
            publish.directory(case)
            number = max((int(a.attempt_id[1:]) for a in self.attempts(case_id)), default=0) + 1
            while True:
                path = case / f"a{number:04d}"
                try:
                    path.mkdir()
                except FileExistsError:
                    number += 1
                    continue
                publish.sync_directory(case)
                return Attempt(path)
        except OSError as error:
            raise publish.cannot_write(case, error) from error

    def attempts(self, case_id: str) -> Iterator[Attempt]:
        """The attempts of a case, newest first; what bears no attempt's name is passed over."""
        for entry in self._named_as_attempts(case_id):
            if entry.is_dir(follow_symlinks=False):
                yield Attempt(entry.path)

    def no_attempts(self, case_id: str) -> Iterator[Attempt]:
        """What bears an attempt's name and is none, newest first: a symlink, a file. Nothing in it is to be read."""
        for entry in self._named_as_attempts(case_id):
            if not entry.is_dir(follow_symlinks=False):
                yield Attempt(entry.path)

    def _named_as_attempts(self, case_id: str) -> list[os.DirEntry[str]]:
        case = self.case(case_id)
        try:
            self._own(case_id)
            entries = [entry for entry in os.scandir(case) if ATTEMPT_ID.match(entry.name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise of_exception(error, str(case)) from error
        return sorted(entries, key=lambda e: int(e.name[1:]), reverse=True)
