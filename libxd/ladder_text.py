"""A precision ladder as text of at most 120 columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from libxd.ladder import FIGURES, Ladder, Rung
from libxd.plain import Footnotes, number, shortened, value, wrapped
from libxd.rundir import SIDES

_HEAD = ("rollout", "training", "u", "verdict", "tokens", "mean", "p50", "p99", "max")
_BESIDE = ("rollout", "training", "nearer")
_LEFT = (0, 1, 3, 11)  # columns that are words


def lines(ladder: Ladder, others: list[Ladder], style: Callable[[str, str], str] = lambda text, _: text) -> list[str]:
    """One ladder; of its knobs those are named in which it differs from the `others`. style(text, what) may colour the
    answer."""
    beside = any(rung.beside for rung in ladder.rungs)
    notes = Footnotes()
    head = _HEAD + (_BESIDE if beside else ())
    body = [_cells(rung, beside, notes) for rung in ladder.rungs]
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
    over = [(" |training - rollout| ", 5, 9)] + ([(" |side - reference| ", 9, 11)] if beside else [])
    out = [*wrapped(_title(ladder, others)), "", _over(widths, over), _line(head, widths)]
    out += ["-" * len(out[-1]), *(_line(row, widths) for row in body), ""]
    out += wrapped(_fit(ladder))
    out.append(f"Answer: {style(ladder.judgement.answer, ladder.judgement.answer)} ({ladder.judgement.why}).")
    return [line.rstrip() for line in (*out, *notes.lines())]


def apart(differing: dict[str, list[str]], count: int) -> list[str]:
    """A line that says why there are `count` ladders and not one; none where knobs alone tell them apart."""
    if not differing:
        return []
    first, *others = differing
    values = ", ".join(shortened(text, 40) for text in differing[first][:3])
    more = f", and in {len(others)} more: {', '.join(others[:4])}" if others else ""
    return [f"{count} ladders, not one: they differ in {first} ({values}){more}; rungs differ in the dtypes alone"]


def _title(ladder: Ladder, others: list[Ladder]) -> str:
    shared = ladder.rungs[0].shared
    runtimes = " against ".join(f"{shared['runtimes'][side]} as {side}" for side in SIDES)
    differing = [
        f"{knob}={value(held)} ({side})"
        for side in SIDES
        for knob, held in shared["knobs"][side].items()
        if any(other.rungs[0].shared["knobs"][side].get(knob) != held for other in others)
    ]
    return f"{shared['experiment_id']}: {runtimes}" + "".join(f", {each}" for each in differing)


def _cells(rung: Rung, beside: bool, notes: Footnotes) -> tuple[str, ...]:
    cells = [
        *(rung.dtypes[side] for side in SIDES),
        f"2^{round(math.log2(rung.unit_roundoff))}",
        rung.status + notes.mark(rung.reason),
        str(rung.active) if rung.active else "-",
        *(number(rung.figures[name]) for name in FIGURES),
    ]
    if beside:
        cells += [number(rung.beside[side].mean_absolute if rung.beside else None) for side in SIDES]
        cells.append(rung.nearer or "-")
    return tuple(cells)


def _fit(ladder: Ladder) -> str:
    judged = ladder.judgement
    said = ["In nats, over active tokens; u: the unit roundoff of the coarser side."]
    if judged.slope:
        said.append(f"Slope of log mean over log u: {_interval(vars(judged.slope))} (rounding nears 1, a mistake 0).")
    if judged.mean and judged.maximum:
        said.append(
            f"Left on the finest rung: mean {number(judged.mean.left)}, max {number(judged.maximum.left)}; rounding "
            f"may leave {number(judged.mean.allowed)} and {number(judged.maximum.allowed)}."
        )
    return " ".join(said)


def _interval(slope: dict[str, Any]) -> str:
    if slope["low"] is None:
        return f"{slope['value']:.2f}"
    return f"{slope['value']:.2f} [{slope['low']:.2f}, {slope['high']:.2f}]"


def _over(widths: list[int], groups: list[tuple[str, int, int]]) -> str:
    """The line over the head: each group's title over its columns first:last."""
    out = ""
    for title, first, last in groups:
        out = out.ljust(sum(widths[:first]) + 2 * first)
        out += title.center(sum(widths[first:last]) + 2 * (last - first - 1), "-")
    return out


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    pairs = enumerate(zip(cells, widths, strict=True))
    return "  ".join(cell.ljust(width) if i in _LEFT else cell.rjust(width) for i, (cell, width) in pairs)
