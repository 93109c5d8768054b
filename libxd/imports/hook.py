"""`libxd.write_scores`: from within somebody's training loop, a step's logprobs as an attempt that every tool reads."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from libxd.identity import UNPROCESSED
from libxd.imports import layout, publish, request
from libxd.imports.batch import Batch, numbered
from libxd.rundir import SIDES, Attempt


def write_scores(
    runs: str | os.PathLike[str],
    experiment: str,
    *,
    token_ids: Any,
    active_mask: Any,
    rollout: Any = None,
    training: Any = None,
    attention_mask: Any = None,
    cu_seqlens: Any = None,
    dtype: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    semantics: str | Mapping[str, Any] | None = None,
    rollout_mode: str | None = None,
    contract: str = "ws1",
    step: int | None = None,
    rank: int | None = None,
    prompts: Any = None,
    advantages: Any = None,
    rewards: Any = None,
    versions: Any = None,
    into: str | os.PathLike[str] | None = None,
) -> Path:
    """Publish what both sides say of one batch of tokens; the new attempt's path, for `xd-compare` and `xd-doctor`.

    Arrays are torch tensors (on any device), numpy arrays or lists; numbers are natural logarithms, in nats, and a
    missing one is NaN. They are laid out in one of three ways:

    - padded, `token_ids` [B, L] with `attention_mask` [B, L] that says which cells hold tokens, padding on either side;
    - flat, `token_ids` [T] with `cu_seqlens` [B+1];
    - ragged, `token_ids` as a list of B sequences.

    `active_mask` marks the tokens that the loss is taken over. It and the logprobs (`rollout`: what the engine that
    sampled said; `training`: what the trainer recomputed) belong each to its own token, and may be narrower than
    `token_ids`: [B, W] stands for its last W columns (of a ragged sequence, its last tokens). So a response's [B, R]
    and the [B, L-1] of labels need no shift. An inactive token's 0.0 is a filled cell and is not taken as scored.

    dtype: that both sides computed in, or {"rollout": …, "training": …}; it chooses the threshold, and has no default.
    checkpoint: directory, or digest of one, that both sides held. semantics: "raw", where nothing was done to the
    logits, or what was, such as {"temperature": 0.9}; what it leaves out was not done. Where these two are not declared
    the verdict is INVALID_IDENTITY, with all differences written. rollout_mode: "decode" or "prefill". prompts [B]:
    equal for samples of one prompt; advantages [B] or as the logprobs; rewards [B]; versions [B], of the policy that
    sampled.

    Each call is an attempt of its own, named by step and rank. Ranks that hold other sequences may all call; of ranks
    that hold the same ones let one. Any number of processes may write under one `runs`. `into`: an attempt that has one
    side, to add the other.

    XdError (a ValueError) 2 or 65 for arguments that contradict each other, 66 for a checkpoint that is not there, 73
    where nothing can be written.
    """
    given = {side: values for side, values in (("rollout", rollout), ("training", training)) if values is not None}
    if not given:
        raise layout.usage("neither rollout nor training logprobs are given", "rollout")
    batch = _batch(layout.of(token_ids, attention_mask, cu_seqlens), active_mask, given, {
        "prompt_index": prompts, "advantages": advantages, "rewards": rewards, "versions": versions,
    })  # fmt: skip
    if into is None:
        meant = _semantics(semantics)
        declared = request.Declared(_dtypes(dtype), checkpoint, tokenizer, meant, rollout_mode, contract)
        attempt = publish.begin(runs, experiment, _name(step, rank), batch, declared)
    else:
        attempt = Attempt.open(into)
    source = {"by": "write_scores", "step": step, "rank": rank}
    for number, side in enumerate(given):
        for note in publish.add(attempt, side, batch, source=source, extras=number == 0):
            warnings.warn(f"{attempt}: {note}", stacklevel=2)
    return attempt.path


def _name(step: int | None, rank: int | None) -> str:
    said = [f"{what} {number}" for what, number in (("step", step), ("rank", rank)) if number is not None]
    return ", ".join(said) or "imported"


def _dtypes(given: Any) -> dict[str, str]:
    each = dict(given) if isinstance(given, Mapping) else dict.fromkeys(SIDES, given)
    return {side: request.dtype_name(dtype) for side, dtype in each.items() if dtype is not None}


def _semantics(given: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    if given == "raw":
        return {"logprobs": "raw", **UNPROCESSED}
    if isinstance(given, str):
        raise layout.usage("no such semantics", "semantics", given, '"raw", or an object')
    return {"logprobs": "processed", **UNPROCESSED, **given} if given is not None else None


def _batch(
    tokens: layout.Padded | layout.Flat | layout.Ragged, active_mask: Any, logprobs: Mapping[str, Any],
    beside: Mapping[str, Any],
) -> Batch:  # fmt: skip
    active = layout.truth("active_mask", tokens.flat("active_mask", active_mask, False))
    return Batch.of_arrays(
        token_ids=tokens.token_ids,
        cu_seqlens=tokens.cu_seqlens,
        active_mask=active,
        prompt_lens=_prompt_lens(tokens.cu_seqlens, active),
        logprobs={side: _numbers(side, tokens.flat(side, values, np.nan)) for side, values in logprobs.items()},
        extras={name: _extra(name, values, tokens) for name, values in beside.items() if values is not None},
    )


def _prompt_lens(cu_seqlens: np.ndarray, active: np.ndarray) -> np.ndarray | None:
    """int32 [B]: the tokens before the first active one, all where none is. None where a prompt is not there."""
    spans = itertools.pairwise(cu_seqlens)
    lengths = [int(np.argmax(active[b:e])) if active[b:e].any() else int(e - b) for b, e in spans]
    return np.array(lengths, np.int32) if all(lengths) else None


def _numbers(name: str, values: np.ndarray) -> np.ndarray:
    if not np.issubdtype(values.dtype, np.floating):
        raise layout.usage("are no floating-point numbers", name, str(values.dtype), "nats; NaN for none")
    return values


def _extra(name: str, values: Any, tokens: layout.Padded | layout.Flat | layout.Ragged) -> np.ndarray:
    """A tensor of the score file beside the logprobs: one number a sequence, or of advantages one a token."""
    sequences = tokens.cu_seqlens.size - 1
    if name == "prompt_index":
        keys = values.tolist() if hasattr(values, "tolist") else list(values)
        found = numbered(keys)
    elif name == "advantages" and _of_tokens(values):
        return _numbers(name, tokens.flat(name, values, np.nan)).astype(np.float32)
    else:
        found = layout.array(name, values)
    if found.shape != (sequences,):
        raise layout.usage("is not one a sequence", name, list(found.shape), [sequences])
    if name == "advantages":
        return found.astype(np.float32).repeat(np.diff(tokens.cu_seqlens))
    return found.astype({"prompt_index": np.int32, "rewards": np.float32, "versions": np.int64}[name])


def _of_tokens(values: Any) -> bool:
    """Whether there is a number a token: a rectangle, or a list of sequences."""
    return len(getattr(values, "shape", ())) == 2 or (isinstance(values, list | tuple) and np.ndim(values[0]) == 1)
