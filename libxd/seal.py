"""The seal over an attempt: COMPLETE holds size and digest of every file, and the set of names.

A name that begins with the prefix of temporary files is no part of an attempt: a writer that was killed leaves one
behind, and no tool reads it. It is neither sealed nor reported.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from libxd import canon, publish, strictjson, verdict
from libxd.errors import Status, XdError, is_scarce, of_exception
from libxd.records import Case, digest
from libxd.rundir import PAYLOADS, SEAL, SIDES, Attempt, payloads

_JSON = tuple(name for name in PAYLOADS if name.endswith(".json"))


@dataclass(frozen=True)
class Problem:
    """A way in which an attempt is not what its seal says. `str()` of it is `name: kind (detail)`."""

    name: str
    kind: Literal["changed", "missing", "added", "symlink", "not-a-file", "unreadable", "malformed", "inconsistent"]
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.kind}" + (f" ({self.detail})" if self.detail else "")


def seal(attempt: Attempt) -> bool:
    """Publish COMPLETE over a whole and consistent attempt. False: it was sealed already, with the same content.

    XdError 66 when a payload is missing, 65 when a file is none of an attempt's or they do not belong together, 69
    when it was refused, 73 when it is sealed over other content.
    """
    names = attempt.names()
    payload = payloads(names)
    for problem in _set_problems(attempt, names, (*payload, SEAL) if SEAL in names else payload):
        missing = problem.kind == "missing"
        if missing and (refusal := attempt.refusal()):
            raise refusal.error(attempt, "there is nothing to seal")
        raise XdError(
            f"cannot be sealed: {problem}", status=Status.MISSING if missing else Status.INVALID,
            code=f"seal-{problem.kind}", where=str(attempt),
            hint="a stage has not run" if missing else "an attempt holds its own files alone",
        )  # fmt: skip
    sealed = SEAL in names
    if sealed and (problems := verify(attempt)):
        if (unread := problems[0]).kind == "unreadable":
            raise XdError(f"the seal cannot be checked: {unread}", status=Status.MISSING, code="unreadable",
                          where=str(attempt))  # fmt: skip
        raise XdError(f"was sealed over other content, which is kept: {problems[0]}", status=Status.CONFLICT,
                      code="sealed-differently", where=str(attempt),
                      hint="xd-seal --verify names the files that changed")  # fmt: skip
    case = Case.read(attempt)
    found = {name: attempt.read(name) for name in _JSON}
    files = attempt.read(SEAL)["files"] if sealed else {name: _facts(attempt, name) for name in payload}
    for problem in _inconsistencies(found, files):
        raise XdError(f"cannot be sealed: {problem}", code="seal-inconsistent", where=str(attempt))
    verdict.read(attempt, case)
    value = {
        "schema_version": "xd.seal.v1",
        "experiment_id": case.requested["experiment_id"],
        "case_id": attempt.case_id,
        "repeat": case.requested["repeat"],
        "execution_key": case.materialized["execution_key"],
        "files": files,
    }
    return publish.publish_json(attempt.file(SEAL), "seal", value)


def verify(attempt: Attempt, digested: Iterable[str] | None = None) -> list[Problem]:
    """In which ways the attempt is not what its seal says; [] when it is.

    XdError only when it cannot be listed, 75 when there are no descriptors or memory left to look at it with.
    digested: the files whose content is looked at, None for all; the set of names is in any case.
    """
    names = attempt.names()
    if SEAL not in names:
        return [Problem(SEAL, "missing", "the attempt is not sealed")]
    problems = _set_problems(attempt, names, (*payloads(names), SEAL))
    if any(problem.name == SEAL for problem in problems):
        return problems
    try:
        sealed = attempt.read(SEAL)
        if strictjson.read_bytes(attempt.file(SEAL)) != _bytes(sealed):
            return [*problems, Problem(SEAL, "malformed", "not in the bytes that xd-seal writes")]
    except XdError as error:
        return [*problems, _unfit(error, error.issues[0].message)]
    if set(sealed["files"]) != set(wanted := payloads(sealed["files"])):
        return [*problems, Problem(SEAL, "malformed", "seals a set of files that no attempt has")]
    problems = _set_problems(attempt, names, (*wanted, SEAL))
    flawed = {problem.name for problem in problems}
    for name in wanted if digested is None else digested:
        if name not in flawed:
            problems += _changed(attempt, name, sealed["files"][name])
    return problems or _misnamed(attempt, sealed)


def require_untampered(attempt: Attempt, digested: Iterable[str] | None = None) -> None:
    """XdError 65 where the attempt is sealed and not what its seal says. One that is not sealed is for who asks.

    digested: as of `verify`.
    """
    if attempt.has(SEAL) and (problems := verify(attempt, digested)):
        raise XdError(f"sealed, but {problems[0]}", code="tampered", where=str(attempt))


def _bytes(sealed: dict[str, Any]) -> bytes:
    return canon.dumps(sealed) + b"\n"


def _set_problems(attempt: Attempt, names: list[str], wanted: tuple[str, ...]) -> list[Problem]:
    """Names too few or too many, and what is no regular file."""
    problems = [Problem(name, "missing") for name in wanted if name not in names]
    for name in names:
        try:
            mode = os.lstat(attempt.file(name)).st_mode
        except OSError as error:
            problems.append(_unreadable(name, error))
            continue
        if stat.S_ISLNK(mode):
            problems.append(Problem(name, "symlink"))
        elif name not in wanted:
            problems.append(Problem(name, "added"))
        elif not stat.S_ISREG(mode):
            problems.append(Problem(name, "not-a-file"))
    return problems


def _facts(attempt: Attempt, name: str) -> dict[str, Any]:
    path = attempt.file(name)
    try:
        return {"blake3": canon.digest_file(path), "bytes": os.path.getsize(path)}
    except OSError as error:
        raise of_exception(error, str(path)) from error


def _changed(attempt: Attempt, name: str, sealed: dict[str, Any]) -> list[Problem]:
    """Size first: it tells most changes without reading."""
    try:
        size = os.path.getsize(attempt.file(name))
        if size != sealed["bytes"]:
            return [Problem(name, "changed", f"{size} bytes, sealed with {sealed['bytes']}")]
        if canon.digest_file(attempt.file(name)) != sealed["blake3"]:
            return [Problem(name, "changed", "same size, another digest")]
    except OSError as error:
        return [_unreadable(name, error)]
    return []


def _unreadable(name: str, error: OSError) -> Problem:
    """XdError 75 where descriptors or memory have run out: then nothing is known of the file."""
    if is_scarce(error):
        raise of_exception(error, name) from error
    return Problem(name, "unreadable", error.strerror or str(error))


def _unfit(error: XdError, detail: str) -> Problem:
    """What a seal is whose reading, or that of the records it speaks of, fails; likewise."""
    if error.status == Status.RETRY:
        raise error
    return Problem(SEAL, "unreadable" if error.code == "unreadable" else "malformed", detail)


def _misnamed(attempt: Attempt, sealed: dict[str, Any]) -> list[Problem]:
    """A seal whose own fields were edited: they must be those of the files it seals."""
    try:
        requested, materialized = attempt.requested(), attempt.materialized()
    except XdError as error:
        return [_unfit(error, f"seals what no tool has written: {error.issues[0].line()}")]
    expected = {
        "experiment_id": requested["experiment_id"],
        "repeat": requested["repeat"],
        "execution_key": materialized["execution_key"],
    }
    return [Problem(SEAL, "changed", f"{key} is not the attempt's") for key in expected if sealed[key] != expected[key]]


def _inconsistencies(records: dict[str, Any], files: dict[str, Any]) -> list[Problem]:
    """Files that are sound each and do not belong together, beyond what `Case.read` has found."""
    problems = []
    repeat = records["requested.json"]["repeat"]
    key = records["materialized.json"]["execution_key"]
    for name, record in records.items():
        if record.get("repeat", repeat) != repeat:
            problems.append(Problem(name, "inconsistent", f"repeat {record['repeat']}, requested was {repeat}"))
        if record.get("execution_key", key) != key:
            problems.append(Problem(name, "inconsistent", "another execution key than materialized.json's"))
        if record.get("status") == "refused":
            problems.append(Problem(name, "inconsistent", "refused, yet compared"))
    for side in SIDES:
        if records[f"readback_{side}.json"]["side"] != side:
            problems.append(Problem(f"readback_{side}.json", "inconsistent", "is the other side's"))
    comparison = records["comparison.json"]
    spoken_of = {**comparison["inputs"], "token_diffs.safetensors": comparison["token_diffs"],
                 "actual.json": comparison["actual"]}  # fmt: skip
    for name, wanted in spoken_of.items():
        found = digest(name, records[name]) if name in records else files.get(name, {}).get("blake3")
        if found != wanted:
            problems.append(Problem(name, "inconsistent", "not the file that comparison.json speaks of"))
    return problems
