"""Matrix products whose summation order follows the problem's shape, as GEMM heuristics choose it.

A GPU library looks at the output tiles of a product: when they are too few to keep the device busy it cuts the inner
dimension (split-K) and adds the partial sums. How many rows there are therefore decides in which order a row's
products are added. That is why batch size moves logprobs, and it is all that happens here.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: the imaginary device: this many workers, each of which computes one tile of the output
WORKERS = 16
TILE_ROWS, TILE_COLUMNS = 4, 64
#: shorter pieces of the inner dimension than this are not worth a worker
MIN_DEPTH = 8


def split_k(rows: int, columns: int, depth: int) -> int:
    """Into how many pieces the inner dimension is cut: a power of two, as many as there are idle workers."""
    tiles = -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)
    splits = 1
    while 2 * splits * tiles <= WORKERS and depth % (2 * splits) == 0 and depth // (2 * splits) >= MIN_DEPTH:
        splits *= 2
    return splits


def matmul(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [M, K] times weight [N, K] transposed: float32 [M, N], accumulated in float32, pieces added in order.

    A piece is summed along its length for each output alone, so that nothing but `split_k` makes a row depend on the
    rows beside it.
    """
    splits = split_k(rows.shape[0], weight.shape[0], weight.shape[1])
    depth = weight.shape[1] // splits
    left, right = rows.float().unsqueeze(1), weight.float().unsqueeze(0)
    total = None
    for start in range(0, weight.shape[1], depth):
        piece = (left[..., start : start + depth] * right[..., start : start + depth]).sum(dim=-1)
        total = piece if total is None else total + piece
    assert total is not None
    return total


def all_reduce(partials: list[Tensor]) -> Tensor:
    """The sum over ranks, in rank order, in the dtype the partial sums are sent in."""
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return total


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """Of the rotary angles: float64 [head_dim / 2]."""
    return theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def rotary(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles: float32 [M, 1, head_dim] each, halves repeated (Llama's layout).

    positions: integers [M]. frequencies: float64 [head_dim / 2], radians a position.
    """
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
    return angles.cos().float(), angles.sin().float()


def rotate_half(x: Tensor) -> Tensor:
    """(a, b) -> (-b, a) over the last dimension's halves."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
