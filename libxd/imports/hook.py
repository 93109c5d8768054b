"""`libxd.write_scores`: from within somebody's training loop, a step's logprobs as an attempt that every tool reads."""

from __future__ import annotations

import itertools
import operator
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
    - ragged, `token_ids` as a list of B sequences and neither of these two.

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
    side, to add the other; what was declared for it then holds, and nothing is declared again.

    XdError (a ValueError) 2 or 65 for arguments that contradict each other, 66 for a checkpoint that is not there, 73
    where nothing can be written.
    """
    given = {side: values for side, values in (("rollout", rollout), ("training", training)) if values is not None}
    if not given:
        raise layout.usage("neither rollout nor training logprobs are given", "rollout")
    _require_paths(runs=runs, checkpoint=checkpoint, tokenizer=tokenizer, into=into)
    if not isinstance(experiment, str):
        raise layout.usage("is no name", "experiment", type(experiment).__name__, "a text")
    step, rank = _count("step", step), _count("rank", rank)
    batch = _batch(layout.of(token_ids, attention_mask, cu_seqlens), active_mask, given, {
        "prompt_index": prompts, "advantages": advantages, "rewards": rewards, "versions": versions,
    })  # fmt: skip
    if into is None:
        meant = _semantics(semantics)
        declared = request.Declared(_dtypes(dtype), checkpoint, tokenizer, meant, rollout_mode, contract)
        attempt = publish.begin(runs, experiment, _name(step, rank), batch, declared)
    else:
        _require_undeclared(dtype=dtype, checkpoint=checkpoint, tokenizer=tokenizer, semantics=semantics,
                            rollout_mode=rollout_mode, contract=None if contract == "ws1" else contract)  # fmt: skip
        attempt = Attempt.open(into)
    source = {"by": "write_scores", "step": step, "rank": rank}
    for number, side in enumerate(given):
        for note in publish.add(attempt, side, batch, source=source, extras=number == 0):
            warnings.warn(f"{attempt}: {note}", stacklevel=2)
    return attempt.path


def _count(name: str, given: Any) -> int | None:
    """A whole number from 0, of whatever type: numpy's, or a tensor of one."""
    if given is None:
        return None
    try:
        number = operator.index(given)
    except (TypeError, ValueError, RuntimeError):
        number = -1
    truth = isinstance(given, bool) or str(getattr(given, "dtype", "")).endswith("bool")
    if truth or not 0 <= number < 1 << 63:
        found = repr(given)[:40] if truth or number < 0 else "beyond int64"
        raise layout.usage("is no whole number from 0", name, found, "a step or a rank")
    return number


def _require_paths(**given: Any) -> None:
    for name, path in given.items():
        if path is not None and not isinstance(path, str | os.PathLike):
            raise layout.usage("is no path", name, type(path).__name__, "a text or a Path")
        if path is not None and any(char in os.fspath(path) for char in "\n\r\0"):
            raise layout.usage("no line of a pipe can hold this path", name, os.fspath(path))


def _require_undeclared(**declared: Any) -> None:
    for name, value in declared.items():
        if value is not None:
            raise layout.usage("is declared when an attempt is made, and `into` has one", name, str(value)[:80])


def _name(step: int | None, rank: int | None) -> str:
    said = [f"{what} {number}" for what, number in (("step", step), ("rank", rank)) if number is not None]
    return ", ".join(said) or "imported"


def _dtypes(given: Any) -> dict[str, str]:
    each = dict(given) if isinstance(given, Mapping) else dict.fromkeys(SIDES, given)
    if stray := [side for side in each if side not in SIDES]:
        raise layout.usage("names no side", "dtype", str(stray[0])[:40], " and ".join(SIDES))
    return {side: request.dtype_name(dtype) for side, dtype in each.items() if dtype is not None}


def _semantics(given: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    if given == "raw":
        return {"logprobs": "raw", **UNPROCESSED}
    if given is not None and not isinstance(given, Mapping):
        raise layout.usage("no such semantics", "semantics", str(given)[:80], '"raw", or an object')
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
        found = numbered(_keys(name, values))
    elif name == "advantages" and _of_tokens(values, tokens):
        return _single(name, _numbers(name, tokens.flat(name, values, np.nan)))
    else:
        found = layout.array(name, values)
    kinds, what = ("iu", "integers") if name == "versions" else ("biuf", "numbers")
    if found.size and found.dtype.kind not in kinds:
        raise layout.usage(f"are no {what}", name, str(found.dtype), what)
    if found.shape != (sequences,):
        raise layout.usage("is not one a sequence", name, list(found.shape), [sequences])
    if name == "prompt_index":
        return found
    if name == "versions":
        if found.dtype.kind == "u" and (found > np.iinfo(np.int64).max).any():
            raise layout.usage("do not fit 64 bits", name, int(found.max()))
        return found.astype(np.int64)
    single = _single(name, found)
    return single.repeat(np.diff(tokens.cu_seqlens)) if name == "advantages" else single


def _keys(name: str, values: Any) -> list[Any]:
    """What tells prompts apart, one a sequence: texts, numbers, tuples of them."""
    keys = layout.array(name, values).tolist() if hasattr(values, "detach") else values
    try:
        keys = keys.tolist() if isinstance(keys, np.ndarray) else list(keys)
        set(keys)
    except TypeError as error:
        raise layout.usage("are no keys", "prompts", str(values)[:40], "a text or an integer a sequence") from error
    return keys


def _single(name: str, values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    if (lost := np.isinf(single) & np.isfinite(values)).any():
        raise layout.usage("do not fit a float32", name, str(values[lost][0]))
    return single


def _of_tokens(values: Any, tokens: layout.Padded | layout.Flat | layout.Ragged) -> bool:
    """Whether there is a number a token: a rectangle, a list of sequences, or [T] beside flat tokens."""
    if layout.of_sequences(values) or getattr(values, "ndim", 0) == 2:
        return True
    flat = isinstance(tokens, layout.Flat) and tokens.cu_seqlens.size - 1 != tokens.token_ids.size
    return flat and np.shape(layout.array("advantages", values)) == tokens.token_ids.shape
