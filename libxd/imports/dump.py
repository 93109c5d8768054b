"""A dump read whole: the batch to be published, and what there is to say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libxd.imports import formats
from libxd.imports.batch import Batch
from libxd.imports.rows import Notes


@dataclass(frozen=True)
class Dump:
    """`notes`: what was met on the way, missing and rounded values among it. `unknown`: what cannot be told from it."""

    format: str
    batch: Batch
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


def read(format: str, paths: Sequence[Path], sides: Sequence[str], mapping: Mapping[str, str]) -> Dump:
    """The sequences of all files, one after another. XdError as `formats.named` and `formats.records` say."""
    of, notes = formats.named(format, mapping), Notes()
    batch = Batch.of_records(formats.records(of, paths, sides, notes), " ".join(map(str, paths)))
    missing = "; the prompts: only responses are compared" if batch.prompt_lens is None else ""
    unknown = f"what was done to the logits, weights, knobs{missing}{'; ' if of.unknown else ''}{of.unknown}"
    return Dump(format, batch, notes.lines(), unknown)
