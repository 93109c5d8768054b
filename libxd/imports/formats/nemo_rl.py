"""NeMo-RL's train_data_stepN.jsonl: a sequence a line, each field a list of one (a batch of one).

Everything is padded to [T]; `input_lengths` says how much counts. generation_logprobs are 0.0 over what the model did
not sample; the first of prev_logprobs is 0.0 by convention, for nothing comes before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from libxd.imports.files import JSON
from libxd.imports.formats.format import Format, beside_tokens, whole
from libxd.imports.record import Record
from libxd.imports.rows import Row

_FIELDS = {"rollout": "generation_logprobs", "training": "prev_logprobs"}
_OLD = "releases whose log has no token_ids cannot be imported: the text is not enough"
_READ = ("token_ids", "input_lengths", "token_loss_mask", "sample_loss_mask", "advantages", "rewards",
         *_FIELDS.values())  # fmt: skip


def _parse(row: Row, sides: Sequence[str]) -> Iterator[Record]:
    row = _unbatched(row)
    ids = row.ids("token_ids", _OLD)
    length = row.integer("input_lengths")
    length = len(ids) if length is None else length
    if not 0 < length <= len(ids):
        raise row.error("input_lengths", "is not of these tokens", found=length, expected=f"1 to {len(ids)}")
    active = row.mask("token_loss_mask", len(ids))[:length]
    logprobs = beside_tokens(row, _FIELDS, sides, active, len(ids))
    if (row.number("sample_loss_mask") or 0.0) == 0.0 and "sample_loss_mask" in row:
        row.notes.add("sequences are left out of the loss (sample_loss_mask), so that no token of them counts")
        active = np.zeros(length, bool)
    yield whole(
        row, ids[:length], active, logprobs, reward=row.number("rewards"),
        advantage=row.floats("advantages", len(ids))[:length] if "advantages" in row else None,
    )  # fmt: skip


def _unbatched(row: Row) -> Row:
    """The fields that are read, each without the list of one around it."""
    values = {name: row.need(name) for name in _READ if name in row}
    one = {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in values.items()}
    return Row(one, row.where, row.notes)


FORMAT = Format(
    name="nemo-rl",
    about="NeMo-RL's train_data_step*.jsonl",
    files=JSON,
    parse=_parse,
    sides=tuple(_FIELDS),
    unknown="temperature; which sequences are of one prompt; the step, which stands in the file's name alone",
)
