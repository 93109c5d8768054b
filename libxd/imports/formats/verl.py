"""verl's batch: the tensors of a DataProto, saved by the user, or the same fields a row of JSONL.

`prompts` are padded on the left and `responses` on the right; `attention_mask` covers both, `response_mask` is 1 where
the model wrote. rollout_log_probs are the engine's, old_log_probs the actor's, each of the responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from libxd.imports.files import JSON, TENSORS
from libxd.imports.formats.format import Format, joined, kept, only, version
from libxd.imports.record import Record
from libxd.imports.rows import Row

_FIELDS = {"rollout": "rollout_log_probs", "training": "old_log_probs"}
_TEXT = "trainer.rollout_data_dir writes text without ids; save the batch's tensors, as safetensors or a dict in .pt"
_BYPASS = "sequences have old_log_probs equal bit by bit to rollout_log_probs: in bypass mode verl copies them"


def _parse(row: Row, sides: Sequence[str]) -> Iterator[Record]:
    prompt, response = row.ids("prompts", _TEXT), row.ids("responses", _TEXT)
    attended = np.ones(len(prompt) + len(response), bool)
    if "attention_mask" in row:
        attended = row.mask("attention_mask", len(attended))
    part = kept(row, "attention_mask", attended[len(prompt) :], at_end=False)
    mask = row.mask("response_mask", len(response)) if "response_mask" in row else np.ones(len(response), bool)
    active = mask[part]
    logprobs = {}
    for side in sides:
        values = row.floats(_FIELDS[side], len(response))[part]
        # the rollout's are 0.0 where a tool wrote the token
        logprobs[side] = only(values, active) if side == "rollout" else values
    if len(logprobs) == 2 and active.any():
        same = np.array_equal(*(values[active].view(np.uint32) for values in logprobs.values()))
        row.notes.add(_BYPASS, int(same))
    advantages = row.floats("advantages", len(response))[part] if "advantages" in row else None
    policy = [row.need(name) for name in ("min_global_steps", "max_global_steps") if name in row]
    yield joined(
        row, prompt[kept(row, "attention_mask", attended[: len(prompt)], at_end=True)], response[part], logprobs,
        active=active, prompt=row.key("uid"), advantage=_over_all(advantages, prompt, attended), reward=_reward(row),
        version=version(policy) if policy else None,
    )  # fmt: skip


def _over_all(advantages: np.ndarray | None, prompt: np.ndarray, attended: np.ndarray) -> np.ndarray | None:
    """float32 [L] of a response's; NaN over the prompt."""
    if advantages is None:
        return None
    return np.concatenate([np.full(int(attended[: len(prompt)].sum()), np.nan, np.float32), advantages])


def _reward(row: Row) -> float | None:
    """The sum of a response's token_level_scores, as verl counts it."""
    if "token_level_scores" not in row:
        return None
    return float(row.floats("token_level_scores").astype(np.float64).sum())


FORMAT = Format(
    name="verl",
    about="the tensors of verl's batch (DataProto)",
    files=(*JSON, *TENSORS),
    parse=_parse,
    lead=("responses",),
    sides=tuple(_FIELDS),
    unknown="the temperature that the actor divided by; whether bypass mode copied one side to the other",
)
