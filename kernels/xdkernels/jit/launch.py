"""Where a kernel is launched, and how wide. Every launcher imports this, so the interpreter is repaired here."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager

import torch
import triton

if triton.knobs.runtime.interpret:
    from xdkernels.jit import interpreted

    interpreted.repair()


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """The context in which Triton launches on the tensor's device, whichever is current."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 where the interpreter plays it."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
