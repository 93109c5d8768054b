"""The head's kernels, launched: one sweep over rows, and a second one once the upstream gradient is known."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from xdkernels.jit import linear_logprob as kernels
from xdkernels.jit.fold import FUSION
from xdkernels.jit.launch import multiprocessors, on_device_of


@dataclass(frozen=True)
class Tiling:
    """Sizes of the head product. Part of the arithmetic: another BLOCK_N or BLOCK_K is another order of sums."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    #: row blocks that are worked on side by side, so that a tile of the weight is read from L2 by all of them
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3


TILING = Tiling()
#: tiles whose references a program of the rescaling looks at together
RESCALE_STRIP = 16
#: elements that a program scales
SCALE_SIZE = 8192
#: rows times tiles (a power of two) that a program of the merge holds in registers
MERGE_SIZE = 8192


@dataclass(frozen=True)
class Head:
    """A head as the kernels take it: weight [V, H] bfloat16, unit stride and 16-byte rows; what bends its logits."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    temperature: float
    softcap: float | None
    vocab: int
    tiling: Tiling = TILING

    @property
    def constants(self) -> dict[str, bool]:
        """What of it the compiler sees."""
        return {
            "HAS_BIAS": self.bias is not None,
            "SOFTCAP": self.softcap is not None,
            "TEMPERED": self.temperature != 1.0,
        }

    @property
    def scalars(self) -> tuple[float, float]:
        """Softcap and temperature, as the kernels take them."""
        return float(self.softcap or 1.0), float(self.temperature)


@dataclass(frozen=True)
class Swept:
    """What sweeps leave of N rows, in one piece each: float32 [N]; direction in hidden's dtype [N, H]. None: not asked.

    direction: d logprob / d hidden.
    """

    logprobs: torch.Tensor
    logsumexp: torch.Tensor
    entropies: torch.Tensor | None
    direction: torch.Tensor | None

    @classmethod
    def empty(cls, hidden: torch.Tensor, *, entropy: bool, direction: bool) -> Swept:
        """Room for the rows of hidden [N, H]."""
        rows = [torch.empty(hidden.shape[0], device=hidden.device) for _ in range(3 if entropy else 2)]
        return cls(
            *rows[:2], rows[2] if entropy else None,
            torch.empty_like(hidden, memory_format=torch.contiguous_format) if direction else None,
        )  # fmt: skip

    def part(self, rows: slice) -> Swept:
        """Of some rows: a view."""
        parts = (self.logprobs, self.logsumexp, self.entropies, self.direction)
        return Swept(*(None if part is None else part[rows] for part in parts))


def sweep(hidden: torch.Tensor, head: Head, ids: torch.Tensor, into: Swept, *, product_rows: int) -> None:
    """One sweep over rows whose partial sums fit into memory; what `into` has room for is filled.

    hidden: bfloat16 [N, H], unit stride, 16-byte rows. ids, bias: in one piece. product_rows, of use with a direction:
    at least N; the rows that are multiplied by the weight once more, by the vendor's product, whose choice of kernel
    may follow their number: so pass always the same. The probabilities of as many rows are held, bfloat16
    [product_rows, V].
    """
    rows, width = hidden.shape
    tiling = head.tiling
    tiles = triton.cdiv(head.weight.shape[0], tiling.block_n)
    entropy, direction = into.entropies is not None, into.direction is not None

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=hidden.device)

    reference, selected, row_reference, row_total, row_rest = floats(5, rows)
    references, totals = floats(tiles, rows), floats(tiles, rows)
    weighted = floats(tiles, rows) if entropy else totals
    padded = tiles * tiling.block_n if direction else 8
    exponentials = torch.empty(product_rows if direction else 1, padded, dtype=torch.bfloat16, device=hidden.device)
    bias = head.bias if head.bias is not None else reference
    row_blocks = triton.cdiv(rows, tiling.block_m)
    programs = min(row_blocks * tiles, multiprocessors(hidden.device))
    with on_device_of(hidden):
        kernels.selected_kernel[(rows,)](
            hidden, head.weight, bias, ids, selected, reference, hidden.stride(0), head.weight.stride(0), head.vocab,
            width, *head.scalars, **head.constants, BLOCK=min(1024, triton.next_power_of_2(width)), **FUSION,
        )  # fmt: skip
        kernels.head_kernel[(programs,)](
            TensorDescriptor.from_tensor(hidden, [tiling.block_m, tiling.block_k]),
            TensorDescriptor.from_tensor(head.weight, [tiling.block_n, tiling.block_k]),
            TensorDescriptor.from_tensor(exponentials, [tiling.block_m, tiling.block_n] if direction else [1, 8]),
            bias, ids, reference, references, totals, weighted,
            rows, head.vocab, width, row_blocks, tiles, programs, *head.scalars,
            **head.constants, ENTROPY=entropy, STORE=direction, **_blocks(tiling),
            num_warps=tiling.num_warps, num_stages=tiling.num_stages, **FUSION,
        )  # fmt: skip
        padded_tiles = triton.next_power_of_2(tiles)
        merged_rows = max(1, MERGE_SIZE // padded_tiles)
        kernels.merge_kernel[(triton.cdiv(rows, merged_rows),)](
            reference, references, totals, weighted, selected, into.logprobs, into.logsumexp,
            into.entropies if entropy else into.logprobs, row_reference, row_total, row_rest, rows, tiles,
            ENTROPY=entropy, ROWS=merged_rows, PADDED=padded_tiles, num_warps=8, **FUSION,
        )  # fmt: skip
        if direction:
            kernels.rescale_kernel[(row_blocks, triton.cdiv(tiles, RESCALE_STRIP))](
                exponentials, references, row_reference, rows, tiles, padded,
                tiling.block_m, tiling.block_n, RESCALE_STRIP, num_warps=8, **FUSION,
            )  # fmt: skip
            # rows beyond N hold whatever was there, and give rows that nobody reads; padding of the weight is not read
            sums = product(exponentials[:, : head.vocab], head.weight[: head.vocab])
            kernels.direction_kernel[(rows,)](
                sums, head.weight, ids, selected, row_total, row_rest, into.direction,
                into.direction.shape[1], width, head.weight.stride(0), head.vocab, *head.scalars,
                SOFTCAP=head.softcap is not None, TEMPERED=head.temperature != 1.0,
                BLOCK=min(2048, triton.next_power_of_2(width)), **FUSION,
            )  # fmt: skip


def scale_rows(matrix: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """factor[:, None] * matrix in the matrix's dtype; contiguous [N, H], float32 [N]."""
    out = torch.empty_like(matrix)
    if matrix.numel():
        with on_device_of(matrix):
            kernels.scale_rows_kernel[(triton.cdiv(matrix.numel(), SCALE_SIZE),)](
                matrix, factor, out, matrix.numel(), matrix.shape[1], BLOCK=SCALE_SIZE, num_warps=8
            )
    return out


def logit_gradients(
    hidden: torch.Tensor, head: Head, ids: torch.Tensor, logprobs: torch.Tensor, logsumexp: torch.Tensor,
    entropy: torch.Tensor | None, upstream: torch.Tensor, entropy_upstream: torch.Tensor | None, columns: slice,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Fill `out`, bfloat16 [N, columns rounded up to tiles], with d loss / d (hidden @ weight.T) over the columns.

    logprobs, logsumexp, upstream: float32 [N]; entropy and entropy_upstream go together, or are both none.
    """
    rows, width = hidden.shape
    tiling = head.tiling
    weight = head.weight[columns]
    row_blocks, tiles = triton.cdiv(rows, tiling.block_m), triton.cdiv(weight.shape[0], tiling.block_n)
    programs = min(row_blocks * tiles, multiprocessors(hidden.device))
    with on_device_of(hidden):
        kernels.logit_gradient_kernel[(programs,)](
            TensorDescriptor.from_tensor(hidden, [tiling.block_m, tiling.block_k]),
            TensorDescriptor.from_tensor(weight, [tiling.block_n, tiling.block_k]),
            TensorDescriptor.from_tensor(out, [tiling.block_m, tiling.block_n]),
            head.bias if head.bias is not None else logsumexp, ids, -torch.expm1(logprobs), logsumexp,
            entropy if entropy_upstream is not None else logsumexp, upstream,
            entropy_upstream if entropy_upstream is not None else upstream,
            rows, columns.start, head.vocab, width, row_blocks, tiles, programs, *head.scalars,
            **head.constants, ENTROPY=entropy_upstream is not None, **_blocks(tiling),
            num_warps=tiling.num_warps, num_stages=tiling.num_stages, **FUSION,
        )  # fmt: skip


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right of bfloat16 operands with float32 accumulation *and* float32 result."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()  # the interpreter's machine: products of bfloat16 are exact in float32


def _blocks(tiling: Tiling) -> dict[str, int]:
    return {
        "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k, "GROUP_M": tiling.group_m,
    }  # fmt: skip
