"""BLAKE3 of a tensor's bytes where they lie: weights on a GPU are digested there, and 32 bytes come back."""

from __future__ import annotations

import torch
from blake3 import blake3

from xdkernels.dispatch import use_kernels

#: bytes of a message that are put together at a time; whole chunks
SECTION_BYTES = 64 * 2**20


def blake3_hexdigest(tensor: torch.Tensor, prefix: bytes = b"") -> str:
    """BLAKE3 (64 hex digits) over `prefix` and the elements' bytes, as they are in memory, in row-major order.

    tensor: any dtype and strides; one that is not contiguous is copied. On a GPU it takes the kernels, on the CPU the
    blake3 package: the same function, so the digests are equal. Extra memory on a GPU: SECTION_BYTES, and a 32nd of
    the tensor.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if not use_kernels(flat):
        hasher = blake3(prefix, max_threads=blake3.AUTO)
        hasher.update(flat.numpy())
        return hasher.hexdigest()
    from xdkernels.jit import blake3 as kernels

    size = len(prefix) + len(flat)
    values = torch.empty(8, max(1, -(-size // kernels.CHUNK_BYTES)), dtype=torch.int32, device=flat.device)
    staged = torch.empty(min(SECTION_BYTES, values.shape[1] * kernels.CHUNK_BYTES), dtype=torch.uint8,
                         device=flat.device)  # fmt: skip
    for begin in range(0, max(size, 1), SECTION_BYTES):
        end = min(begin + SECTION_BYTES, size)
        _stage(staged, flat, prefix, begin, end)
        count = max(1, -(-(end - begin) // kernels.CHUNK_BYTES))
        kernels.chunks(staged.view(torch.int32), values, begin // kernels.CHUNK_BYTES, size - begin, count)
    return kernels.root(values).cpu().numpy().astype("<i4").tobytes().hex()


def _stage(staged: torch.Tensor, flat: torch.Tensor, prefix: bytes, begin: int, end: int) -> None:
    """Bytes begin to end of the message to the front of `staged`, and zeros behind them to the end of a chunk."""
    head = prefix[begin:end]
    if head:
        staged[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8).to(staged.device)
    first = begin + len(head) - len(prefix)
    count = end - begin - len(head)
    staged[len(head) : len(head) + count] = flat[first : first + count]
    staged[end - begin :].zero_()
