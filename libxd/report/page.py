"""A report as one HTML file: no network, no framework, readable without its script, in light, in dark and on paper."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

from libxd import __version__
from libxd.plain import number
from libxd.report import answer, effects, svg
from libxd.report.case import section
from libxd.report.words import changed, chip, figures, table, text

_STATES = {
    "good": ("✓", "No difference beyond the threshold"),
    "bad": ("≠", "Rollout and training differ"),
    "invalid": ("✕", "Not comparable"),
    "nothing": ("∅", "No verdict"),
}


def html(value: dict[str, Any]) -> str:
    """The whole file."""
    style, script = (files(__package__).joinpath(name).read_text() for name in ("page.css", "page.js"))
    allowed = f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    policy = f"default-src 'none'; img-src data:; {allowed}; base-uri 'none'; form-action 'none'"
    title = text(value["experiment_id"])
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">\n'
        f'<link rel="icon" href="data:,"><title>{title}: {text(value["answer"]["what"])}</title>\n'
        f"<style>{style}</style></head>\n<body>\n" + "\n".join(_body(value)) + f"\n<script>{script}</script>\n"
        "</body></html>\n"
    )


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _body(value: dict[str, Any]) -> Iterator[str]:
    yield '<a class="skip" href="#main">To the report</a>'
    yield _header(value)
    yield '<main id="main">'
    yield _answer(value)
    yield _navigation(value)
    yield _verdicts(value)
    yield effects.section(value)
    yield _cases(value)
    yield _conditions(value)
    yield _reading(value)
    yield "</main>"
    yield f'<footer><p>xd {text(__version__)}. The same evidence gives this file, byte for byte.</p></footer>'


def _header(value: dict[str, Any]) -> str:
    bound, identity, scenario = value["contract"], value["identity"], value["scenario"]
    facts = [
        ("Contract", f"{text(bound['source'])} version {text(bound['version'])}"),
        ("Threshold", f"{value['threshold']:g} nats ({text(bound['dtype'])})"),
        ("Sequences", _given(identity["num_sequences"])),
        ("Active tokens", _given(identity["num_active"])),
        ("Level", f"{scenario['level']} on {scenario['device']}" if scenario else "imported"),
    ]
    listed = "".join(f"<div><dt>{name}</dt><dd>{said}</dd></div>" for name, said in facts)
    return (
        f'<header><h1>{text(value["experiment_id"])} <small>{text(value["scenario_id"] or "")}</small></h1>'
        f'<dl class="facts">{listed}</dl></header>'
    )


def _given(value: int | str | None) -> str:
    return "not at hand, or not one" if value is None else text(value)


def _answer(value: dict[str, Any]) -> str:
    found = value["answer"]
    mark, word = _STATES[found["state"]]
    link = _linker(value)
    which = "".join(_group(each, link) for each in found["which"])
    sure = "".join(f"<li>{link(each)}</li>" for each in found["sure"])
    return (
        f'<section id="answer" class="answer {found["state"]}" aria-label="Answer">'
        f'<p class="state"><span aria-hidden="true">{mark}</span> {word}</p><p class="what">{text(found["what"])}</p>'
        f'<div class="columns"><div><h2>Which knob</h2>{which}</div>'
        f'<div class="sure"><h2>How sure</h2><ul>{sure}</ul></div></div></section>'
    )


def _group(found: dict[str, Any], link: Callable[[str], str]) -> str:
    """A sentence and the cases that it is about."""
    more = f'<li><a href="#effects">and {found["more"]} more</a></li>' if found["more"] else ""
    cases = "".join(f"<li>{link(each['case'])} <span>{text(each['said'])}</span></li>" for each in found["cases"])
    return f"<p>{text(found['said'])}</p>" + (f"<ul>{cases}{more}</ul>" if cases else "")


def _linker(value: dict[str, Any]) -> Callable[[str], str]:
    """What makes of a sentence HTML in which each changed knob leads to its case."""
    places = {text(case["name"]): index for index, case in enumerate(value["cases"]) if case["intervention"]}
    names = sorted(places, key=len, reverse=True)
    found = re.compile("|".join(map(re.escape, names))) if names else None

    def link(match: re.Match[str]) -> str:
        return f'<a class="knob" href="#case-{places[match[0]]}">{match[0]}</a>'

    return lambda sentence: found.sub(link, text(sentence)) if found else text(sentence)


def _navigation(value: dict[str, Any]) -> str:
    places = [("verdicts", "Verdicts"), ("effects", "What each change moved"), ("cases", "Case by case"),
              ("conditions", "Environments"), ("reading", "How to read it")]  # fmt: skip
    links = "".join(f'<a href="#{place}">{name}</a>' for place, name in places)
    return f'<nav aria-label="Sections">{links}</nav>'


def _verdicts(value: dict[str, Any]) -> str:
    head = [("Changed knob", ""), ("Verdict", ""), ("Mismatches", "n"), ("Mean", "n"), ("p99", "n wide"), ("Max", "n")]
    caption = "|training − rollout| over active tokens, in nats. A mismatch is an active token beyond the threshold."
    rows = (_verdict(index, case) for index, case in enumerate(value["cases"]))
    return f'<section id="verdicts"><h2>Verdicts</h2>{table(caption, head, rows, "Verdicts")}</section>'


def _verdict(index: int, case: dict[str, Any]) -> str:
    name = f'<th scope="row"><a href="#case-{index}">{changed(case)}</a></th><td>{chip(case["verdict"])}'
    counts, difference = case["counts"], case["logprob_difference"]
    if counts is None:
        return f'<tr>{name}</td><td colspan="4" class="off">{text(case["reason"])}</td></tr>'
    bar = ""
    if counts["active"] and not case["verdict"].startswith("INVALID"):
        share = counts["mismatches"] / counts["active"]
        bar = (
            '<svg class="share" viewBox="0 0 60 8" aria-hidden="true"><rect width="60" height="8"/>'
            f'<rect width="{60 * share:.1f}" height="8"/></svg>'
        )
    figures = "".join(
        f'<td class="n{wide}">{number(difference[key])}</td>'
        for key, wide in (("mean_absolute", ""), ("p99_absolute", " wide"), ("max_absolute", ""))
    )
    reason = f'<p class="note">{text(case["reason"])}</p>' if case["reason"] else ""
    return f'<tr>{name}{reason}</td><td class="n">{counts["mismatches"]}/{counts["active"]}{bar}</td>{figures}</tr>'


def _cases(value: dict[str, Any]) -> str:
    base = answer.baseline(value["cases"])
    first = base or value["cases"][0]
    spans = [case["distribution"] for case in value["cases"] if case["distribution"] and case["distribution"]["counts"]]
    edges = [found["first_log10"] for found in spans]
    ends = [found["first_log10"] + len(found["counts"]) / found["bins_per_decade"] for found in spans]
    axis = svg.decades([10.0 ** each for each in (*edges, *ends)] + ([value["threshold"]] if spans else []))
    sections = "".join(
        section(index, case, value["threshold"], None if case is base else base, axis, opened=case is first)
        for index, case in enumerate(value["cases"])
    )
    buttons = "".join(
        f'<button type="button" data-open="{state}" hidden>{word}</button>'
        for state, word in (("true", "Open all"), ("false", "Close all"))
    )
    return f'<section id="cases"><div class="bar-of-cases"><h2>Case by case</h2>{buttons}</div>{sections}</section>'


def _conditions(value: dict[str, Any]) -> str:
    """Environments: where cases differ, then the two sides beside one another."""
    found = value["conditions"]
    if found["differing"]:
        rows = (
            f'<tr><th scope="rowgroup" class="mono">{text(entry["path"])}</th><td>{entry["side"]}</td><td>'
            + "<br>".join(map(_valued, entry["values"]))
            + "</td></tr>"
            for entry in found["differing"]
        )
        head = [("Condition", ""), ("Side", ""), ("Values", "")]
        caption = "An effect across such a difference is not the knob's alone."
        first = table(caption, head, rows, "Differences between cases")
    else:
        first = "<p>Every case was scored in the same environment, side by side.</p>"
    paths = sorted(found["rollout"].keys() | found["training"].keys())
    rows = (_condition(path, found["rollout"].get(path), found["training"].get(path)) for path in paths)
    head = [("Condition", ""), ("Rollout", ""), ("Training", "")]
    both = table("Of the first attempt; in bold where the two sides differ.", head, rows, "Both sides")
    return (
        f'<section id="conditions"><h2>Environments</h2>{first}'
        f"<details><summary>The two sides beside one another</summary>{both}</details></section>"
    )


def _valued(found: dict[str, Any]) -> str:
    said = text(found["value"]) if found["value"] is not None else "not set"
    return f"<b>{said}</b> in {text(', '.join(found['cases']))}"


def _condition(path: str, rollout: str | None, training: str | None) -> str:
    cells = [text(each) if each is not None else '<span class="off">not set</span>' for each in (rollout, training)]
    if rollout != training:
        cells = [f"<b>{each}</b>" for each in cells]
    return f'<tr><th scope="row" class="mono">{text(path)}</th><td>{"</td><td>".join(cells)}</td></tr>'


def _meant(semantics: dict[str, Any] | None) -> str:
    """Which logprob both sides were to give."""
    if semantics is None:
        return "logprobs of which nobody declares what they mean"
    named = (("temperature", "temperature"), ("top-p", "top_p"), ("top-k", "top_k"))
    settings = ", ".join(f"{name} {semantics[key]:g}" for name, key in named)
    return f"{semantics['logprobs']} logprobs at {settings}"


def _reading(value: dict[str, Any]) -> str:
    identity, semantics = value["identity"], value["identity"]["semantics"]
    digests = [
        (name, _given(identity[name])) for name in ("checkpoint", "tokenizer", "sequences")
    ]
    mode = identity["rollout_mode"] or "not declared"
    weights = (identity["model_state"] or "of several states").replace("_", "-")
    scored = f"{_meant(semantics)}; rollout mode {mode}; weights {weights}"
    said = [
        "A verdict says whether the two sides agree within the contract's threshold. What a knob did is its effect: "
        "the same side of two cases, token by token, against the noise floor, which is what a repeat of the baseline "
        "moves.",
        "Intervals hold 95 % of bootstrap draws over whole sequences, the same draws for a case and the baseline. Each "
        "is of one case, and none is corrected for how many cases there are.",
        f"Both sides had to score {scored}.",
        *(["Texts and ids of tokens were left out (--redact)."] if value["redacted"] else []),
    ]
    check = (
        "To check it: <code>xd-seal --verify ATTEMPT</code> (untampered), <code>xd-compare ATTEMPT</code> (the same "
        "verdict), <code>xd-compare --against BASELINE ATTEMPT</code> (the same effect)."
    )
    notes = "".join(f"<p>{text(each)}</p>" for each in said)
    return (
        f'<section id="reading"><h2>How to read it</h2><div class="note">{notes}<p>{check}</p></div>'
        f"<h3>Digests of what was scored</h3>{figures(digests, 'digests')}</section>"
    )
