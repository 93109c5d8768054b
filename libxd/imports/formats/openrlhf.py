"""OpenRLHF's Experience: its fields as saved by the user, a row an episode.

`sequences` [T] are padded on the right, with `attention_mask`. Masks and logprobs [A] are of the last A tokens (A is
T - 1: label-aligned). action_log_probs are 0.0 outside of action_mask, rollout_log_probs over prompt and feedback.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from libxd.imports.files import JSON, TENSORS
from libxd.imports.formats.format import Format, kept, only, whole
from libxd.imports.record import Record
from libxd.imports.rows import Row

_FIELDS = {"rollout": "rollout_log_probs", "training": "action_log_probs"}


def _parse(row: Row, sides: Sequence[str]) -> Iterator[Record]:
    ids = row.ids("sequences", "is this an Experience of OpenRLHF?")
    attended = row.mask("attention_mask", len(ids)) if "attention_mask" in row else np.ones(len(ids), bool)
    part = kept(row, "attention_mask", attended, at_end=False)
    mask = row.mask("action_mask")
    if len(mask) > len(ids):
        raise row.error("action_mask", "is longer than sequences", found=len(mask), expected=f"at most {len(ids)}")
    active = _over_all(mask, len(ids), False)[part]
    logprobs = {}
    for side in sides:
        values = row.floats(_FIELDS[side], len(mask))
        logprobs[side] = only(_over_all(values, len(ids), np.nan)[part], active)
    advantages = row.floats("advantages", len(mask)) if "advantages" in row else None
    yield whole(
        row, ids[part], active, logprobs, prompt=row.text("prompts"), reward=row.number("rewards"),
        advantage=None if advantages is None else _over_all(advantages, len(ids), np.nan)[part],
    )  # fmt: skip


def _over_all(values: np.ndarray, length: int, fill: float | bool) -> np.ndarray:
    """[T] of the [A] that belong to the last tokens."""
    return np.concatenate([np.full(length - len(values), fill, values.dtype), values])


FORMAT = Format(
    name="openrlhf",
    about="the fields of OpenRLHF's Experience",
    files=(*JSON, *TENSORS),
    parse=_parse,
    lead=("sequences",),
    sides=tuple(_FIELDS),
    unknown="whether a 0.0 in rollout_log_probs is a token vLLM gave no logprob for; where the prompt ends, but by the "
    "first action",
)
