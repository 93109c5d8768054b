"""Small plots as SVG, made by hand: nothing in them but the data, two axes and the threshold.

Colours and sizes of text come from the page (page.css) by class. A plot that says something by itself has a title and a
description; one beside the numbers that it shows is hidden from screen readers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_WIDTH, _HEIGHT = 440, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 432, 16, 164  # of the plotted area
_MOST_TICKS = 7


@dataclass(frozen=True)
class Log:
    """A logarithmic axis over whole decades, 10^low to 10^high, onto start to end."""

    low: int
    high: int
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Where a positive value lies; beyond an end, that end."""
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * min(1.0, max(0.0, share))

    def ticks(self, most: int = _MOST_TICKS) -> Iterable[tuple[float, str]]:
        """Every decade, or every so many: place and label."""
        step = max(1, math.ceil((self.high - self.low) / most))
        for exponent in range(self.low, self.high + 1, step):
            yield self(10.0**exponent), _power(exponent)


def decades(values: Iterable[float], least: float = 1e-10) -> tuple[int, int]:
    """The whole decades that hold all positive values; at least one."""
    positive = [max(value, least) for value in values if value > 0 and math.isfinite(value)]
    if not positive:
        return -1, 0
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    return low, max(high, low + 1)


def histogram(
    found: dict[str, Any], base: dict[str, Any] | None, span: tuple[int, int], threshold: float, about: tuple[str, str]
) -> str:
    """How many tokens have which |d|, both axes logarithmic; base: another distribution, as an outline.

    about: title and description.
    """
    x = Log(*span, _LEFT, _RIGHT)
    most = max((*found["counts"], *(base["counts"] if base else ()), 1))
    y = Log(0, max(1, math.ceil(math.log10(most))), _BOTTOM - 6, _TOP)  # one token stands above the axis
    bars = "".join(
        f"M{_n(x(low))} {_BOTTOM}V{_n(y(count))}H{_n(x(high))}V{_BOTTOM}z" for low, high, count in _bins(found) if count
    )
    parts = [*_frame(x, y, "|d|, nats", "tokens"), f'<path class="bar" d="{bars}"/>']
    if base:
        parts.append(f'<path class="base" d="{_outline(base, x, y)}"/>')
    return _figure([*parts, *_limit(x, threshold)], about)


def positions(found: dict[str, Any], threshold: float, about: tuple[str, str]) -> str:
    """Mean and largest |d| against the position in the sequence; |d| on a logarithmic axis."""
    last = found["first"] + found["width"] * len(found["counts"])
    span = max(last - found["first"], 1)
    values = [value for name in ("mean", "max") for value in found[name] if value]
    y = Log(*decades([*values, threshold]), _BOTTOM, _TOP)

    def x(position: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (position - found["first"]) / span

    centres = [x(found["first"] + found["width"] * (index + 0.5)) for index in range(len(found["counts"]))]
    lines = [f'<path class="{name}" d="{_line(centres, found[name], y)}"/>' for name in ("max", "mean")]
    ticks = "".join(
        f'<text x="{_n(x(at))}" y="{_BOTTOM + 14}" text-anchor="{anchor}">{at}</text>'
        for at, anchor in ((found["first"], "start"), (last, "end"))
    )
    limit = y(threshold) if threshold else 0
    rule = (
        f'<path class="limit" d="M{_LEFT} {_n(limit)}H{_RIGHT}"/>'
        f'<text class="limit" x="{_RIGHT}" y="{_n(limit - 4)}" text-anchor="end">threshold</text>'
    )
    parts = [*_y_axis(y, "|d|, nats"), _x_label("position in the sequence"), ticks, *lines, rule if limit else ""]
    return _figure(parts, about)


def whisker(found: dict[str, Any], axis: Log, noise: float | None) -> str:
    """A value and its interval on one row's axis, the noise floor as a line; 0 stands left of the axis."""
    parts = [f'<path class="grid" d="M{_n(axis.start)} 12H{_n(axis.end)}"/>']
    if noise:
        parts.append(f'<path class="noise" d="M{_n(axis(noise))} 1V23"/>')
    if found["value"] <= 0:
        parts.append('<circle class="none" cx="6" cy="12" r="3.5"/>')
    else:
        if found["low"] is not None and found["low"] > 0:
            parts.append(f'<path class="span" d="M{_n(axis(found["low"]))} 12H{_n(axis(found["high"]))}"/>')
        parts.append(f'<circle class="dot" cx="{_n(axis(found["value"]))}" cy="12" r="3"/>')
    return f'<svg class="row" viewBox="0 0 {_n(axis.end + 16)} 24" aria-hidden="true">{"".join(parts)}</svg>'


def scale(axis: Log) -> str:
    """The labels of a row's axis, for the head of its column."""
    labels = "".join(f'<text x="{_n(at)}" y="14" text-anchor="middle">{label}</text>' for at, label in axis.ticks(4))
    return (
        f'<svg class="row" viewBox="0 0 {_n(axis.end + 16)} 24" aria-hidden="true">'
        f'<text x="6" y="14" text-anchor="middle">0</text>{labels}</svg>'
    )


def _figure(parts: Iterable[str], about: tuple[str, str]) -> str:
    title, description = (escape(text) for text in about)
    body = "".join(parts)
    return (
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f"<title>{title}</title><desc>{description}</desc>{body}</svg>"
    )


def _frame(x: Log, y: Log, below: str, beside: str) -> list[str]:
    ticks = [
        f'<path class="grid" d="M{_n(at)} {_TOP}V{_BOTTOM}"/>'
        f'<text x="{_n(at)}" y="{_BOTTOM + 14}" text-anchor="middle">{label}</text>'
        for at, label in x.ticks()
    ]
    return [*ticks, *_y_axis(y, beside), _x_label(below)]


def _y_axis(y: Log, label: str) -> list[str]:
    ticks = [
        f'<path class="grid" d="M{_LEFT} {_n(at)}H{_RIGHT}"/>'
        f'<text x="{_LEFT - 5}" y="{_n(at + 4)}" text-anchor="end">{text}</text>'
        for at, text in y.ticks()
    ]
    return [*ticks, f'<text class="axis" x="{_LEFT}" y="{_TOP - 5}">{escape(label)}</text>']


def _x_label(text: str) -> str:
    return f'<text class="axis" x="{_RIGHT}" y="{_BOTTOM + 30}" text-anchor="end">{escape(text)}</text>'


def _limit(x: Log, threshold: float) -> list[str]:
    if not threshold:
        return []
    at = x(threshold)
    side, beside = ("end", at - 4) if at > (_LEFT + _RIGHT) / 2 else ("start", at + 4)
    return [
        f'<path class="limit" d="M{_n(at)} {_TOP - 4}V{_BOTTOM}"/>',
        f'<text class="limit" x="{_n(beside)}" y="{_TOP - 5}" text-anchor="{side}">threshold</text>',
    ]


def _bins(found: dict[str, Any]) -> Iterable[tuple[float, float, int]]:
    for index, count in enumerate(found["counts"]):
        exponent = found["first_log10"] + index / found["bins_per_decade"]
        yield 10.0**exponent, 10.0 ** (exponent + 1 / found["bins_per_decade"]), count


def _outline(found: dict[str, Any], x: Log, y: Log) -> str:
    path, before = [], _BOTTOM
    for low, high, count in _bins(found):
        at = _n(y(count)) if count else _BOTTOM
        path.append(f"{'L' if path else 'M'}{_n(x(low))} {before if path else _BOTTOM}V{at}H{_n(x(high))}")
        before = at
    return "".join(path) + (f"V{_BOTTOM}" if path else "")


def _line(places: Sequence[float], values: Sequence[float | None], y: Log) -> str:
    """A line through the values that are there; a gap where one is not; 0 lies on the axis."""
    path, on = [], False
    for at, value in zip(places, values, strict=True):
        if value is None:
            on = False
            continue
        path.append(f"{'L' if on else 'M'}{_n(at)} {_n(y(value) if value else y.start)}{'' if on else 'h0'}")
        on = True
    return "".join(path)


def _power(exponent: int) -> str:
    if 0 <= exponent <= 3:
        return str(10**exponent)
    return f'10<tspan dy="-4" class="power">{str(exponent).replace("-", "−")}</tspan>'


def _n(value: float) -> str:
    """A coordinate: a tenth of a unit is finer than any screen."""
    return f"{value:.1f}".removesuffix(".0")
