"""slime's debug dumps: --save-debug-rollout-data and --save-debug-train-data, and the same samples as JSONL.

A sample has `tokens` of prompt and response, and everything else [R] of the last `response_length`. The train dump
names the same in the plural and adds log_probs, the trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from libxd.imports.files import JSON, TENSORS
from libxd.imports.formats.format import Format, joined, only, version
from libxd.imports.record import Record
from libxd.imports.rows import Row

_FIELDS = {"rollout": "rollout_log_probs", "training": "log_probs"}


def _parse(row: Row, sides: Sequence[str]) -> Iterator[Record]:
    if "samples" in row:
        for sample in row.rows("samples"):
            yield _sample(sample, sides)
    else:
        yield _sample(row, sides)


def _sample(row: Row, sides: Sequence[str]) -> Record:
    ids = row.ids("tokens", "is this a sample of slime?")
    count = row.integer("response_lengths" if "response_lengths" in row else "response_length")
    if count is None:
        row.need("response_length")
    if not 0 <= count <= len(ids):
        raise row.error("response_length", "is not of these tokens", found=count, expected=f"0 to {len(ids)}")
    mask = next((name for name in ("loss_masks", "loss_mask") if name in row), None)
    active = row.mask(mask, count) if mask else np.ones(count, bool)
    logprobs = {}
    for side in sides:
        values = row.floats(_FIELDS[side], count)
        # a tool's tokens have 0.0 from the rollout
        logprobs[side] = only(values, active) if side == "rollout" else values
    prompt = ids[: len(ids) - count]
    return joined(
        row, prompt, ids[len(prompt) :], logprobs, active=active, prompt=row.key("group_index"),
        reward=_reward(row), advantage=_advantage(row, len(prompt), count),
        version=version(row.list("weight_versions")) if "weight_versions" in row else None,
    )  # fmt: skip


def _reward(row: Row) -> float | None:
    """A number; a dict of rewards says nothing of which counts."""
    for name in ("rewards", "reward"):
        if name in row:
            return None if isinstance(row.need(name), dict) else row.number(name)
    return None


def _advantage(row: Row, prompt: int, count: int) -> np.ndarray | None:
    """float32 [L], NaN over the prompt."""
    if "advantages" not in row:
        return None
    return np.concatenate([np.full(prompt, np.nan, np.float32), row.floats("advantages", count)])


FORMAT = Format(
    name="slime",
    about="slime's debug dumps of rollout and train data",
    files=(*JSON, *TENSORS),
    parse=_parse,
    lead=("tokens",),
    inside=("samples", "rollout_data"),
    sides=tuple(_FIELDS),
    unknown="whether SGLang's logprobs are before or after temperature",
)
