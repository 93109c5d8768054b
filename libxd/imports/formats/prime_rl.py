"""prime-rl's token exports (token_exports/step_N/rank_R.jsonl): a sequence a line, both sides beside each token.

Everything is [T], index i of token i. inference_logprobs are 0.0 over what the model did not sample; the first of
trainer_logprobs, for which there is nothing before, is log(1 / vocabulary). null stands for what is not finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from libxd.imports.files import JSON
from libxd.imports.formats.format import Format, beside_tokens, whole
from libxd.imports.record import Record
from libxd.imports.rows import Row

_FIELDS = {"rollout": "inference_logprobs", "training": "trainer_logprobs"}
_TRACE = "train_rollouts.jsonl holds messages; turn on the trainer's token export"


def _parse(row: Row, sides: Sequence[str]) -> Iterator[Record]:
    ids = row.ids("token_ids", _TRACE)
    active = row.mask("loss_mask", len(ids))
    yield whole(
        row, ids, active, beside_tokens(row, _FIELDS, sides, active, len(ids)), reward=_reward(row, active),
        advantage=row.floats("advantages", len(ids)) if "advantages" in row else None,
    )  # fmt: skip


def _reward(row: Row, active: np.ndarray) -> float | None:
    """The sequence's, which stands at each token."""
    if "rewards" not in row or not active.any():
        return None
    values = row.floats("rewards", len(active))[active]
    return float(values[0]) if (values == values[0]).all() else None


FORMAT = Format(
    name="prime-rl",
    about="prime-rl's token exports",
    files=JSON,
    parse=_parse,
    sides=tuple(_FIELDS),
    unknown="temperature; which policy sampled (`step` is the trainer's); which sequences are of one prompt",
)
