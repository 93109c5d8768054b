"""A report as text of at most 120 columns: the answer, the verdict table, what each change moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from libxd import table_text
from libxd.plain import WIDTH, wrapped
from libxd.report.answer import interval
from libxd.report.content import Report
from libxd.report.words import logprob
from libxd.rundir import SIDES

_HEAD = ("changed knob", "side", "effect", "floor", "drift, change")


def lines(report: Report, style: Callable[[str, str], str] = lambda text, what: text) -> list[str]:
    """The whole of it. style(text, what) may colour a cell or a heading, as in `table_text.lines`."""
    value = report.value
    title, *_ = table_text.title(report.table)
    answer = value["answer"]
    out = [title, "", *(style(line, "heading") for line in wrapped(answer["what"]))]
    out += ["", style("Which knob", "heading")]
    for group in answer["which"]:
        out += wrapped(group["said"], "- ")
        width = max((len(each["case"]) for each in group["cases"]), default=0)
        out += [f"    {each['case'].ljust(width)}  {each['said']}".rstrip() for each in group["cases"]]
        out += [f"    and {group['more']} more"] if group["more"] else []
    out += ["", style("How sure", "heading"), *(line for each in answer["sure"] for line in wrapped(each, "- "))]
    out += ["", *table_text.lines(report.table, style)[len(table_text.title(report.table)) + 1 :]]
    out += _effects(value)
    out += _causes(value)
    out += _worst(value)
    out += _conditions(value)
    return out


def _effects(value: dict[str, Any]) -> list[str]:
    rows = []
    for case in value["cases"]:
        change = case["change_of_difference"]
        for index, effect in enumerate(case["effects"]):
            rows.append((
                case["name"] if not index else "", effect["side"],
                interval(effect["mean_absolute"]) if effect["mean_absolute"] else "-",
                effect["standing"], interval(change) if change and not index else "",
            ))  # fmt: skip
    if not rows:
        return []
    about = (
        "What each change moved, mean and 95 % interval in nats a token. Effect: |logprob here - logprob of the "
        "baseline|. Drift: |training - rollout|, its change against the baseline's; below 0 the two sides are nearer."
    )
    return ["", *wrapped(about), "", *_columns(_HEAD, rows)]


def _causes(value: dict[str, Any]) -> list[str]:
    """What the doctor says of each case that it finds something in."""
    out = []
    for case in value["cases"]:
        for found in case.get("findings", ()):
            out += wrapped(f"{case['name']}: {found['cause']} ({found['likelihood']:g}), {found['summary']}", "- ")
            out += [line for each in (*found["evidence"], *found["next"]) for line in wrapped(each, "    ")]
    return ["", "Candidate causes, most likely first:", *out] if out else []


def _worst(value: dict[str, Any]) -> list[str]:
    """The worst token of each case that has a difference, where it lies and what it says."""
    rows = []
    for case in value["cases"]:
        if (place := case["worst"]) is None or place["rollout_logprob"] == place["training_logprob"]:
            continue
        said = next((_said(strip) for strip in case["strips"] if strip["sequence"] == place["sequence"]), "")
        rows.append((
            case["name"], str(place["sequence"]), str(place["position"]),
            "" if place["token_id"] is None else str(place["token_id"]), said,
            *(logprob(place[f"{side}_logprob"]).replace("−", "-") for side in SIDES),
        ))  # fmt: skip
    if not rows:
        return []
    head = ("worst token of", "sequence", "position", "id", "text", "rollout", "training")
    return ["", *_columns(head, rows)]


def _said(strip: dict[str, Any]) -> str:
    return strip["tokens"][strip["worst"] - strip["first"]]["text"] or ""


def _conditions(value: dict[str, Any]) -> list[str]:
    """Environments that are not the same for all cases."""
    out = []
    for entry in value["conditions"]["differing"]:
        for each in entry["values"]:
            named = ", ".join(each["cases"][:3]) + (f" and {len(each['cases']) - 3} more" if each["cases"][3:] else "")
            out += wrapped(f"{entry['side']} {entry['path']}: {each['value'] or 'not set'} in {named}", "- ")
    return ["", "Environments that differ between cases:", *out] if out else []


def _columns(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A head, a rule and rows; an empty column is left out, the first gives way where the line would be too long."""
    filled = [i for i in range(len(head)) if any(row[i] for row in rows)]
    head, *rows = (tuple(row[i] for i in filled) for row in (head, *rows))
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    widths[0] = max(12, min(widths[0], WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1)))
    out = [_line(head, widths), "-" * min(WIDTH, sum(widths) + 2 * (len(widths) - 1))]
    for row in rows:
        first, *more = table_text.wrapped_name(row[0], widths[0])
        out += [_line((first, *row[1:]), widths), *more]
    return out


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
