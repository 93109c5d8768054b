"""Repeat floor: a side beside itself, in a repeat, in another order or in batches of another size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from libxd import effect
from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import FACT, HINT, SHAPE, Finding, Rule
from libxd.records import Case
from libxd.rundir import SIDES, Attempt

#: of mean |training - rollout|: below, another batch is none of its causes; from there on, it may be all of it
_PART, _MOST = 0.1, 0.5

RULE = Rule(
    "repeats",
    ("not-repeatable", "batch-shape"),
    "Of attempts that scored the same tokens under the same conditions: a side of one case that differs in a repeat "
    "submitted in the same order is not-repeatable. A side that differs in a repeat submitted in another order, or in "
    "a case with another batch.size alone, by half of mean |training - rollout| or more is batch-shape; from a tenth "
    "on it is a hint.",
    "None: facts. Sides that compute alike are equal bit for bit.",
)


def examine(evidences: Sequence[Evidence]) -> list[Finding]:
    """Of several attempts together."""
    again, shaped, floor, share = [], [], 0.0, 0.0
    read = [(each, each.attempt, Case.read(each.attempt)) for each in evidences if each.attempt and each.brief.count]
    for (a, first, its), (b, second, other) in combinations(read, 2):
        for kind, side, seen in _beside(first, its, second, other):
            if not seen.mean_absolute:
                continue
            line = (f"{side} of {b.attempt} against {a.attempt}: mean {seen.mean_absolute:.3g}, max "
                    f"{seen.max_absolute:.3g}, {seen.bitwise_equal_share:.0%} bitwise equal")  # fmt: skip
            apart = max(each.brief.mean or 0.0 for each in (a, b))
            if kind == "repeat":
                again.append(line)
            elif seen.mean_absolute >= _PART * apart:
                shaped.append(f"{line}; mean |training - rollout| is {apart:.3g} ({kind})")
                floor, share = max(floor, seen.mean_absolute), max(share, seen.mean_absolute / apart)
    findings = []
    if again:
        findings.append(Finding("not-repeatable", FACT, "a side differs from itself when nothing is changed", again, [
            "turn on the engine's deterministic mode, and look for atomics, autotuning, dropout and training mode",
        ]))  # fmt: skip
    if shaped:
        how = "as much as from the other side" if share >= _MOST else "a part of what it does from the other side"
        likelihood = SHAPE if share >= _MOST else HINT
        summary = f"in another batch a side differs from itself, {how}"
        findings.append(Finding("batch-shape", likelihood, summary, shaped, [
            "a batch-invariant mode or kernels on that side; until then no difference below "
            f"{floor:.2g} nats means anything",
        ]))  # fmt: skip
    return findings


def _beside(
    first: Attempt, its: Case, second: Attempt, other: Case
) -> Iterator[tuple[str, str, effect.SideEffect]]:  # fmt: skip
    """(what is another, side, the effect) of sides that may be set beside one another."""
    requested = its.requested, other.requested
    if requested[0]["case_digest"] == requested[1]["case_digest"]:
        kind = "repeat" if requested[0]["submission"] == requested[1]["submission"] else "another order"
    elif _differ_in_batch_alone(*requested):
        kind = "another batch size"
    else:
        return
    for side in SIDES:
        if effect.difference_of_conditions(its.materialized, other.materialized, side) is None:
            yield kind, side, effect.side_effect(second, first, side)


def _differ_in_batch_alone(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    others = {name for name, value in ours["values"].items() if value != theirs["values"][name]}
    same = all(ours[name] == theirs[name] for name in ("operators", "identity", "contract"))
    return same and others == {"batch.size"}
