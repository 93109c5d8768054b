"""A run directory with every kind of verdict, made of given logprobs, and reports of it."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from comparison_fixtures import refused, scored

from libxd import comparison, seal, table
from libxd.report import content, run
from libxd.report.content import Report
from libxd.rundir import Attempt

LENGTHS = (7, 12, 9, 4)
TOKENS = sum(LENGTHS)
ACTIVE = np.concatenate([np.arange(length) >= 2 for length in LENGTHS])  # two tokens of prompt each
LOGPROBS = np.where(ACTIVE, -np.random.default_rng(3).uniform(0.5, 6, TOKENS), np.nan).astype(np.float32)
#: what no HTML may hold as it is: markup, a script's end, a direction mark, a control character, a lone surrogate
HOSTILE = '</script><img src=x onerror=alert(1)>"\'&\u202e\u0007\x1b[31m\udc80`|'


def moved(by: float, seed: int = 0) -> np.ndarray:
    """LOGPROBS of the one side, moved by a normal error of that size."""
    return (LOGPROBS + by * np.random.default_rng(seed).standard_normal(TOKENS)).astype(np.float32)


def judged(root: Path, rollout: np.ndarray, training: np.ndarray, *, sealed: bool = True, **given: Any) -> Attempt:
    """An attempt under `root`, compared and sealed."""
    attempt = scored(root, rollout, training, active=ACTIVE, lengths=LENGTHS, **given)
    comparison.compare(attempt)
    if sealed:
        seal.seal(attempt)
    return attempt


def make(root: Path) -> Path:
    """A run: a baseline that differs, a repeat, knobs that repair it, move nothing or more, are refused or invalid."""
    drifting = moved(1e-2)
    judged(root, LOGPROBS, drifting)
    judged(root, LOGPROBS, moved(1e-5, 1) - LOGPROBS + drifting, repeat=1)
    judged(root, LOGPROBS, LOGPROBS, change=("training.attention_backend", "sdpa"))
    judged(root, LOGPROBS, drifting, change=("rollout.enable_prefix_caching", True))
    judged(root, moved(0.2, 2), drifting, change=("rollout.enforce_eager", False))
    judged(root, LOGPROBS, np.where(np.arange(TOKENS) == 3, np.inf, drifting).astype(np.float32),
           change=("batch.size", 1))  # fmt: skip
    refused(root, ("rollout.dtype", "float16"), "no half precision here")
    return root / "test"


class Words:
    """A vocabulary whose every token is one text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def text(self, token: int) -> str:
        return self._text


def report(path: Path, words: Any = None, redact: bool = False) -> Report:
    rows = [table.read(attempt) for attempt in run.find(str(path)).attempts]
    return content.read(rows, words, redact, lambda: None)


class Page(HTMLParser):
    """What a parser makes of a page: elements with their attributes, all text, and whether what opens closes."""

    VOID = ("meta", "link", "br", "wbr", "img", "input")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.said = ""
        self.inside: dict[str, str] = {}
        self._open: list[str] = []
        self.unbalanced: list[str] = []
        self.feed(html)
        self.close()
        self.unbalanced += self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.unbalanced.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        self.inside[self._open[-1] if self._open else ""] = data
        if not self._open or self._open[-1] not in ("script", "style"):
            self.said += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]
