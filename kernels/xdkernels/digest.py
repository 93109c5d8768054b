"""BLAKE3 of a tensor's bytes where they lie: weights on a GPU are digested there, and 32 bytes come back."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from blake3 import blake3

from xdkernels.dispatch import use_kernels

_WORD = 4  # bytes


def blake3_hexdigest(tensor: torch.Tensor, prefix: bytes = b"") -> str:
    """BLAKE3 (64 hex digits) over `prefix` and the elements' bytes, as they are in memory, in row-major order.

    tensor: any dtype and strides; one that is not contiguous is copied. On a GPU it takes the kernels, on the CPU the
    blake3 package: the same function, so the digests are equal. Extra memory on a GPU: a 32nd of the tensor.
    """
    return begin_blake3(tensor, prefix)()


def begin_blake3(tensor: torch.Tensor, prefix: bytes = b"") -> Callable[[], str]:
    """`blake3_hexdigest`, begun; what is returned waits for it. The host can begin the next one meanwhile.

    The tensor may be changed or freed at once by what comes later on the same stream.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if not use_kernels(flat):
        hasher = blake3(prefix, max_threads=blake3.AUTO)
        hasher.update(flat.numpy())
        return hasher.hexdigest
    from xdkernels.jit import blake3 as kernels

    head = _on_device(prefix, flat.device)
    values = kernels.chunks(head, _words(flat), len(prefix), len(prefix) + len(flat))
    root = kernels.root(values)
    return lambda: root.cpu().numpy().astype("<i4").tobytes().hex()


def _words(flat: torch.Tensor) -> torch.Tensor:
    """Bytes as int32: themselves where they are whole words at a multiple of their size, else a copy, zeros behind."""
    if len(flat) == 0 or len(flat) % _WORD or flat.data_ptr() % _WORD:
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % _WORD or _WORD))
    return flat.view(torch.int32)


@functools.lru_cache(maxsize=1024)
def _on_device(prefix: bytes, device: torch.device) -> torch.Tensor:
    """The prefix as int32 words, one word more than it fills: a model's parameters have the same ones every time."""
    words = prefix.ljust((len(prefix) // _WORD + 1) * _WORD, b"\0")
    return torch.frombuffer(bytearray(words), dtype=torch.int32).to(device)
