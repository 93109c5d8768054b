"""What adapters built on torch read from live objects: bytes of tensors, modes, optimizers, settings. Imports torch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LEFT_ON_DEVICE = 2**16  # bytes; what is smaller is fetched as fast as kernels are launched


def numerics() -> dict[str, Any]:
    """The numeric state of this process: what of torch's settings decides numbers without being an argument; JSON."""
    matmul, cudnn, cuda = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.cuda
    readings = {
        "threads": torch.get_num_threads,
        "interop_threads": torch.get_num_interop_threads,
        "default_dtype": lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "mkldnn": lambda: torch.backends.mkldnn.enabled,
        "matmul_tf32": lambda: matmul.allow_tf32,
        "matmul_fp16_reduced_precision_reduction": lambda: matmul.allow_fp16_reduced_precision_reduction,
        "matmul_bf16_reduced_precision_reduction": lambda: matmul.allow_bf16_reduced_precision_reduction,
        "matmul_fp16_accumulation": lambda: matmul.allow_fp16_accumulation,
        "cudnn": lambda: cudnn.enabled,
        "cudnn_tf32": lambda: cudnn.allow_tf32,
        "cudnn_benchmark": lambda: cudnn.benchmark,
        "cudnn_deterministic": lambda: cudnn.deterministic,
        "sdp_flash": cuda.flash_sdp_enabled,
        "sdp_mem_efficient": cuda.mem_efficient_sdp_enabled,
        "sdp_math": cuda.math_sdp_enabled,
        "sdp_cudnn": cuda.cudnn_sdp_enabled,
        "autocast_cpu": lambda: torch.is_autocast_enabled("cpu"),
        "autocast_cuda": lambda: torch.is_autocast_enabled("cuda"),
        # torch tells whether small numbers are flushed to zero by doing so alone
        "denormals": lambda: bool((torch.full((8,), 1e-40) * 1.0).ne(0).all()),
    }
    return {name: _reading(read) for name, read in readings.items()}


def _reading(read: Callable[[], Any]) -> Any:
    """A setting; "contradictory" where torch refuses to tell, because it was set in two ways at once."""
    try:
        return read()
    except RuntimeError:
        return "contradictory"


@dataclass(frozen=True)
class DeviceBytes:
    """A tensor's elements on a GPU, whose digest is made there: weights of an 8B model would take seconds to fetch."""

    tensor: Tensor

    def begin_blake3(self, prefix: bytes) -> Callable[[], str]:
        """BLAKE3 over the prefix and the elements, in row-major order. GPUs are little-endian."""
        from xdkernels.digest import begin_blake3

        return begin_blake3(self.tensor, prefix)


def raw_bytes(tensor: Tensor) -> bytes | DeviceBytes:
    """A tensor's elements as little-endian bytes; those of a large one on a GPU stay there."""
    if tensor.is_cuda and tensor.numel() * tensor.element_size() >= _LEFT_ON_DEVICE:
        return DeviceBytes(tensor)
    return raw_integers(tensor).tobytes()


def raw_integers(tensor: Tensor) -> np.ndarray:
    """Elements as little-endian integers of their bits, in the tensor's shape, from whatever device holds them."""
    width = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    held = tensor.detach().cpu().contiguous().view(width).numpy()
    return held.astype(f"<i{tensor.element_size()}", copy=False)


def buffers(model: nn.Module) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
    """A module's buffers, those that no checkpoint holds among them: name, dtype name, shape, raw bytes."""
    for name, tensor in model.named_buffers():
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw


def state(model: nn.Module) -> dict[str, Any]:
    """{"mode", "optimizer"}: train when any module is so; whether an optimizer holds one of the parameters."""
    training = any(module.training for module in model.modules())
    return {"mode": "train" if training else "eval", "optimizer": owns_optimizer(model)}


def owns_optimizer(model: nn.Module) -> bool:
    """Whether any live torch optimizer of this process holds one of the model's parameters."""
    held = {id(parameter) for parameter in model.parameters()}
    return any(
        id(parameter) in held
        for thing in gc.get_objects()
        if issubclass(type(thing), torch.optim.Optimizer)
        for group in thing.param_groups
        for parameter in group["params"]
    )


def temperature(semantics: dict[str, Any]) -> float:
    """What logits are divided by: raw logprobs are those before temperature, processed ones those after it."""
    return float(semantics["temperature"]) if semantics["logprobs"] == "processed" else 1.0
