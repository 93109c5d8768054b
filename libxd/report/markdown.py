"""A report as Markdown for a comment: the answer, a row a case, the rest folded away."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from libxd.plain import number, plain
from libxd.report.answer import interval
from libxd.report.marks import MARKS

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~&@])")


def lines(value: dict[str, Any]) -> list[str]:
    """The whole of it."""
    answer, bound = value["answer"], value["contract"]
    out = [
        f"### {_text(value['experiment_id'])}: {_text(answer['what'])}", "",
        *(line for group in answer["which"] for line in _group(group)), "",
        *_table(("changed knob", "verdict", "mismatches", "mean", "p99", "max"), map(_verdict, value["cases"])), "",
        _text(f"|training - rollout| in nats over active tokens; contract {bound['source']} version "
              f"{bound['version']}, threshold {value['threshold']:g} nats ({bound['dtype']})."),
    ]  # fmt: skip
    effects = [row for case in value["cases"] for row in _effects(case)]
    if effects:
        head = ("changed knob", "side", "effect, mean [95 %]", "max", "floor", "mean against the baseline's")
        out += ["", *_folded("What each change moved, in nats", _table(head, effects))]
    if causes := [line for case in value["cases"] for line in _causes(case)]:
        out += ["", *_folded("Candidate causes, most likely first", causes)]
    out += ["", *_folded("How sure that is", [f"- {_text(each)}" for each in answer["sure"]])]
    if notes := [f"- **{_text(c['name'])}**: {_text(c['reason'])}" for c in value["cases"] if c["reason"]]:
        out += ["", *_folded("Notes", notes)]
    return out


def _group(group: dict[str, Any]) -> list[str]:
    more = [f"  - and {group['more']} more"] if group["more"] else []
    each = [f"  - {_text(case['case'])} {_text(case['said'])}".rstrip() for case in group["cases"]]
    return [f"- {_text(group['said'])}", *each, *more]


def _verdict(case: dict[str, Any]) -> tuple[str, ...]:
    verdict = f"{MARKS[case['verdict']]} {_text(case['verdict'])}"
    counts, difference = case["counts"], case["logprob_difference"]
    if counts is None:
        return (_text(case["name"]), verdict, "", "", "", "")
    figures = (number(difference[name]) for name in ("mean_absolute", "p99_absolute", "max_absolute"))
    return (_text(case["name"]), verdict, f"{counts['mismatches']}/{counts['active']}", *figures)


def _effects(case: dict[str, Any]) -> list[tuple[str, ...]]:
    change = case["change_of_difference"]
    return [
        (
            _text(case["name"]) if not index else "", effect["side"],
            interval(effect["mean_absolute"]) if effect["mean_absolute"] else "-", number(effect["max_absolute"]),
            effect["standing"], interval(change) if change and not index else "",
        )
        for index, effect in enumerate(case["effects"])
    ]  # fmt: skip


def _causes(case: dict[str, Any]) -> list[str]:
    return [
        line
        for found in case.get("findings", ())
        for line in (f"- {_text(case['name'])}: **{_text(found['cause'])}**, {_text(found['summary'])}",
                     *(f"  - {_text(each)}" for each in (*found["evidence"], *found["next"])))
    ]  # fmt: skip


def _table(head: Sequence[str], rows: Any) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def _folded(title: str, body: list[str]) -> list[str]:
    return [f"<details><summary>{title}</summary>", "", *body, "", "</details>"]


def _text(text: str) -> str:
    """Text that Markdown and HTML take as it is."""
    return _SPECIAL.sub(r"\\\1", plain(text)).replace("\\&", "&amp;").replace("\\<", "&lt;").replace("\\>", "&gt;")
