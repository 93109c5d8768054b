"""A report as one picture for a slide: the answer, and what each change moved. By matplotlib, the extra `report`."""

from __future__ import annotations

import io
import textwrap
from typing import Any

from libxd.errors import Status, XdError
from libxd.plain import shortened
from libxd.report import answer
from libxd.report.marks import MARKS

_MOST = 16
_BLUE, _ORANGE, _GREY = "#0072b2", "#d55e00", "#5b626d"


def png(value: dict[str, Any]) -> bytes:
    """1600 by 900 pixels. XdError 69 where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise XdError("a picture needs matplotlib, which is not installed here", status=Status.REFUSED,
                      code="no-matplotlib", hint="install xd[report], or take another format") from error  # fmt: skip
    figure = Figure(figsize=(16, 9), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.04, 0.93, shortened(value["experiment_id"], 60), fontsize=24, fontweight="bold")
    figure.text(0.04, 0.9, "\n".join(textwrap.wrap(_plain(value["answer"]["what"]), 100)), fontsize=17, va="top")
    found = answer.ranked(value)[:_MOST]
    if found:
        _effects(figure.add_axes((0.36, 0.2, 0.5, 0.58)), found, value)
    else:
        figure.text(0.04, 0.6, _plain(value["answer"]["which"][0]["said"]), fontsize=15)
    *sure, claim = value["answer"]["sure"]
    foot = textwrap.wrap(_plain(" ".join(sure)), 170, max_lines=3, placeholder=" …")
    figure.text(0.04, 0.12, "\n".join([*foot, *textwrap.wrap(_plain(claim), 170)]), fontsize=11, color=_GREY, va="top")
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _effects(axes: Any, found: list[tuple[dict[str, Any], dict[str, Any]]], value: dict[str, Any]) -> None:
    """A row an effect, the largest above: dot and interval on a logarithmic axis, the noise floor as a line."""
    for place, (case, effect) in enumerate(reversed(found)):
        mean = effect["mean_absolute"]
        axes.plot([mean["value"]], [place], "o", color=_BLUE, markersize=8)
        if mean["low"]:
            axes.plot([mean["low"], mean["high"]], [place, place], "-", color=_BLUE, linewidth=2)
        noise = [each["sides"][effect["side"]] for each in value["floors"] if each["sides"][effect["side"]]]
        if noise and noise[0]["mean_absolute"]:
            floor = noise[0]["mean_absolute"]
            axes.plot([floor, floor], [place - 0.35, place + 0.35], "--", color=_ORANGE, linewidth=2)
        axes.annotate(f"{MARKS[case['verdict']]} {case['verdict']}", (1.01, place), xycoords=("axes fraction", "data"),
                      fontsize=10, color=_GREY, va="center", annotation_clip=False)  # fmt: skip
    names = [f"{_plain(shortened(case['name'], 52))}  ({effect['side']})" for case, effect in reversed(found)]
    axes.set_yticks(range(len(found)), names, fontsize=12)
    axes.set_xscale("log")
    axes.set_ylim(-0.6, len(found) - 0.4)
    axes.set_xlabel("effect on its side, mean |logprob - the baseline's|, nats a token (95 %; dashed: noise floor)",
                    fontsize=12)  # fmt: skip
    axes.grid(axis="x", color="#e4e6e9")
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _plain(text: str) -> str:
    """Text in which matplotlib finds no mathematics."""
    return text.replace("$", r"\$")
