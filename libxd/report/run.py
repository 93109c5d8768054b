"""Which attempts a report is about: those of a run directory, in the order of its plan, or those that are named."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libxd import planner, resume, strictjson
from libxd.errors import Status, XdError
from libxd.knobs import CATALOG
from libxd.rundir import CASE_ID, Attempt, RunDirectory

_CATALOG = list(CATALOG)


@dataclass
class Found:
    """Attempts to read, the plan's rows (none: there is no plan), and attempts that were passed over, each with why."""

    attempts: list[Attempt] = field(default_factory=list)
    plan: list[dict[str, Any]] = field(default_factory=list)
    passed_over: list[tuple[Attempt, str]] = field(default_factory=list)


def find(path: str) -> Found:
    """What an operand means: an attempt is itself; of a run directory, what `resume` takes as each row's answer.

    Without a plan.jsonl its rows are the requests of the attempts that lie there. XdError 66 when nothing is there, 65
    when it is neither.
    """
    if Attempt.is_named_by(path):
        return Found([Attempt.open(path)])
    absolute = Path(os.path.abspath(path))
    if absolute.is_file():
        raise XdError("is a file, and a report is of attempts", code="no-run", where=path,
                      hint="give runs/<experiment>, or attempts")  # fmt: skip
    if not absolute.is_dir():
        raise XdError("no such run directory", status=Status.MISSING, code="missing", where=path)
    if not (absolute / "cases").is_dir():
        raise XdError("is no run directory: it holds no cases", code="no-run", where=path,
                      hint="give runs/<experiment>, or attempts")  # fmt: skip
    run = RunDirectory(absolute.parent, absolute.name)
    run.path = Path(path)  # as it was given, in messages
    plan = _plan(Path(path) / "plan.jsonl")
    found = Found(plan=plan)
    for row in plan or _requests(run):
        outcome = resume.outcome(row, run, None)
        found.passed_over += outcome.passed_over
        found.attempts += [outcome.attempt] if outcome.attempt else []
    return found


def _plan(path: Path) -> list[dict[str, Any]]:
    """The rows of a plan; none where there is no file."""
    if not path.exists():
        return []
    lines = strictjson.read_bytes(str(path)).splitlines()
    return [planner.read_row(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def _requests(run: RunDirectory) -> list[dict[str, Any]]:
    """What the attempts of a run were to answer, each once: the baseline and its repeats first, then knob by knob."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name in sorted(os.listdir(run.path / "cases")):
        for attempt in reversed(list(run.attempts(name))) if CASE_ID.match(name) else ():
            if attempt.has("requested.json"):
                row = attempt.requested()
                rows.setdefault((row["case_id"], row["repeat"], row["submission"], row["strict_fallback"]), row)
    return sorted(rows.values(), key=_order)


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    changed = [(_CATALOG.index(change["path"]), str(change["value"])) for change in row["intervention"]]
    return (len(changed), changed, row["repeat"], row["submission"], row["case_id"])
