"""The verdict table: what each case's change did, from attempts judged, refused or left off. Nothing is re-judged.

With a plan beside the attempts, each of its rows is in the table: one without an attempt is "missing". `table_text`
writes it down.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from libxd import canon, contract, knobs, planner, verdict
from libxd.effect import SideEffect, difference_of_conditions, floor, side_effect, standing
from libxd.errors import XdError
from libxd.plain import plain, value
from libxd.records import Case
from libxd.rundir import SIDES, Attempt

_UNANSWERED = "no attempt that was given answers this row"
#: what an importer did not declare, by what a verdict then has no word of; all else there is of the tokens
_UNDECLARED = {"weights_before": "the checkpoint", "weights_after": "the checkpoint", "semantics": "the semantics"}


@dataclass(eq=False)
class Row:
    """One attempt, or a plan's row without one.

    verdict: a status of comparison.json, or "unsupported", "refused", "incomplete", "missing" with a reason.
    """

    attempt: Attempt | None
    requested: dict[str, Any]
    verdict: str
    reason: str = ""
    comparison: dict[str, Any] | None = None
    effects: list[tuple[str, SideEffect, str]] = field(default_factory=list)  # side, effect, its standing
    beside: dict[str, Row] = field(default_factory=dict)  # side -> the baseline that its effect is against

    @property
    def tried(self) -> Attempt:
        """The attempt of a row that was judged, which has one."""
        assert self.attempt is not None
        return self.attempt

    @property
    def is_baseline(self) -> bool:
        """Whether nothing is changed: the baseline, or a repeat of it."""
        return not self.requested["intervention"] and not self.is_imported

    @property
    def is_imported(self) -> bool:
        """Whether somebody else had scored: what was changed is unknown, and there is no baseline."""
        return self.requested["strategy"] == planner.IMPORTED

    @property
    def changed(self) -> str:
        """What the case changes against the baseline; of an imported attempt, its name."""
        if self.is_imported:
            return plain(self.requested["scenario_id"])
        repeat, submission = self.requested["repeat"], self.requested["submission"]
        name = ", ".join(map(_change, self.requested["intervention"])) or "baseline"
        name = name if not repeat else f"{name} repeat {repeat}"
        return name if submission == "canonical" else f"{name} ({submission})"

    @property
    def sides(self) -> tuple[str, ...]:
        """The sides that the change bears on; both for a repeat."""
        changed = [knobs.CATALOG[change["path"]].sides for change in self.requested["intervention"]]
        return tuple(side for side in SIDES if not changed or any(side in sides for sides in changed))


@dataclass
class Floors:
    """The noise floors beside one baseline: side -> floor, from so many repeats of it."""

    baseline: Row
    repeats: int
    sides: dict[str, tuple[float, float]]


@dataclass
class Table:
    """The rows of one experiment under one contract, in the order given; a baseline's floors where it was repeated."""

    rows: list[Row]
    floors: list[Floors] = field(default_factory=list)

    @property
    def threshold(self) -> float:
        """Of the contract, in nats."""
        first = self.rows[0].requested
        bound = first["contract"]
        return contract.from_row(bound, str(self.rows[0].attempt or first["case_id"])).threshold(bound["dtype"])

    def name(self, row: Row) -> str:
        """What a row changed, with the attempt's id where the table holds several attempts at the same thing."""
        twice = sum(other.changed == row.changed for other in self.rows) > 1
        return f"{row.changed} {row.attempt.attempt_id}" if twice and row.attempt else row.changed


def read(attempt: Attempt) -> Row:
    """An attempt as a row, without its effect."""
    case = Case.read(attempt)
    requested = case.requested
    if refusal := attempt.refusal():
        return Row(attempt, requested, "unsupported" if refusal.unsupported else "refused", plain(refusal.text()))
    if not attempt.has("comparison.json"):
        return Row(attempt, requested, "incomplete", "not every stage has run")
    comparison = verdict.read(attempt, case)
    violations = comparison["violations"]
    trouble = []
    if requested["strategy"] == planner.IMPORTED:
        undeclared = [v for v in violations if v["expected"] is None]
        violations = [v for v in violations if v["expected"] is not None]
        names = dict.fromkeys(_UNDECLARED.get(v["path"].rpartition("/")[2], "the prompts") for v in undeclared)
        trouble = [f"nobody declared {' and '.join(names)}"] if names else []
    trouble += [f"{v['code']} ({v['path']})" for v in violations]
    trouble += [f"{p['side']}: {p['detail']}" for p in comparison["artifact_problems"]]
    more = f" and {len(trouble) - 3} more" if len(trouble) > 3 else ""
    reason = "; ".join(trouble[:3]) + more
    if not comparison["status"].startswith("INVALID"):
        unseen = [_not_shown(attempt, side) for side in SIDES]
        if requested["strategy"] == planner.IMPORTED:
            unseen = ["as declared, for an import shows tokens, masks and logprobs alone"]
        reason = "; ".join(filter(None, (reason, *unseen)))
    return Row(attempt, requested, comparison["status"], plain(reason), comparison)


def _not_shown(attempt: Attempt, side: str) -> str:
    """What one side never showed and the verdict takes as declared, in a few words; "" where there is nothing."""
    readback = attempt.readback(side)
    unseen = [name for name, value in readback["observed"].items() if value is None]
    unseen += [knob["knob"] for knob in readback["knobs"] if knob["status"] == "unobservable"]
    return f"{side}: as declared, for it was not shown: {', '.join(unseen)}" if unseen else ""


def planned(rows: list[Row], plan: Iterable[dict[str, Any]]) -> list[Row]:
    """`rows` in the order of a plan, and among them a "missing" one for each row of the plan that has no attempt.

    plan: rows as `planner.read_row` gives them. What is in no plan keeps its order, at the end.
    """

    def key(requested: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(requested[name] for name in ("experiment_id", "case_id", "repeat", "submission"))

    left: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        left.setdefault(key(row.requested), []).append(row)
    out: list[Row] = []
    for requested in plan:
        out += left.pop(key(requested), None) or [Row(None, requested, "missing", _UNANSWERED)]
    return out + [row for members in left.values() for row in members]


def tables(rows: list[Row]) -> list[Table]:
    """Rows by experiment and contract, each with its effects against the group's baseline and its noise floor.

    Imported attempts of one experiment, such as the steps of a training run, are one table.
    """
    groups: dict[bytes, list[Row]] = {}
    for row in rows:
        about = [row.requested[key] for key in ("experiment_id", "scenario", "contract")]
        about.append(None if row.is_imported else row.requested["scenario_id"])
        groups.setdefault(canon.dumps(about), []).append(row)
    return [_with_effects(_in_order(members)) for members in groups.values()]


def _in_order(rows: list[Row]) -> list[Row]:
    """Planned rows as they were given; imported ones, which no plan puts in order, by name, step 2 before step 10."""
    if not rows[0].is_imported:
        return rows

    def natural(row: Row) -> list[str | int]:
        return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", row.changed))]

    return sorted(rows, key=natural)


def _with_effects(rows: list[Row]) -> Table:
    """Each side of a row beside the first baseline that was scored under the same conditions.

    An INVALID attempt has no effect and is no baseline; a further attempt at the baseline is no repeat.
    """
    sound = [row for row in rows if row.comparison is not None and not row.verdict.startswith("INVALID")]
    baselines = [row for row in sound if row.is_baseline and not row.requested["repeat"]]
    invalid = [row.verdict for row in rows if row.is_baseline and row not in baselines and row.comparison is not None]
    found: dict[int, list[tuple[Row, dict[str, SideEffect]]]] = {}
    for row in sound:
        found[id(row)] = _effects(row, baselines, invalid)
    table = Table(rows, [floors for each in baselines if (floors := _floors(each, sound, found))])
    noise = {id(floors.baseline): floors.sides for floors in table.floors}
    for row in sound:
        row.beside = {side: baseline for baseline, sides in found[id(row)] for side in sides}
        row.effects = [
            (side, measured, standing(measured, noise.get(id(baseline), {}).get(side)))
            for baseline, sides in found[id(row)]
            for side, measured in sides.items()
        ]
    return table


def _effects(row: Row, baselines: list[Row], invalid: list[str]) -> list[tuple[Row, dict[str, SideEffect]]]:
    """(baseline, side -> effect), a side at a time; why there is none goes into the row's reason."""
    effects: list[tuple[Row, dict[str, SideEffect]]] = []
    why: list[str] = []
    others = [other for other in baselines if other is not row]
    for side in row.sides:
        reasons = [_why_not_beside(row, other, side) for other in others]
        if None in reasons:
            baseline = others[reasons.index(None)]
            try:
                effects.append((baseline, {side: side_effect(row.tried, baseline.tried, side)}))
            except XdError as error:
                why.append(error.issues[0].message)
        elif row not in baselines:
            why += [f"{side}: the baseline was scored with {reason}" for reason in reasons[:1]]
            why += [f"the baseline is {verdict}" for verdict in invalid[:1] if not reasons]
    row.reason = "; ".join(dict.fromkeys(filter(None, (row.reason, *(f"no effect: {text}" for text in why)))))
    return effects


def _why_not_beside(row: Row, baseline: Row, side: str) -> str | None:
    """Why the effect would not be that of the change alone; None: it is."""
    changes = {change["path"]: change["value"] for change in row.requested["intervention"]}
    wanted = baseline.requested["values"] | changes
    others = [knob for knob, value in row.requested["values"].items() if value != wanted[knob]]
    if others:
        return f"another {others[0]}"
    if "logp.backend" not in changes and row.requested["operators"] != baseline.requested["operators"]:
        return "other operators"
    ours, theirs = (each.tried.materialized() for each in (row, baseline))
    return difference_of_conditions(theirs, ours, side)


def _floors(baseline: Row, rows: list[Row], found: dict[int, list[tuple[Row, dict[str, SideEffect]]]]) -> Floors | None:
    """From the effects of this baseline's repeats; None without any."""
    repeats = [
        [sides for beside, sides in found[id(row)] if beside is baseline]
        for row in rows
        if row.is_baseline and row.requested["repeat"]
    ]
    measured = {side: floor([sides[side] for each in repeats for sides in each if side in sides]) for side in SIDES}
    known = {side: noise for side, noise in measured.items() if noise}
    return Floors(baseline, sum(map(bool, repeats)), known) if known else None


def _change(change: dict[str, Any]) -> str:
    allowed = " (fallback allowed)" if change["allow_fallback"] else ""
    return f"{change['path']}={value(change['value'])}{allowed}"
