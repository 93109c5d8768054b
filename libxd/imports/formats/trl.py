"""TRL's GRPO batch: what `_generate_and_score_completions` returns, saved by its user, or what a `rollout_func` gives.

Prompts are padded on the left and completions on the right, each with a mask; a row of JSONL may come without padding
and without masks. sampling_per_token_logps are vLLM's of the sampled tokens, old_per_token_logps the trainer's of the
same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from libxd.imports.files import JSON, TENSORS
from libxd.imports.formats.format import Format, joined, kept, only
from libxd.imports.record import Record
from libxd.imports.rows import Row

_FIELDS = {"rollout": ("sampling_per_token_logps", "logprobs"), "training": ("old_per_token_logps",)}
_TEXT = "completions_*.parquet and logs of TRL hold text alone; save the batch itself"


def _parse(row: Row, sides: Sequence[str]) -> Iterator[Record]:
    prompt, response = row.ids("prompt_ids", _TEXT), row.ids("completion_ids", _TEXT)
    of_prompt = _mask(row, "prompt_mask", len(prompt))
    of_response = _mask(row, "completion_mask", len(response))
    part = kept(row, "completion_mask", of_response, at_end=False)
    active = (of_response & _mask(row, "tool_mask", len(response)))[part]
    row.notes.add("completions have no token that counts, and are there as a prompt alone", int(part.stop == 0))
    logprobs = {}
    for side in sides:
        values = row.floats(_field(row, side), len(response))[part]
        # the rollout's are 0.0 where a tool wrote the token
        logprobs[side] = only(values, active) if side == "rollout" else values
    yield joined(
        row, prompt[kept(row, "prompt_mask", of_prompt, at_end=True)], response[part], logprobs, active=active,
        advantage=row.number("advantages"), reward=row.number("reward"),
    )  # fmt: skip


def _mask(row: Row, name: str, length: int) -> np.ndarray:
    return row.mask(name, length) if name in row else np.ones(length, bool)


def _field(row: Row, side: str) -> str:
    """The name under which the side's logprobs are there; else the first, whose absence is the error."""
    return next((name for name in _FIELDS[side] if name in row), _FIELDS[side][0])


FORMAT = Format(
    name="trl",
    about="a batch of TRL's GRPOTrainer, or what a rollout_func returns",
    files=(*JSON, *TENSORS),
    parse=_parse,
    lead=("completion_ids",),
    sides=tuple(_FIELDS),
    unknown="which completions are of one prompt; the temperature that both sides divided by",
)
