"""The part of a page that says what each change moved: every effect on one axis, beside the noise floor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from libxd.plain import number
from libxd.report import svg
from libxd.report.words import changed, spread, table

_STANDINGS = {"above": "above", "within": "within", "0": "same bits", "?": "not measured"}
_AXIS = (32.0, 174.0)


def section(value: dict[str, Any]) -> str:
    """Every effect against the baseline, on one axis, with the floor and the change of the difference."""
    found = [(index, case) for index, case in enumerate(value["cases"]) if case["effects"]]
    if not found:
        why = "No case could be set beside a baseline that was judged under the same conditions."
        return f'<section id="effects"><h2>What each change moved</h2><p>{why}</p></section>'
    noise = {side: each for floors in value["floors"] for side, each in floors["sides"].items() if each}
    axis = svg.Log(*svg.decades(_drawn(found, noise)), *_AXIS)
    head = [("Changed knob", ""), ("Side", ""), ("Effect, mean [95 %]", ""), (svg.scale(axis), "wide"), ("Floor", ""),
            ("Drift against the baseline", "")]  # fmt: skip
    caption = (
        "Effect: |logprob here − logprob of the baseline|, same tokens, same side, in nats a token; on the axis a dot "
        "with its interval, and a dashed line where the noise floor lies. Drift: by how much mean |training − rollout| "
        "rose or fell."
    )
    rows = (row for index, case in found for row in _rows(index, case, axis, noise))
    body = table(caption, head, rows, "What each change moved")
    return f'<section id="effects"><h2>What each change moved</h2>{body}</section>'


def _drawn(found: list[tuple[int, dict[str, Any]]], noise: dict[str, Any]) -> Iterator[float]:
    for _, case in found:
        for effect in case["effects"]:
            mean = effect["mean_absolute"]
            yield from (each for each in (mean or {}).values() if each is not None)
    yield from (each["mean_absolute"] for each in noise.values())


def _rows(index: int, case: dict[str, Any], axis: svg.Log, noise: dict[str, Any]) -> Iterator[str]:
    count = len(case["effects"])
    for number_, effect in enumerate(case["effects"]):
        mean = effect["mean_absolute"]
        floor = noise[effect["side"]]["mean_absolute"] if effect["side"] in noise else None
        first = last = ""
        if not number_:
            first = f'<th scope="rowgroup" rowspan="{count}"><a href="#case-{index}">{changed(case)}</a></th>'
            last = f'<td class="ci" rowspan="{count}">{_nearer(case["change_of_difference"])}</td>'
        plot = svg.whisker(mean, axis, floor) if mean else ""
        yield (
            f'<tr>{first}<td>{effect["side"]}</td><td class="ci">{spread(mean)}</td><td class="wide">{plot}</td>'
            f'<td class="still">{_STANDINGS[effect["standing"]]}</td>{last}</tr>'
        )


def _nearer(change: dict[str, Any] | None) -> str:
    """The change of mean |training - rollout|, and in a word what it is where that is sure."""
    if change is None:
        return spread(None)
    sure = change["low"] is not None and not change["low"] <= 0 <= change["high"]
    word = f"<b>{'nearer' if change['value'] < 0 else 'further apart'}</b>" if sure else ""
    sign = "−" if change["value"] < 0 else "+" if change["value"] > 0 else ""
    low, high = (_signed(change[name]) for name in ("low", "high"))
    span = f" <i>[{low}, {high}]</i>" if low is not None else ""
    return f"{sign}{number(abs(change['value']))}{span}{word}"


def _signed(value: float | None) -> str | None:
    """A number with a minus of the width of a plus."""
    return None if value is None else f"{'−' if value < 0 else ''}{number(abs(value))}"
