"""What a page's parts have in common: escaped text, names of changed knobs, chips, intervals, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from libxd.plain import number, plain
from libxd.plain import value as plain_value
from libxd.report.marks import MARKS, TONES


def text(value: Any) -> str:
    """Text as a person reads it, escaped for any place in HTML: element or quoted attribute."""
    return escape(plain(str(value)))


def value_of(value: Any) -> str:
    """A knob's value; a dash for none."""
    if value is None:
        return "–"
    return escape(plain_value(value))


def logprob(value: float | None) -> str:
    """A logprob, or a difference of two, to a ten-thousandth of a nat; fill values shorter."""
    if value is None:
        return "not finite"
    return (f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}").replace("-", "−", 1)


def changed(case: dict[str, Any]) -> str:
    """What a case changes, each value in bold; an attempt's id where the name has one."""
    if not case["intervention"]:
        return text(case["name"])
    changes = ", ".join(f"<span>{_change(each)}</span>" for each in case["intervention"])
    twice = case["attempt"] if case["attempt"] and case["name"].endswith(f" {case['attempt']}") else ""
    return f'<span class="knob">{changes}</span>{f" {text(twice)}" if twice else ""}'


def _change(change: dict[str, Any]) -> str:
    allowed = " (fallback allowed)" if change["allow_fallback"] else ""
    return f"{text(change['path']).replace('.', '.<wbr>', 1)}=<wbr><b>{value_of(change['value'])}</b>{allowed}"


def chip(verdict: str) -> str:
    """A verdict: sign, word and colour."""
    return f'<span class="chip {TONES.get(verdict, "")}">{MARKS[verdict]} {text(verdict)}</span>'


def spread(found: dict[str, Any] | None) -> str:
    """A value and its interval."""
    if found is None:
        return '<span class="off">–</span>'
    if found["low"] is None:
        return number(found["value"])
    return f"{number(found['value'])} <i>[{number(found['low'])}, {number(found['high'])}]</i>"


def table(caption: str, head: Sequence[tuple[str, str]], rows: Iterable[str], name: str) -> str:
    """A table that can be scrolled sideways by keyboard. head: (what stands there, class); caption is HTML."""
    columns = "".join(f'<th scope="col" class="{kind}">{title}</th>' for title, kind in head)
    return (
        f'<div class="scroll" role="region" aria-label="{text(name)}" tabindex="0"><table>'
        f"<caption><span>{caption}</span></caption><thead><tr>{columns}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def figures(pairs: Iterable[tuple[str, str]], kind: str = "") -> str:
    """Names and values, which are HTML already."""
    body = "".join(f"<div><dt>{text(name)}</dt><dd>{value}</dd></div>" for name, value in pairs)
    return f'<dl class="figures{f" {kind}" if kind else ""}">{body}</dl>'
