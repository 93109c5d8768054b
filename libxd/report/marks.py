"""A sign beside each verdict, so that none is told from another by its colour alone."""

from __future__ import annotations

MARKS = {
    "PASS": "✓",
    "MISMATCH": "≠",
    "INVALID_IDENTITY": "✕",
    "INVALID_ARTIFACT": "✕",
    "ZERO_ACTIVE_TOKENS": "∅",
    "unsupported": "–",
    "refused": "–",
    "incomplete": "…",
    "missing": "…",
}
#: verdict -> what kind of news it is; a page's colours follow
TONES = {
    "PASS": "good",
    "MISMATCH": "bad",
    "INVALID_IDENTITY": "invalid",
    "INVALID_ARTIFACT": "invalid",
    "ZERO_ACTIVE_TOKENS": "invalid",
}
