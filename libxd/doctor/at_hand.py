"""What is at hand beside two score files: named by options, or found where an attempt's request says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np

from libxd import sequences as frozen
from libxd.doctor import aggregates, rescoring, vocabulary
from libxd.doctor.evidence import Evidence, Known
from libxd.doctor.rescoring import Rescored
from libxd.errors import Status, XdError
from libxd.rundir import Attempt
from libxd.sequences import Sequences

#: tokens behind prompts that are rescored at most, in whole sequences that lie evenly
MOST_RESCORED = 4096


def known(
    evidence: Evidence,
    *,
    sequences: str | None = None,
    directories: Iterable[str] = (),
    model: str | None = None,
    reported: Mapping[str, Decimal] | None = None,
    rescore: bool = False,
) -> Known:
    """directories: of tokenizers or models, for what they say of ids. model: the checkpoint to rescore with or to name.

    XdError 66 or 65 for what is named and is not there, or is of other tokens; what an attempt alone speaks of may be
    missing.
    """
    places = _places(evidence.attempt)
    held = frozen.read(sequences) if sequences else _found_sequences(evidence.attempt, places)
    if sequences and held is not None and not _same_tokens(held, evidence):
        raise XdError("are sequences of other tokens than the scores", code="other-tokens", where=sequences)
    directories = list(directories) or [place for name in ("checkpoint", "tokenizer") if (place := places.get(name))]
    model = model or places.get("checkpoint")
    return Known(
        sequences=held,
        vocabulary=vocabulary.read(directories) if directories else None,
        rescored=_rescored(evidence, held, model, directories) if rescore and model else None,
        reported=dict(reported or {}),
        model=model,
    )


def reported(given: Iterable[str]) -> dict[str, Decimal]:
    """NAME=VALUE of --reported, with the digits that were written. XdError 2 for another name, or no number."""
    found: dict[str, Decimal] = {}
    for each in given:
        name, _, value = each.partition("=")
        if name not in aggregates.NAMES:
            raise XdError("no aggregate of that name", status=Status.USAGE, code="bad-aggregate", where="--reported",
                          found=name, expected=" ".join(aggregates.NAMES))  # fmt: skip
        try:
            found[name] = Decimal(value)
        except InvalidOperation:
            raise XdError("no number", status=Status.USAGE, code="bad-aggregate", where=f"--reported {name}",
                          found=value) from None  # fmt: skip
        if not found[name].is_finite() or not np.isfinite(float(found[name])):
            raise XdError("no finite number", status=Status.USAGE, code="bad-aggregate", where=f"--reported {name}",
                          found=value)  # fmt: skip
    return found


def _places(attempt: Attempt | None) -> dict[str, str]:
    """Name -> place of what an attempt's request speaks of, as far as it is there."""
    if attempt is None or not attempt.has("requested.json"):
        return {}
    locations: dict[str, Any] = attempt.requested()["locations"]
    return {name: place for name, place in locations.items() if place and Path(place).exists()}


def _found_sequences(attempt: Attempt | None, places: Mapping[str, str]) -> Sequences | None:
    """Those of the attempt, when they still are: by their digest."""
    if attempt is None or "sequences" not in places:
        return None
    held = frozen.read(places["sequences"])
    same = frozen.identity_of(held)["digest"] == attempt.identity()["sequences"]["digest"]
    return held if same else None


def _same_tokens(held: Sequences, evidence: Evidence) -> bool:
    return np.array_equal(held.cu_seqlens, evidence.cu_seqlens) and np.array_equal(
        held.token_ids, evidence.rollout.token_ids
    )


def _rescored(
    evidence: Evidence, held: Sequences | None, model: str, directories: Iterable[str]
) -> Rescored | None:  # fmt: skip
    """By the model, of the rollout side's tokens; None where the two files hold none side by side."""
    if not evidence.count:
        return None
    whole = held or _frozen(evidence)
    chosen = _chosen(whole)
    part, cells = _part(whole, chosen)
    bos = vocabulary.read([model, *directories]).bos
    found = rescoring.rescore(model, part, bos)
    return Rescored(**{**vars(found), "cells": cells[found.cells]})


def _frozen(evidence: Evidence) -> Sequences:
    """The pair's tokens as sequences whose prompts end before the first active token."""
    file, active = evidence.rollout, np.concatenate([evidence.active(where) for where in evidence.blocks()])
    lengths = np.diff(file.cu_seqlens)
    starts = file.cu_seqlens[:-1]
    prompt_lens = np.array([
        max(1, int(active[a : a + n].argmax()) if active[a : a + n].any() else int(n))
        for a, n in zip(starts, lengths, strict=True)
    ], np.int32)  # fmt: skip
    return Sequences(
        token_ids=np.array(file.token_ids), cu_seqlens=np.array(file.cu_seqlens), active_mask=active,
        attention_mask=np.ones(file.tokens, bool),
        positions=(np.arange(file.tokens) - np.repeat(starts, lengths)).astype(np.int32),
        prompt_lens=prompt_lens, prompt_index=np.arange(lengths.size, dtype=np.int32),
        logprobs=np.full(file.tokens, np.nan, np.float32),
    )  # fmt: skip


def _chosen(whole: Sequences) -> np.ndarray:
    """Sequences that lie evenly and hold no more than `MOST_RESCORED` tokens behind prompts, one at least."""
    behind = np.diff(whole.cu_seqlens) - whole.prompt_lens
    step = max(1, -(-int(behind.sum()) // MOST_RESCORED))
    chosen = np.arange(0, behind.size, step)
    while chosen.size > 1 and behind[chosen].sum() > MOST_RESCORED:
        chosen = chosen[:-1]
    return chosen


def _part(whole: Sequences, chosen: np.ndarray) -> tuple[Sequences, np.ndarray]:
    """Some of the sequences, and where their tokens were: int64."""
    cells = np.concatenate([np.arange(whole.cu_seqlens[s], whole.cu_seqlens[s + 1]) for s in chosen])
    flat = ("token_ids", "active_mask", "attention_mask", "positions", "logprobs")
    part = Sequences(
        **{name: getattr(whole, name)[cells] for name in flat},
        cu_seqlens=np.cumsum([0, *np.diff(whole.cu_seqlens)[chosen]], dtype=np.int64),
        prompt_lens=whole.prompt_lens[chosen], prompt_index=whole.prompt_index[chosen],
    )  # fmt: skip
    return part, cells
