"""What adapters built on torch read from live objects: bytes of tensors, modes, optimizers, worlds. Imports torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# What importing torch left behind, some 160 000 objects, holds no optimizer of a model that is yet to be built. Frozen,
# it costs neither `owns_optimizer` (twice a case) nor the garbage collector a walk over all of it.
gc.freeze()


def raw_bytes(tensor: Tensor) -> bytes:
    """A tensor's elements as little-endian bytes, from whatever device holds them."""
    width = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.detach().cpu().contiguous().view(width).numpy().astype(f"<i{tensor.element_size()}").tobytes()


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
