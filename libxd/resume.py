"""Which plan rows a sealed attempt answers already, which were refused, and which are still to be done.

An answer is a sealed attempt, untampered, whose request is the row and whose execution key is the one that the row
would get now: same case, repeat, materialisation, scorers, operators and environments. An INVALID_* verdict is no
answer. The newest valid one counts; partial, malformed and tampered attempts are passed over, so an older valid one
still counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from libxd import canon, seal, strictjson, verdict
from libxd.errors import Status, XdError
from libxd.plain import told_apart
from libxd.records import Case
from libxd.rundir import SEAL, Attempt, RunDirectory

#: verdicts that answer a row; the INVALID_* ones say that the attempt was not worth comparing
ANSWERS = ("PASS", "MISMATCH", "ZERO_ACTIVE_TOKENS")

_MOST_SHOWN = 80  # characters of a value

#: what says what is to be measured: the case (its digest covers the pinned identity, and nothing that is only at hand
#: somewhere), how it is to be tried, and what the table calls it
_REQUEST = ("case_digest", "repeat", "submission", "strict_fallback", "intervention")
#: the files of an attempt that say which row it is an attempt at, and under what conditions
_SAYS_WHOSE = ("requested.json", "materialized.json")


@dataclass(frozen=True)
class Outcome:
    """What the run directory holds for one row.

    attempt: the one that answers it, or was refused; of a pending row the newest that was begun under the same
    conditions and is no answer: sealed with an INVALID_* verdict, or unfinished. None when there is no such attempt.
    otherwise: of a pending row the first thing that is different now, where an attempt at it is sealed under other
    conditions.
    """

    state: Literal["answered", "refused", "pending"]
    attempt: Attempt | None
    passed_over: tuple[tuple[Attempt, str], ...] = ()
    otherwise: str | None = None


def outcome(row: dict[str, Any], run: RunDirectory, materialized: dict[str, Any] | None) -> Outcome:
    """The outcome of `row` in `run`.

    materialized: what the row materialises to now; None accepts an attempt of any environment and policy (to list what
    was measured, wherever that was). XdError 75 when there are no descriptors or memory left to read an attempt with.
    """
    passed_over = [(it, "an attempt is a directory, and no symlink") for it in run.no_attempts(row["case_id"])]
    newest: dict[str, Attempt] = {}  # state -> the newest attempt in it
    for attempt in run.attempts(row["case_id"]):
        try:
            state = _state(attempt, row, materialized)
        except XdError as error:
            if error.status == Status.RETRY:  # it may well answer: there is only no room to look at it now
                raise
            passed_over.append((attempt, error.issues[0].line().removeprefix(f"{attempt}: ")))
            continue
        if state == "answered":
            return Outcome("answered", attempt, tuple(passed_over))
        newest.setdefault(state, attempt)
    if "refused" in newest:
        return Outcome("refused", newest["refused"], tuple(passed_over))
    otherwise = None
    if materialized is not None and "elsewhere" in newest:
        otherwise = difference(newest["elsewhere"].materialized(), materialized)
    return Outcome("pending", newest.get("begun"), tuple(passed_over), otherwise)


def _state(attempt: Attempt, row: dict[str, Any], materialized: dict[str, Any] | None) -> str:
    """ "answered", "refused", "begun", "elsewhere" (sealed under other conditions) or "other".

    XdError for an attempt that cannot be trusted. Of one that is sealed, what says whether it is this row's is
    digested before it is believed, and all of it before it answers.
    """
    seal.require_untampered(attempt, _SAYS_WHOSE)
    if not attempt.has("requested.json") or not _same_request(attempt.requested(), row):
        return "other"
    if not attempt.has("materialized.json"):
        return "begun"  # somebody is at work, or was killed
    found = attempt.materialized()
    if materialized is not None and found["execution_key"] != materialized["execution_key"]:
        return "elsewhere" if attempt.has(SEAL) else "other"
    if not attempt.has(SEAL):
        return "refused" if attempt.refusal() else "begun"
    seal.require_untampered(attempt)
    status = verdict.read(attempt, Case.read(attempt))["status"]
    return "answered" if status in ANSWERS else "begun"


def _same_request(requested: dict[str, Any], row: dict[str, Any]) -> bool:
    return all(requested[name] == row[name] for name in _REQUEST)


def difference(then: Any, now: Any, pointer: str = "") -> str | None:
    """The first leaf in which two materialisations differ but for their keys, in words; None: there is none."""
    if isinstance(then, dict) and isinstance(now, dict):
        found = (
            difference(then.get(name), now.get(name), strictjson.pointer_to(pointer, name))
            for name in sorted(then.keys() | now.keys())
            if name not in ("execution_key", "fingerprints")  # digests, of what stands beside them
        )
        return next(filter(None, found), None)
    if then == now:
        return None
    was, is_now = told_apart(*(canon.dumps(value).decode() for value in (then, now)), _MOST_SHOWN)
    return f"{pointer} was {was}, is {is_now}"
