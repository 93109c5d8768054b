"""What the doctor and the impact say of a case, on a page."""

from __future__ import annotations

from typing import Any

from libxd.plain import number
from libxd.report.words import table, text

_RATIOS = (("p01", "1 %"), ("p50", "median"), ("p99", "99 %"), ("max", "max"))

_LEVELS = {"token": "token", "sequence": "sequence (geometric mean)"}


def findings(found: list[dict[str, Any]]) -> str:
    """Candidate causes, most likely first: the cause, its evidence, what to try next."""
    return "".join(map(_finding, found)) or "<p>No detector named a cause.</p>"


def _finding(found: dict[str, Any]) -> str:
    evidence = "".join(f"<li>{text(line)}</li>" for line in found["evidence"])
    after = "".join(f"<li>{text(line)}</li>" for line in found["next"])
    tried = f"<p>To try:</p><ul>{after}</ul>" if after else ""
    return (
        f'<div class="cause"><p><b>{text(found["cause"])}</b> <span class="off">({found["likelihood"]:g})</span> '
        f"{text(found['summary'])}</p><ul>{evidence}</ul>{tried}</div>"
    )


def impact(found: dict[str, Any]) -> str:
    """Importance ratios, and how many of them an objective would clip."""
    head = [("training / rollout", ""), ("Count", "n"), *((said, "n") for _, said in _RATIOS), ("ESS", "n"),
            ("Chi-square", "n")]  # fmt: skip
    rows = (
        f'<tr><th scope="row">{_LEVELS[level]}</th><td class="n">{ratio["count"]}</td>'
        + "".join(f'<td class="n">{number(ratio[name])}</td>' for name, _ in _RATIOS)
        + "".join(f'<td class="n">{number(ratio[name])}</td>' for name in ("ess_fraction", "chi_square"))
        + "</tr>"
        for level, ratio in found["ratio"].items()
    )
    caption = "Importance ratios of the tokens that rollout sampled, before any update. ESS: Kish's, over the count."
    ratios = table(caption, head, rows, "Importance ratios")
    clipped = "; ".join(f"{text(each['name'])} {each['low']} below, {each['high']} above" for each in found["clipped"])
    return ratios + (f'<p class="note">Ratios outside the bounds: {clipped}.</p>' if clipped else "")
