"""The verdict table: what each case's change did, from attempts judged, refused or left off. Nothing is re-judged.

With a plan beside the attempts, each of its rows is in the table: one without an attempt is "missing".
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from libxd import canon, contract, knobs
from libxd.effect import SideEffect, floor, side_effect, standing
from libxd.errors import XdError
from libxd.rundir import SIDES, Attempt

WIDTH = 120
#: what a scenario level shows when every verdict of it is as hoped, and what it does not
CLAIMS = {
    "S0": "plumbing only: it says nothing about accelerators, distributed runs, production operators or real models",
    "S1": "a small run of real engines on this device: nothing about other devices, named production engines or scale",
    "S2": "the named rollout and training engines against one another in this configuration, and in no other",
    "S3": "the milestone configuration, on the hardware and the engines that its attempts name",
}


@dataclass
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
    def changed(self) -> str:
        """What the case changes against the baseline."""
        if self.requested["intervention"]:
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
class Table:
    """The rows of one experiment under one contract, in the order given. floors: side -> noise floor, or None."""

    rows: list[Row]
    floors: dict[str, tuple[float, float] | None] = field(default_factory=dict)
    repeats: int = 0


def read(attempt: Attempt) -> Row:
    """An attempt as a row, without its effect."""
    requested = attempt.requested()
    if refusal := attempt.refusal():
        return Row(attempt, requested, "unsupported" if refusal.unsupported else "refused", refusal.text())
    if not attempt.has("comparison.json"):
        return Row(attempt, requested, "incomplete", "not every stage has run")
    comparison = attempt.comparison()
    trouble = [f"{v['code']} ({v['path']})" for v in comparison["violations"]]
    trouble += [f"{p['side']}: {p['detail']}" for p in comparison["artifact_problems"]]
    more = f" and {len(trouble) - 3} more" if len(trouble) > 3 else ""
    return Row(attempt, requested, comparison["status"], "; ".join(trouble[:3]) + more, comparison)


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
        out += left.pop(key(requested), None) or [Row(None, requested, "missing", "the plan's row has no attempt")]
    return out + [row for members in left.values() for row in members]


def tables(rows: list[Row]) -> list[Table]:
    """Rows by experiment and contract, each with its effects against the group's baseline and its noise floor."""
    groups: dict[bytes, list[Row]] = {}
    for row in rows:
        about = [row.requested[key] for key in ("experiment_id", "scenario_id", "scenario", "contract")]
        groups.setdefault(canon.dumps(about), []).append(row)
    return [_with_effects(members) for members in groups.values()]


def _with_effects(rows: list[Row]) -> Table:
    table = Table(rows)
    judged = [row for row in rows if row.comparison is not None]
    baseline = next((row for row in judged if not row.requested["intervention"] and not row.requested["repeat"]), None)
    if baseline is None:
        return table
    seen: dict[int, dict[str, SideEffect]] = {}
    for row in judged:
        if row is not baseline:
            seen[id(row)] = _effects(row, baseline)
    repeats = [seen[id(row)] for row in judged if id(row) in seen and not row.requested["intervention"]]
    table.repeats = len(repeats)
    table.floors = {side: floor([effects[side] for effects in repeats if side in effects]) for side in SIDES}
    for row in judged:
        row.effects = [
            (side, measured, standing(measured, table.floors[side])) for side, measured in seen.get(id(row), {}).items()
        ]
    return table


def _effects(row: Row, baseline: Row) -> dict[str, SideEffect]:
    assert row.attempt is not None and baseline.attempt is not None  # only what was judged has effects
    try:
        return {side: side_effect(row.attempt, baseline.attempt, side) for side in row.sides}
    except XdError as error:
        row.reason = "; ".join(filter(None, (row.reason, f"no effect: {error.issues[0].message}")))
        return {}


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
    claim = f"{level} on {first['scenario']['device']} shows {CLAIMS[level]}"
    return [*textwrap.wrap(title, WIDTH), *textwrap.wrap(claim, WIDTH)]


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
    floors = [f"{side} mean {_number(f[0])}, max {_number(f[1])}" for side, f in table.floors.items() if f]
    if floors:
        times = "1 repeat" if table.repeats == 1 else f"{table.repeats} repeats"
        noise = f"Noise floor ({times} of the baseline): {'; '.join(floors)}."
    else:
        noise = "Noise floor: not measured (no repeat of the baseline; xd-plan --repeats 1 plans one)."
    return [
        "In nats, over active tokens. Effect: |logprob here - logprob of the baseline|, same tokens, same side.",
        noise,
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
    return str(value).lower() if isinstance(value, bool) else str(value)
