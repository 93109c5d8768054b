"""The contract: what the attempt's own verdict found before any number was looked at."""

from __future__ import annotations

from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import FACT, Finding, Rule

RULE = Rule(
    "contract",
    ("identity", "artifact"),
    "The attempt's comparison.json is INVALID_IDENTITY or INVALID_ARTIFACT: its entries, as they stand.",
    "None: what the engines showed.",
)
_SHOWN = 5


def examine(evidence: Evidence) -> Finding | None:
    if evidence.attempt is None or not evidence.attempt.has("comparison.json"):
        return None
    said = evidence.attempt.comparison()
    lines = [f"{each['side']}: {each['code']} at {each['path']}: {each['observed']} instead of {each['expected']}"
             for each in said["violations"]]  # fmt: skip
    cause = "identity" if lines else "artifact"
    lines += [f"{each['side']}: {each['code']}: {each['detail']}" for each in said["artifact_problems"]]
    if not lines:
        return None
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return Finding(cause, FACT, "the engines did not score what the case says", lines[:_SHOWN] + more,
                   ["mend this first: numbers of other tokens, weights or states say nothing"])  # fmt: skip
