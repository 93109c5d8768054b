"""A dump read whole: the batch to be published, and what there is to say of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from libxd.errors import XdError
from libxd.imports import formats
from libxd.imports.batch import Batch
from libxd.imports.record import Record
from libxd.imports.rows import Notes
from libxd.rundir import SIDES, Attempt
from libxd.scores import ScoreFile


@dataclass(frozen=True)
class Dump:
    """`masked`: whether it says which tokens count; else all do, until `masked_by`. `notes`: what was met on the way,
    missing and rounded values among it. `unknown`: what cannot be told from it."""

    format: str
    name: str
    batch: Batch
    masked: bool
    notes: list[str]
    unknown: str

    def source(self) -> dict[str, Any]:
        """What a readback says of where its side comes from: no path, no clock."""
        return {"by": "xd-import", "format": self.format}

    def summary(self) -> str:
        batch = self.batch
        sides = " and ".join(batch.logprobs)
        return (f"{batch.cu_seqlens.size - 1} sequences, {len(batch.token_ids)} tokens, {int(batch.active_mask.sum())} "
                f"of them active; {sides} side{'s' if len(batch.logprobs) > 1 else ''}")  # fmt: skip

    def masked_by(self, attempt: Attempt | None) -> Dump:
        """The dump with a mask: its own, or that of the side which the attempt holds. XdError 65: there is none."""
        if self.masked:
            return self
        side = next((each for each in SIDES if attempt and attempt.scored(each)), None)
        if attempt is None or side is None:
            raise XdError("does not say which tokens count", code="no-mask", where=self.name,
                          hint="import the other side before it, or map active or prompt_len to a column")  # fmt: skip
        file = ScoreFile(attempt.scores(side), side)
        file.require_sound()
        if not np.array_equal(file.cu_seqlens, self.batch.cu_seqlens):
            return self  # and publishing says which sequence has another length
        batch = Batch.of_arrays(
            self.batch.token_ids, self.batch.cu_seqlens, np.array(file.active_mask), None, self.batch.logprobs,
            self.batch.extras, self.batch.places,
        )  # fmt: skip
        return replace(self, batch=batch, masked=True)


def read(
    format: str, paths: Sequence[Path], sides: Sequence[str], mapping: Mapping[str, str], of_prompts: bool = False
) -> Dump:
    """The sequences of all files, one after another. XdError as `formats.named` and `formats.records` say."""
    of, notes, masks = formats.named(format, mapping, of_prompts), Notes(), _Masks()
    name = str(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    batch = Batch.of_records(masks.filled(formats.records(of, paths, sides, notes)), name)
    missing = "; the prompts: only responses are compared" if batch.prompt_lens is None and masks.known else ""
    unknown = f"what was done to the logits, weights, knobs{missing}{'; ' if of.unknown else ''}{of.unknown}"
    return Dump(format, name, batch, masks.known, notes.lines(), unknown)


class _Masks:
    """Whether all records say which of their tokens count."""

    def __init__(self) -> None:
        self.known = True

    def filled(self, records: Iterable[Record]) -> Iterator[Record]:
        """The records; one that does not say has all of its tokens active, so that no logprob is taken for a fill."""
        for record in records:
            if record.active is None:
                self.known = False
                record = replace(record, active=np.ones(len(record.token_ids), bool))
            yield record
