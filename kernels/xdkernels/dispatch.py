"""Whether a call takes the Triton kernels or their plain-torch twin."""

from __future__ import annotations

import os

import torch


def use_kernels(tensor: torch.Tensor) -> bool:
    """On CUDA always; on the CPU when TRITON_INTERPRET=1, which must stand before triton is first imported."""
    return tensor.is_cuda or (tensor.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def without_autocast(tensor: torch.Tensor) -> torch.autocast:
    """The context in which products on the tensor's device keep their operands' dtype, whatever the caller's is."""
    return torch.autocast(tensor.device.type, enabled=False)
