"""The rows of a policy update that count, checked, with an advantage each and the segments they belong to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch

from xdkernels.objectives import Objective
from xdkernels.segments import Segments

_LOGPROB_DTYPES = (torch.float32, torch.float64)  # a logprob rounded to 16 bits is off by more than a ratio may be
_ID_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class PolicyBatch:
    """The n active rows of N.

    rows: int64 [n], ascending; none: all of them. labels, advantages, old_logprobs, reference_logprobs (or none): [n].
    ratio_segments: whose rows share a ratio; none: each has its own. sequences: none where nothing asks for them.
    """

    rows: torch.Tensor | None
    labels: torch.Tensor
    advantages: torch.Tensor
    old_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor | None
    ratio_segments: Segments | None
    sequences: Segments | None


def prepare(
    objective: Objective,
    pair: tuple[str, str],
    labels: torch.Tensor,
    advantages: torch.Tensor,
    old_logprobs: torch.Tensor,
    *,
    reference_logprobs: torch.Tensor | None,
    beta: float,
    mask: torch.Tensor | None,
    sequence_ids: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    turn_ids: torch.Tensor | None,
    denominator: float | torch.Tensor | None,
    check: bool,
) -> PolicyBatch:
    """The arguments of `fused_policy_loss`, checked, without their inactive rows. pair: of `objectives.levels`.

    Inactive rows are dropped, so nothing that stands in them can reach a loss, a gradient or a metric. ValueError as
    told there; values are looked at in one wait for the device, none with check=False (a mask costs one of its own).
    """
    ratio_level, advantage_level = pair
    if sequence_ids is not None and cu_seqlens is not None:
        raise ValueError("sequence_ids and cu_seqlens say the same thing: give one of them")
    total, device = len(labels), labels.device
    _require_rows("old_logprobs", old_logprobs, total, device, _LOGPROB_DTYPES)
    for name, tensor, dtypes in (
        ("reference_logprobs", reference_logprobs, _LOGPROB_DTYPES),
        ("mask", mask, (torch.bool,)),
        ("sequence_ids", sequence_ids, _ID_DTYPES),
        ("turn_ids", turn_ids, _ID_DTYPES),
    ):
        if tensor is not None:
            _require_rows(name, tensor, total, device, dtypes)
    _require_vector("advantages", advantages, device)
    if not advantages.is_floating_point():
        raise ValueError(f"advantages must be floating point: {advantages.dtype}")
    if isinstance(beta, bool) or not isinstance(beta, Real) or not 0 <= beta < math.inf:
        raise ValueError(f"beta must be a finite number, 0 or more: {beta!r}")
    if beta and reference_logprobs is None:
        raise ValueError(f"beta {beta} needs reference_logprobs")

    wrong: list[tuple[torch.Tensor, str]] = []
    rows = None if mask is None else mask.nonzero().squeeze(1)
    if rows is not None and len(rows) == total:
        rows = None
    _require_denominator(objective, denominator, total if rows is None else len(rows), device, wrong)

    sequences = turns = None
    if "sequence" in pair or objective.average == "sequences" or "turn" in pair:
        values = len(advantages) if advantage_level == "sequence" else None
        sequences = _sequences(sequence_ids, cu_seqlens, rows, total, device, values, wrong)
        if sequences is None and ("sequence" in pair or objective.average == "sequences"):
            raise ValueError(f"{objective.name} at {ratio_level}/{advantage_level} needs sequence_ids or cu_seqlens")
    if "turn" in pair:
        if turn_ids is None:
            raise ValueError(f"{objective.name} at {ratio_level}/{advantage_level} needs turn_ids")
        bound = len(advantages) if advantage_level == "turn" else total
        turns = _segments("turn_ids", _active(turn_ids, rows), bound, wrong)
        if sequences is not None:
            wrong.append((~turns.within(sequences), "a turn of turn_ids reaches over more than one sequence"))

    segments = {"token": None, "turn": turns, "sequence": sequences}
    if advantage_level == "token":
        _require_rows("advantages", advantages, total, device, (advantages.dtype,))
        advantages = _active(advantages, rows)
    else:
        advantages = advantages[segments[advantage_level].index]
    old_logprobs, reference_logprobs = _active(old_logprobs, rows), _active(reference_logprobs, rows)
    for name, values in (
        ("advantages", advantages), ("old_logprobs", old_logprobs), ("reference_logprobs", reference_logprobs)
    ):  # fmt: skip
        if values is not None:
            wrong.append((~values.isfinite().all(), f"{name} must be finite where the mask is true"))
    if check:
        _refuse(wrong)
    return PolicyBatch(
        rows, _active(labels, rows), advantages, old_logprobs, reference_logprobs, segments[ratio_level], sequences
    )


def _active(tensor: torch.Tensor | None, rows: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or rows is None else tensor[rows]


def _sequences(
    sequence_ids: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    rows: torch.Tensor | None,
    total: int,
    device: torch.device,
    values: int | None,
    wrong: list[tuple[torch.Tensor, str]],
) -> Segments | None:
    """The sequences of the active rows. values: how many advantages there are, where each belongs to a sequence."""
    if sequence_ids is not None:
        return _segments("sequence_ids", _active(sequence_ids, rows), total if values is None else values, wrong)
    if cu_seqlens is None:
        return None
    _require_vector("cu_seqlens", cu_seqlens, device)
    if cu_seqlens.dtype not in _ID_DTYPES or not len(cu_seqlens):
        raise ValueError(f"cu_seqlens must be int32 or int64 [sequences + 1]: {_told(cu_seqlens)}")
    count = len(cu_seqlens) - 1
    if values not in (None, count):
        raise ValueError(f"there are {values} advantages for the {count} sequences of cu_seqlens")
    unordered = (cu_seqlens[0] != 0) | (cu_seqlens.diff() < 0).any() | (cu_seqlens[-1] > total)
    wrong.append((unordered, f"cu_seqlens must rise from 0 to at most {total}"))
    places = torch.arange(total, device=device, dtype=cu_seqlens.dtype) if rows is None else rows.to(cu_seqlens.dtype)
    ends = cu_seqlens[1:].contiguous()
    index = torch.searchsorted(ends, places, right=True)  # int64; `count` for rows behind the last sequence
    return _segments("active rows' place in cu_seqlens", index, count, wrong)


def _segments(name: str, ids: torch.Tensor, size: int, wrong: list[tuple[torch.Tensor, str]]) -> Segments:
    message = f"{name} must be within 0 and {size - 1} where the mask is true"
    if len(ids) and not size:
        raise ValueError(message)
    wrong.append((((ids < 0) | (ids >= size)).any(), message))
    # kept within bounds, so that the refusal comes from here and not from an assertion on the device
    return Segments(ids.to(torch.int64).clamp(0, max(size - 1, 0)), size)


def _require_denominator(
    objective: Objective,
    denominator: float | torch.Tensor | None,
    active: int,
    device: torch.device,
    wrong: list[tuple[torch.Tensor, str]],
) -> None:
    message = f"denominator must be a positive finite number: {denominator!r}"
    if denominator is None:
        if objective.average == "constant":
            raise ValueError(f"{objective.name} needs a denominator")
        if not active:
            raise ValueError(
                f"no row is active: {objective.name}'s mean over {objective.average} is not defined "
                "(a part of a larger batch takes that batch's denominator)"
            )
    elif isinstance(denominator, torch.Tensor):
        if denominator.ndim or denominator.dtype == torch.bool or denominator.device != device:
            raise ValueError(f"denominator must be a number, or a tensor [] on {device}: {_told(denominator)}")
        wrong.append((~((denominator > 0) & denominator.isfinite()), "denominator must be positive and finite"))
    elif isinstance(denominator, bool) or not isinstance(denominator, Real) or not 0 < denominator < math.inf:
        raise ValueError(message)


def _require_vector(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.ndim != 1 or tensor.device != device:
        raise ValueError(f"{name} must be a vector on {device}: {_told(tensor)}")


def _require_rows(
    name: str, tensor: torch.Tensor, rows: int, device: torch.device, dtypes: Sequence[torch.dtype]
) -> None:
    if tuple(tensor.shape) != (rows,) or tensor.dtype not in dtypes or tensor.device != device:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} must be {expected} [{rows}] on {device}: {_told(tensor)}")


def _told(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"


def _refuse(wrong: list[tuple[torch.Tensor, str]]) -> None:
    """ValueError for the first thing that is wrong. One wait for the device."""
    for is_wrong, (_, message) in zip(torch.stack([found for found, _ in wrong]).tolist(), wrong, strict=True):
        if is_wrong:
            raise ValueError(message)
