"""Pairs of score files in memory, made of arrays: what detectors look at, without a file or an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from libxd import identity
from libxd.doctor import Evidence, Known
from libxd.sequences import Sequences


@dataclass
class Held:
    """What detectors read of a `ScoreFile`."""

    side: str
    logprobs: np.ndarray
    token_ids: np.ndarray
    active_mask: np.ndarray
    cu_seqlens: np.ndarray
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.logprobs.size

    @property
    def path(self) -> Path:
        return Path(f"score_{self.side}.safetensors")

    def release(self) -> None:
        """No file, no pages."""


def held(side: str, logprobs: np.ndarray, sequences: Sequences, dtype: str | None = "float32", **changed: Any) -> Held:
    """A side's file of frozen sequences. changed: `active_mask`, `token_ids`, `semantics`, `logits`."""
    semantics = {**identity.UNPROCESSED, **changed.pop("semantics", {})}
    metadata = {"semantics": semantics, "dtypes": {"parameters": dtype, "logits": changed.pop("logits", dtype)}}
    parts = {name: getattr(sequences, name) for name in ("token_ids", "active_mask", "cu_seqlens")}
    return Held(side, np.asarray(logprobs, np.float32), **{**parts, **changed}, metadata=metadata)


def evidence(rollout: Held, training: Held, **known: Any) -> Evidence:
    return Evidence(rollout, training, None, Known(**known))  # type: ignore[arg-type]


def subset(sequences: Sequences, chosen: list[int], most: int | None = None) -> tuple[Sequences, np.ndarray]:
    """Some of the sequences, the response cut after `most` tokens, and where their cells were: int [T']."""
    spans = [sequences.span(s) for s in chosen]
    stops = [
        span.stop if most is None else min(span.stop, span.start + int(sequences.prompt_lens[s]) + most)
        for s, span in zip(chosen, spans, strict=True)
    ]
    cells = np.concatenate([np.arange(span.start, stop) for span, stop in zip(spans, stops, strict=True)])
    lengths = [stop - span.start for span, stop in zip(spans, stops, strict=True)]
    flat = ("token_ids", "active_mask", "attention_mask", "positions", "logprobs")
    made = Sequences(
        **{name: getattr(sequences, name)[cells] for name in flat},
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int64),
        prompt_lens=sequences.prompt_lens[chosen], prompt_index=sequences.prompt_index[chosen],
    )  # fmt: skip
    return made, cells
