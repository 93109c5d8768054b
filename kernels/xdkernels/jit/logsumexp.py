"""The merge of partial log-sum-exps in Triton: blocks of one row in their order, padded to a power of two."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from xdkernels.jit.fold import FUSION, LOWEST, UNDERFLOW, exp, fold_sum
from xdkernels.jit.launch import on_device_of


class MergeLaunch(NamedTuple):
    """How the merge is spread out; nothing of it decides a bit."""

    rows: int
    warps: int


MERGE = MergeLaunch(rows=16, warps=2)


@triton.jit(do_not_specialize=["rows"])
def _merge_kernel(
    maximum, total, weighted, selected,
    merged_maximum, merged_log_total, merged_entropy, logprobs,
    rows, blocks,
    PADDED: tl.constexpr, ROWS: tl.constexpr, SELECTED: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program. Absent blocks have the lowest maximum and a total of 0."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.arange(0, PADDED)
    place = row.to(tl.int64)[:, None] * blocks + block[None, :]
    present = (row < rows)[:, None] & (block < blocks)[None, :]
    maximum_RK = tl.load(maximum + place, mask=present, other=LOWEST)
    total_RK = tl.load(total + place, mask=present, other=0.0)
    maximum_R = tl.max(maximum_RK, axis=1)
    shift_RK = tl.maximum(maximum_RK - maximum_R[:, None], UNDERFLOW)  # of an empty block, too
    scale_RK = exp(shift_RK)
    total_R = fold_sum(total_RK * scale_RK, ROWS, PADDED)
    log_total_R = tl.log(total_R)
    tl.store(merged_maximum + row, maximum_R, mask=row < rows)
    tl.store(merged_log_total + row, log_total_R, mask=row < rows)
    if ENTROPY:
        weighted_RK = tl.load(weighted + place, mask=present, other=0.0)
        weighted_R = fold_sum(tl.fma(total_RK, shift_RK, weighted_RK) * scale_RK, ROWS, PADDED)
        tl.store(merged_entropy + row, log_total_R - tl.div_rn(weighted_R, total_R), mask=row < rows)
    if SELECTED:
        selected_R = tl.load(selected + row, mask=row < rows, other=0.0)
        tl.store(logprobs + row, (selected_R - maximum_R) - log_total_R, mask=row < rows)


def merge(
    maximum: torch.Tensor,
    total: torch.Tensor,
    weighted: torch.Tensor | None,
    selected: torch.Tensor | None = None,
    launch: MergeLaunch = MERGE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Maximum, log of the total, entropy and logprob of N rows; arguments float32, contiguous, [N, K] and [N].

    No entropy without weighted, no logprob without selected.
    """
    rows, blocks = total.shape
    results = [total.new_empty(rows) for _ in range(4)]  # apart: no one's view, so that callers may change them
    if rows:
        with on_device_of(total):
            _merge_kernel[(triton.cdiv(rows, launch.rows),)](
                maximum, total, total if weighted is None else weighted, total if selected is None else selected,
                *results, rows, blocks,
                PADDED=triton.next_power_of_2(blocks), ROWS=launch.rows,
                SELECTED=selected is not None, ENTROPY=weighted is not None,
                num_warps=launch.warps, **FUSION,
            )  # fmt: skip
    found_maximum, log_total, entropy, logprobs = results
    return (
        found_maximum, log_total, None if weighted is None else entropy, None if selected is None else logprobs
    )  # fmt: skip
