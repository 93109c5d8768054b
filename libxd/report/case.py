"""One case's part of a page: figures, plots, worst tokens, knobs with their evidence, digests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from libxd.plain import number
from libxd.report import causes, svg
from libxd.report.words import changed, chip, figures, logprob, table, text, value_of

_FIGURES = (
    ("mean, signed", "mean_signed"), ("mean |d|", "mean_absolute"), ("p50 |d|", "p50_absolute"),
    ("p90 |d|", "p90_absolute"), ("p99 |d|", "p99_absolute"), ("p99.9 |d|", "p99_9_absolute"),
    ("max |d|", "max_absolute"),
)  # fmt: skip
_FAR = 10  # times the threshold: of such mismatches is made more


def section(
    index: int,
    case: dict[str, Any],
    threshold: float,
    base: dict[str, Any] | None,
    span: tuple[int, int],
    opened: bool,
) -> str:
    """A fold of the page. base: another case beside which it is drawn; span: decades of |d| that all cases share."""
    body = [f'<p class="note">{text(case["reason"])}</p>' if case["reason"] else ""]
    if case["violations"]:
        listed = "".join(
            f"<li><b>{text(each['code'])}</b> on the {text(each['side'])} side: <code>{text(each['path'])}</code></li>"
            for each in case["violations"]
        )
        body.append(f"<h3>Not what had to be scored</h3><ul>{listed}</ul>")
    body += [f"<h3>Candidate causes</h3>{causes.findings(case['findings'])}"] if "findings" in case else []
    if case["counts"]:
        body += [_plots(case, threshold, base, span), _figures(case)]
        body += [_strips(case, threshold)] if case["strips"] else []
    body += [f"<h3>What it does to an update</h3>{causes.impact(case['impact'])}"] if "impact" in case else []
    body += [_knobs(case)] if case["knobs"] else []
    body += [_digests(case)] if case["digests"] else []
    short = f"mean {number(case['logprob_difference']['mean_absolute'])} nats" if case["counts"] else ""
    return (
        f'<details class="case"{" open" if opened else ""}><summary>{chip(case["verdict"])} '
        f'<span>{changed(case)}</span><span class="off">{short}</span></summary>'
        f'<div id="case-{index}">{"".join(body)}</div></details>'
    )


def _plots(case: dict[str, Any], threshold: float, base: dict[str, Any] | None, span: tuple[int, int]) -> str:
    found, counts, difference = case["distribution"], case["counts"], case["logprob_difference"]
    other = base["distribution"] if base else None
    exact = f"{found['zero']} of {counts['active']} tokens differ by exactly 0" if found["zero"] else ""
    lost = f"{found['nonfinite']} are not finite" if found["nonfinite"] else ""
    outline = "The line is the baseline" if other else ""
    described = (
        f"{counts['active']} active tokens; half are at most {number(difference['p50_absolute'])} apart, 99 % at most "
        f"{number(difference['p99_absolute'])}, all at most {number(difference['max_absolute'])} nats"
    )
    large = svg.histogram(found, other, span, threshold, ("How large the differences are", described))
    where = svg.positions(case["positions"], threshold, ("Difference against position", _trend(case["positions"])))
    said = ". ".join(filter(None, ("How large |d| is, d = training − rollout", outline, exact, lost)))
    return (
        f'<div class="plots"><figure>{large}<figcaption>{said}.</figcaption></figure>'
        f"<figure>{where}<figcaption>|d| against position: mean (thick), largest (thin).</figcaption></figure></div>"
    )


def _trend(found: dict[str, Any]) -> str:
    """First and last third of the positions, in words."""
    pairs = [(mean, count) for mean, count in zip(found["mean"], found["counts"], strict=True) if mean is not None]
    if len(pairs) < 3:
        return "too few positions for a trend"
    third = len(pairs) // 3
    early, late = (
        sum(mean * count for mean, count in part) / sum(count for _, count in part)
        for part in (pairs[:third], pairs[-third:])
    )
    return f"mean difference {number(early)} nats in the first third of the positions, {number(late)} in the last"


def _figures(case: dict[str, Any]) -> str:
    counts, difference, kl, grid = (case[name] for name in ("counts", "logprob_difference", "kl", "value_grid"))
    share = 100 * counts["bitwise_equal"] / counts["active"] if counts["active"] else 0.0
    pairs = [(name, number(difference[key])) for name, key in _FIGURES]
    pairs.append(("bitwise equal", f"{share:.3g} %"))
    pairs += [(f"KL {name}", number(kl[name])) for name in ("k1", "k2", "k3")]
    pairs += [(f"grid of {side}", text(grid[side] or "–")) for side in ("rollout", "training")]
    pairs += [
        (name, f"token {place['position']} of sequence {place['sequence']}")
        for name, place in (("first mismatch", case["first_mismatch"]), ("worst token", case["worst"]))
        if place
    ]
    return f"<h3>Figures, in nats; KL of rollout to training</h3>{figures(pairs)}"


def _strips(case: dict[str, Any], threshold: float) -> str:
    key = "".join(
        f'<span><b class="{kind}">{said}</b></span>'
        for kind, said in (("p", "prompt, or inactive"), ("", "near"), ("u", "over a tenth of the threshold"),
                           ("m", "mismatch"), ("h", "over ten times the threshold"), ("t", "the worst"))
    )  # fmt: skip
    drawn = "".join(_strip(each, threshold) for each in case["strips"])
    return f'<h3>Worst tokens, and what stands around them</h3><p class="key">{key}</p>{drawn}'


def _strip(found: dict[str, Any], threshold: float) -> str:
    last = found["first"] + len(found["tokens"]) - 1
    named = f"Sequence {found['sequence']}, positions {found['first']} to {last} of {found['length']}"
    tokens = "".join(_tokens(found, threshold))
    return (
        f'<figure class="strip"><figcaption>{named}</figcaption><p class="tokens" aria-label="{named}">{tokens}</p>'
        "<output></output></figure>"
    )


def _tokens(found: dict[str, Any], limit: float) -> Iterator[str]:
    for position, token in enumerate(found["tokens"], found["first"]):
        kinds = " ".join(filter(None, (_kind(token, limit), "t" if position == found["worst"] else "")))
        seen = token["text"] if token["text"] is not None else "▪" if token["id"] is None else f"{token['id']} "
        said = [f"position {position}", f"id {token['id']}" if token["id"] is not None else ""]
        if token["active"]:
            said += [f"{side} {logprob(token[side])}" for side in ("rollout", "training")]
            said.append(f"difference {logprob(token['difference'])}{', a mismatch' if token['mismatch'] else ''}")
        else:
            said.append("not active")
        title = " · ".join(filter(None, said))
        yield f'<b{f" class={chr(34)}{kinds}{chr(34)}" if kinds else ""} title="{title}">{text(seen)}</b>'


def _kind(token: dict[str, Any], limit: float) -> str:
    """p: not active; x: not finite; u, m, h: over a tenth of the threshold, over it, over ten times of it."""
    if not token["active"]:
        return "p"
    apart = token["difference"]
    if apart is None:
        return "x"
    if token["mismatch"]:
        return "h" if abs(apart) > _FAR * limit else "m"
    return "u" if abs(apart) > limit / 10 else ""


def _knobs(case: dict[str, Any]) -> str:
    head = [("Knob", ""), ("Side", ""), ("Requested", ""), ("Materialised", ""), ("Actual", ""), ("Status", ""),
            ("Evidence", "wide")]  # fmt: skip
    changed_paths = {change["path"] for change in case["intervention"]}
    rows = (_knob(record, record["knob"] in changed_paths) for record in case["knobs"])
    caption = "What was asked for, what the adapter built for it, and what the live engine showed."
    return f'<h3>Knobs</h3>{table(caption, head, rows, "Knobs")}'


def _knob(record: dict[str, Any], turned: bool) -> str:
    name = f"<b>{text(record['knob'])}</b> (changed)" if turned else text(record["knob"])
    evidence = text(record["planned"]) + (f'<br><code>{text(record["seen"])}</code>' if record["seen"] else "")
    values = "".join(f"<td>{value_of(record[key])}</td>" for key in ("requested", "materialized", "actual"))
    status = text(record["status"]) if record["status"] == "applied" else f"<b>{text(record['status'])}</b>"
    return (
        f'<tr><th scope="row"><span class="knob">{name}</span></th><td>{record["side"]}</td>{values}<td>{status}</td>'
        f'<td class="wide note">{evidence}</td></tr>'
    )


def _digests(case: dict[str, Any]) -> str:
    sealed = "The seal is there; xd-seal --verify checks it." if case["sealed"] else "The attempt is not sealed."
    where = f"cases/{case['case_id']}/{case['attempt']}"
    pairs = [(name, text(digest)) for name, digest in case["digests"].items()]
    said = f'<p class="note"><code>{text(where)}</code>. {sealed} BLAKE3:</p>'
    return f"<h3>Evidence</h3>{said}{figures(pairs, 'digests')}"
