"""A verdict table as text of at most 120 columns."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

from libxd.plain import WIDTH, Footnotes, number, wrapped
from libxd.rundir import SIDES
from libxd.table import Row, Table

_NO_REPEAT = "Noise floor: not measured (no repeat of the baseline; xd-plan --repeats 1, or make REPEATS=1, plans one)."
_NO_FLOOR = "Noise floor: not measured (no repeat of the baseline was scored beside it)."
#: what a scenario level shows when every verdict of it is as hoped, and what it does not
CLAIMS = {
    "S0": "plumbing only: it says nothing about accelerators, distributed runs, production operators or real models",
    "S1": "a small run of real engines on this device: nothing about other devices, named production engines or scale",
    "S2": "{engines} in this configuration, and in no other",
    "S3": "the milestone configuration, on the hardware and the engines that its attempts name",
}

_CLAIM_OF_IMPORTED = "Scored by others: xd saw tokens, masks and logprobs, and neither engines nor weights nor settings"

_HEAD = ("changed knob", "verdict", "mismatches", "mean", "p99", "max", "side", "mean", "max", "floor")
_RIGHT = (False, False, True, True, True, True, False, True, True, False)
_LEAST = (12, 8, 10, 7, 7, 7, 8, 7, 7, 6)  # widths: so that most tables are laid out alike
_GAP = "  "
_EMPTY = ("",) * len(_HEAD)


def lines(table: Table, style: Callable[[str, str], str] = lambda text, what: text) -> list[str]:
    """A table of at most 120 columns. style(text, what) may colour a padded cell: what is a verdict or a standing."""
    notes = Footnotes()
    rows = [_cells(each, table.name(each), notes) for each in table.rows]
    body = [line for row in rows for line in row]
    full = [cells for cells in body if any(cells[2:])]  # what was not judged runs on over the empty columns
    widths = [max(_LEAST[i], *(len(cells[i]) for cells in (_HEAD, *full))) for i in range(len(_HEAD))]
    widths[0] = max(widths[0], *(len(cells[0]) for cells in body))
    widths[0] = min(widths[0], WIDTH - sum(widths[1:]) - len(_GAP) * (len(widths) - 1))
    left = sum(widths[:3]) + 3 * len(_GAP)
    over = " |training - rollout| ".center(sum(widths[3:6]) + 2 * len(_GAP), "-")
    beside = " effect against the baseline ".center(sum(widths[6:]) + 3 * len(_GAP), "-")
    head = _line(_HEAD, widths)
    out = [*title(table), "", f"{'':{left}}{over}{_GAP}{beside}", head, "-" * len(head)]
    for row in rows:
        names = wrapped_name(row[0][0], widths[0])
        for name, cells in zip_longest(names, row, fillvalue=None):
            out.append(_line((name or "", *(cells or _EMPTY)[1:]), widths, style))
    out += ["", *_legend(table), *notes.lines()]
    return [line.rstrip() for line in out]


def title(table: Table) -> list[str]:
    """Which experiment it is, under which contract, and what its scenario level shows."""
    first = table.rows[0].requested
    bound = first["contract"]
    scenario = "imported" if table.rows[0].is_imported else first["scenario_id"]
    dtype = f"{bound['dtype']}, as declared" if table.rows[0].is_imported else bound["dtype"]
    named = (
        f"{first['experiment_id']} ({scenario}): contract {bound['source']} version {bound['version']}, "
        f"threshold {table.threshold:g} nats ({dtype})"
    )
    return [line for text in (named, claim(table.rows)) for line in wrapped(text)]


def claim(rows: list[Row]) -> str:
    """What the scenario level of these rows shows, and what it does not."""
    if rows[0].is_imported:
        return _CLAIM_OF_IMPORTED
    scenario = rows[0].requested["scenario"]
    shown = CLAIMS[scenario["level"]].format(engines=_engines(rows))
    return f"{scenario['level']} on {scenario['device']} shows {shown}"


def _engines(rows: list[Row]) -> str:
    """Which engines the attempts name; a runtime against itself is no comparison of two."""
    sides = (row.attempt.materialized()["sides"] for row in rows if row.attempt is not None)
    named = sorted({tuple(each[side]["runtime"] for side in SIDES) for each in sides})
    said = [
        f"{rollout} as rollout against {training} as training" if rollout != training else f"{rollout} against itself"
        for rollout, training in named
    ]
    return " and ".join(said) or "no engines"


def _cells(row: Row, name: str, notes: Footnotes) -> list[tuple[str, ...]]:
    """The lines of one row: the first with everything, a further one for the effect on the other side."""
    verdict = row.verdict + notes.mark(row.reason)
    if row.comparison is None:
        return [(name, verdict, *[""] * 8)]
    counts, difference = row.comparison["counts"], row.comparison["logprob_difference"]
    judged = (
        f"{counts['mismatches']}/{counts['active']}" if counts else "-",
        *(number(difference[key]) for key in ("mean_absolute", "p99_absolute", "max_absolute")),
    )
    effects = [
        (side, number(effect.mean_absolute), number(effect.max_absolute), mark) for side, effect, mark in row.effects
    ] or [("-", "-", "-", "-")]
    return [(name, verdict, *judged, *effects[0]), *(("",) * 6 + effect for effect in effects[1:])]


def _legend(table: Table) -> list[str]:
    noise = []
    for floors in table.floors:
        times = "1 repeat" if floors.repeats == 1 else f"{floors.repeats} repeats"
        of = "the baseline" if len(table.floors) == 1 else f"baseline {floors.baseline.tried.attempt_id}"
        values = [f"{side} mean {number(f[0])}, max {number(f[1])}" for side, f in floors.sides.items()]
        noise.append(f"Noise floor ({times} of {of}): {'; '.join(values)}.")
    if table.rows[0].is_imported:
        return ["In nats, over active tokens. Nothing is known of a baseline, so no effect is shown."]
    repeated = any(row.is_baseline and row.requested["repeat"] for row in table.rows)
    return [
        "In nats, over active tokens. Effect: |logprob here - logprob of the baseline|, same tokens, same side.",
        *(noise or [_NO_FLOOR if repeated else _NO_REPEAT]),
    ]


def _line(cells: tuple[str, ...], widths: list[int], style: Callable[[str, str], str] | None = None) -> str:
    padded = [f"{c:>{w}}" if right else f"{c:<{w}}" for c, w, right in zip(cells, widths, _RIGHT, strict=True)]
    if style is not None:
        padded[1] = style(padded[1], cells[1].split(" ")[0])
        padded[-1] = style(padded[-1], cells[-1])
    return _GAP.join(padded)


def wrapped_name(text: str, width: int) -> list[str]:
    """Broken after "," and "=" where it must be, and inside a name too long for a line; what follows is indented."""
    if len(text) <= width:
        return [text]
    parts = [
        part if len(part.rstrip()) <= width - 2 else part.replace(".", ".\0").replace("_", "_\0")
        for part in text.replace("=", "=\0").replace(", ", ", \0").split("\0")
    ]
    out = [""]
    for part in "\0".join(parts).split("\0"):
        if out[-1] and len(out[-1]) + len(part.rstrip()) > width - (2 if len(out) > 1 else 0):
            out.append("")
        out[-1] += part
    return [line.rstrip() if index == 0 else f"  {line.rstrip()}" for index, line in enumerate(out)]
