"""The verdict table: what each case's change did, from attempts judged, refused or left off. Nothing is re-judged.

With a plan beside the attempts, each of its rows is in the table: one without an attempt is "missing".
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from libxd import canon, contract, knobs, verdict
from libxd.effect import SideEffect, difference_of_conditions, floor, side_effect, standing
from libxd.errors import XdError
from libxd.plain import plain
from libxd.records import Case
from libxd.rundir import SIDES, Attempt

WIDTH = 120
_UNANSWERED = "no attempt that was given answers this row"
#: what a scenario level shows when every verdict of it is as hoped, and what it does not
CLAIMS = {
    "S0": "plumbing only: it says nothing about accelerators, distributed runs, production operators or real models",
    "S1": "a small run of real engines on this device: nothing about other devices, named production engines or scale",
    "S2": "{engines} in this configuration, and in no other",
    "S3": "the milestone configuration, on the hardware and the engines that its attempts name",
}


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

    @property
    def is_baseline(self) -> bool:
        """Whether nothing is changed: the baseline, or a repeat of it."""
        return not self.requested["intervention"]

    @property
    def changed(self) -> str:
        """What the case changes against the baseline."""
        if not self.is_baseline:
            return ", ".join(map(_change, self.requested["intervention"]))
        repeat, submission = self.requested["repeat"], self.requested["submission"]
        name = "baseline" if not repeat else f"baseline repeat {repeat}"
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


def read(attempt: Attempt) -> Row:
    """An attempt as a row, without its effect."""
    case = Case.read(attempt)
    requested = case.requested
    if refusal := attempt.refusal():
        return Row(attempt, requested, "unsupported" if refusal.unsupported else "refused", plain(refusal.text()))
    if not attempt.has("comparison.json"):
        return Row(attempt, requested, "incomplete", "not every stage has run")
    comparison = verdict.read(attempt, case)
    trouble = [f"{v['code']} ({v['path']})" for v in comparison["violations"]]
    trouble += [f"{p['side']}: {p['detail']}" for p in comparison["artifact_problems"]]
    more = f" and {len(trouble) - 3} more" if len(trouble) > 3 else ""
    return Row(attempt, requested, comparison["status"], plain("; ".join(trouble[:3]) + more), comparison)


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
    """Rows by experiment and contract, each with its effects against the group's baseline and its noise floor."""
    groups: dict[bytes, list[Row]] = {}
    for row in rows:
        about = [row.requested[key] for key in ("experiment_id", "scenario_id", "scenario", "contract")]
        groups.setdefault(canon.dumps(about), []).append(row)
    return [_with_effects(members) for members in groups.values()]


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
                effects.append((baseline, {side: side_effect(_attempt(row), _attempt(baseline), side)}))
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
    ours, theirs = (_attempt(each).materialized() for each in (row, baseline))
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


def _attempt(row: Row) -> Attempt:
    assert row.attempt is not None  # what was judged has one
    return row.attempt


# -- as text

_HEAD = ("changed knob", "verdict", "mismatches", "mean", "p99", "max", "side", "mean", "max", "floor")
_RIGHT = (False, False, True, True, True, True, False, True, True, False)
_LEAST = (12, 8, 10, 7, 7, 7, 8, 7, 7, 6)  # widths: so that most tables are laid out alike
_GAP = "  "
_EMPTY = ("",) * len(_HEAD)


def lines(table: Table, style: Callable[[str, str], str] = lambda text, what: text) -> list[str]:
    """A table of at most 120 columns. style(text, what) may colour a padded cell: what is a verdict or a standing."""
    notes: list[str] = []
    rows = [_cells(each, _name(each, table.rows), notes) for each in table.rows]
    body = [line for row in rows for line in row]
    full = [cells for cells in body if any(cells[2:])]  # what was not judged runs on over the empty columns
    widths = [max(_LEAST[i], *(len(cells[i]) for cells in (_HEAD, *full))) for i in range(len(_HEAD))]
    widths[0] = max(widths[0], *(len(cells[0]) for cells in body))
    widths[0] = min(widths[0], WIDTH - sum(widths[1:]) - len(_GAP) * (len(widths) - 1))
    left = sum(widths[:3]) + 3 * len(_GAP)
    over = " |training - rollout| ".center(sum(widths[3:6]) + 2 * len(_GAP), "-")
    beside = " effect against the baseline ".center(sum(widths[6:]) + 3 * len(_GAP), "-")
    head = _line(_HEAD, widths)
    out = [*_title(table), "", f"{'':{left}}{over}{_GAP}{beside}", head, "-" * len(head)]
    for row in rows:
        names = _wrap(row[0][0], widths[0])
        for name, cells in zip_longest(names, row, fillvalue=None):
            out.append(_line((name or "", *(cells or _EMPTY)[1:]), widths, style))
    out += ["", *_legend(table)]
    for number, note in enumerate(notes, 1):
        out += textwrap.wrap(f"[{number}] {note}", WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    return [line.rstrip() for line in out]


def _title(table: Table) -> list[str]:
    first = table.rows[0].requested
    bound = first["contract"]
    threshold = contract.from_row(bound, str(table.rows[0].attempt or first["case_id"])).threshold(bound["dtype"])
    level = first["scenario"]["level"]
    title = (
        f"{first['experiment_id']} ({first['scenario_id']}): contract {bound['source']} version {bound['version']}, "
        f"threshold {threshold:g} nats ({bound['dtype']})"
    )
    claim = f"{level} on {first['scenario']['device']} shows {CLAIMS[level].format(engines=_engines(table.rows))}"
    return [line for text in (title, claim) for line in textwrap.wrap(plain(text), WIDTH)]


def _engines(rows: list[Row]) -> str:
    """Which engines the attempts name; a runtime against itself is no comparison of two."""
    sides = (row.attempt.materialized()["sides"] for row in rows if row.attempt is not None)
    named = sorted({tuple(each[side]["runtime"] for side in SIDES) for each in sides})
    said = [
        f"{rollout} as rollout against {training} as training" if rollout != training else f"{rollout} against itself"
        for rollout, training in named
    ]
    return " and ".join(said) or "no engines"


def _cells(row: Row, name: str, notes: list[str]) -> list[tuple[str, ...]]:
    """The lines of one row: the first with everything, a further one for the effect on the other side."""
    verdict = row.verdict
    if row.reason:
        if row.reason not in notes:
            notes.append(row.reason)
        verdict += f" [{notes.index(row.reason) + 1}]"
    if row.comparison is None:
        return [(name, verdict, *[""] * 8)]
    counts, difference = row.comparison["counts"], row.comparison["logprob_difference"]
    judged = (
        f"{counts['mismatches']}/{counts['active']}" if counts else "-",
        *(_number(difference[key]) for key in ("mean_absolute", "p99_absolute", "max_absolute")),
    )
    effects = [
        (side, _number(effect.mean_absolute), _number(effect.max_absolute), mark) for side, effect, mark in row.effects
    ] or [("-", "-", "-", "-")]
    return [(name, verdict, *judged, *effects[0]), *(("",) * 6 + effect for effect in effects[1:])]


def _name(row: Row, rows: list[Row]) -> str:
    """What changed, with the attempt's id where the table holds several attempts at the same thing."""
    twice = sum(other.changed == row.changed for other in rows) > 1
    return f"{row.changed} {row.attempt.attempt_id}" if twice and row.attempt else row.changed


def _legend(table: Table) -> list[str]:
    noise = []
    for floors in table.floors:
        times = "1 repeat" if floors.repeats == 1 else f"{floors.repeats} repeats"
        of = "the baseline" if len(table.floors) == 1 else f"baseline {_attempt(floors.baseline).attempt_id}"
        values = [f"{side} mean {_number(f[0])}, max {_number(f[1])}" for side, f in floors.sides.items()]
        noise.append(f"Noise floor ({times} of {of}): {'; '.join(values)}.")
    return [
        "In nats, over active tokens. Effect: |logprob here - logprob of the baseline|, same tokens, same side.",
        *(noise or ["Noise floor: not measured (no repeat of the baseline; xd-plan --repeats 1 plans one)."]),
    ]


def _line(cells: tuple[str, ...], widths: list[int], style: Callable[[str, str], str] | None = None) -> str:
    padded = [f"{c:>{w}}" if right else f"{c:<{w}}" for c, w, right in zip(cells, widths, _RIGHT, strict=True)]
    if style is not None:
        padded[1] = style(padded[1], cells[1].split(" ")[0])
        padded[-1] = style(padded[-1], cells[-1])
    return _GAP.join(padded)


def _wrap(text: str, width: int) -> list[str]:
    """Broken after "," and "=" where it must be; what follows is indented by two."""
    if len(text) <= width:
        return [text]
    parts = text.replace("=", "=\0").replace(", ", ", \0").split("\0")
    out = [""]
    for part in parts:
        if out[-1] and len(out[-1]) + len(part.rstrip()) > width - (2 if len(out) > 1 else 0):
            out.append("")
        out[-1] += part
    return [line.rstrip() if index == 0 else f"  {line.rstrip()}" for index, line in enumerate(out)]


def _number(value: float | None) -> str:
    """Three significant digits; "-" for what is undefined."""
    if value is None:
        return "-"
    mantissa, _, exponent = (f"{value:#.3g}" if value else "0").partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa.rstrip(".")


def _change(change: dict[str, Any]) -> str:
    allowed = " (fallback allowed)" if change["allow_fallback"] else ""
    return f"{change['path']}={_plain(change['value'])}{allowed}"


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else plain(str(value))
