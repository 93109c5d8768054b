"""Where the numbers come from: what an attempt's seal and its own verdict say before any number is looked at."""

from __future__ import annotations

import shlex
from typing import Any

from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import FACT, Finding, Rule

RULE = Rule(
    "provenance",
    ("tampered", "identity", "artifact"),
    "The attempt's comparison.json is INVALID_IDENTITY or INVALID_ARTIFACT: its entries, as they stand, but for what "
    "was not shown and is pinned nowhere; that is listed under what was not looked at. Of a sealed attempt first: its "
    "files are not what its seal says: tampered, and then no other detector is asked.",
    "None: digests, and what the engines showed.",
)
_SHOWN = 5
#: codes of `judge.violations` for what was neither seen nor given
_NOT_SHOWN = ("unobservable", "unpinned")


def examine(evidence: Evidence) -> Finding | None:
    if evidence.tampered:
        return Finding("tampered", FACT, "the attempt is not what was sealed, and no evidence",
                       _first([str(problem) for problem in evidence.tampered]),
                       [f"xd-seal --verify {shlex.quote(str(evidence.attempt))}",
                        "score the case anew, or take the attempt from where it was sealed"])  # fmt: skip
    violations, problems = _judged(evidence)
    lines = [f"{each['side']}: {each['code']} at {each['path']}: {each['observed']} instead of {each['expected']}"
             for each in violations if each["code"] not in _NOT_SHOWN]  # fmt: skip
    cause = "identity" if lines else "artifact"
    lines += [f"{each['side']}: {each['code']}: {each['detail']}" for each in problems]
    if not lines:
        return None
    return Finding(cause, FACT, "the engines did not score what the case says", _first(lines),
                   ["mend this first: numbers of other tokens, weights or states say nothing"])  # fmt: skip


def _first(lines: list[str]) -> list[str]:
    return lines[:_SHOWN] + ([f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])


def not_shown(evidence: Evidence) -> str | None:
    """What could not be rested on: no attempt is there, or nobody saw it; None where there is nothing."""
    if evidence.attempt is None:
        return "needs an attempt: score files by themselves have no identity and no seal"
    places = {each["path"].rpartition("/")[2] for each in _judged(evidence)[0] if each["code"] in _NOT_SHOWN}
    return f"was not shown: {', '.join(sorted(places))}" if places else None


def _judged(evidence: Evidence) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """violations and artifact_problems of comparison.json."""
    if evidence.attempt is None or not evidence.attempt.has("comparison.json"):
        return [], []
    said = evidence.attempt.comparison()
    return said["violations"], said["artifact_problems"]
