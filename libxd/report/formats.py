"""A report's bytes in each of its formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from libxd import canon, publish, schema
from libxd.errors import XdError
from libxd.report.content import Report


def render(report: Report, form: str, style: Callable[[str, str], str] = lambda text, what: text) -> bytes:
    """html, text, md, json (checked against its schema) or png; XdError 69 for png where matplotlib is not.

    style(text, what) may colour the words of text: what is a verdict, a standing or "heading".
    """
    if form == "json":
        return canon.dumps(schema.validate("report", report.value, "report")) + b"\n"
    if form == "png":
        from libxd.report import figure

        return figure.png(report.value)
    if form == "html":
        from libxd.report import page

        return page.html(report.value).encode()
    from libxd.report import markdown, text

    lines = markdown.lines(report.value) if form == "md" else text.lines(report, style)
    return "".join(f"{line}\n" for line in lines).encode()


def write(path: Path, data: bytes) -> bool:
    """Publish a report. XdError 73 when another file stands there, which is kept."""
    try:
        return publish.publish(path, data)
    except XdError as error:
        if error.code == "output-differs":
            error.hint = "a report is not written over a file: remove it, or give another name"
        raise
