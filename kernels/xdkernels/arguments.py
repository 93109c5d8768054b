"""What public functions ask of their arguments: ValueError with one line, before anything is launched.

Shapes, dtypes, devices and numbers are always looked at. Values that live in tensors are looked at when `check` is set,
since that waits for the device and cannot be captured into a graph.
"""

from __future__ import annotations

from numbers import Integral, Real

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
IDS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
#: blocks of one row that a merge can hold
MOST_BLOCKS = 65536
#: a divisor whose reciprocal is a normal float32, too
LEAST_TEMPERATURE, MOST_TEMPERATURE = 2.0**-126, 2.0**126


def require_logits(
    logits: torch.Tensor, ids: torch.Tensor, temperature: float, vocab: int | None, *, check: bool
) -> int:
    """logits floating [N, V], ids integers [N], each in [0, vocab); vocab within 1 and V. Returns vocab (none: V)."""
    if logits.ndim != 2 or ids.ndim != 1 or logits.shape[0] != ids.shape[0]:
        raise ValueError(f"logits [N, V] and ids [N] do not fit: {tuple(logits.shape)}, {tuple(ids.shape)}")
    require_floats(logits=logits)
    require_one_device(logits=logits, ids=ids)
    require_temperature(temperature)
    columns = require_vocab(vocab, logits.shape[1])
    require_ids(ids, columns, check=check)
    return columns


def require_shard(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: float,
    vocab: int,
    first: int,
    vocab_block: int,
    *,
    check: bool,
) -> int:
    """A vocabulary shard: columns first, first + 1 …, of which those below vocab count. Returns how many do."""
    if logits.ndim != 2 or ids.ndim != 1 or logits.shape[0] != ids.shape[0] or logits.shape[1] == 0:
        raise ValueError(f"logits [N, V] and ids [N] do not fit: {tuple(logits.shape)}, {tuple(ids.shape)}")
    require_floats(logits=logits)
    require_one_device(logits=logits, ids=ids)
    require_temperature(temperature)
    require_integer("vocab", vocab)
    require_vocab_block(vocab_block, logits.shape[1])
    require_integer("first", first, least=0)
    if first % vocab_block:
        raise ValueError(f"a shard must begin at a multiple of its vocab_block, {vocab_block}: {first}")
    require_ids(ids, vocab, check=check)
    return min(max(vocab - first, 0), logits.shape[1])


def require_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float,
    softcap: float | None,
    vocab: int | None,
    *,
    check: bool,
) -> int:
    """hidden [N, H] and weight [V, H] of one floating dtype, bias floating [V]; the rest as for logits."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden [N, H] and weight [V, H] do not fit: {tuple(hidden.shape)}, {tuple(weight.shape)}")
    if hidden.shape[1] == 0:
        raise ValueError(f"hidden [N, H] must have columns: {tuple(hidden.shape)}")
    if ids.ndim != 1 or hidden.shape[0] != ids.shape[0]:
        raise ValueError(f"hidden [N, H] and ids [N] do not fit: {tuple(hidden.shape)}, {tuple(ids.shape)}")
    require_floats(hidden=hidden, weight=weight)
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden and weight must have one dtype: {hidden.dtype}, {weight.dtype}")
    require_one_device(hidden=hidden, weight=weight, ids=ids)
    if bias is not None:
        if bias.ndim != 1 or bias.shape[0] != weight.shape[0]:
            raise ValueError(f"weight [V, H] and bias [V] do not fit: {tuple(weight.shape)}, {tuple(bias.shape)}")
        require_floats(bias=bias)
        require_one_device(hidden=hidden, bias=bias)
    require_temperature(temperature)
    if softcap is not None:
        require_float32("softcap", softcap, positive=True)
    columns = require_vocab(vocab, weight.shape[0])
    require_ids(ids, columns, check=check)
    return columns


def require_partials(
    maximum: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor | None, selected: torch.Tensor | None
) -> None:
    """float32 [N, K], K at least 1, on one device; selected float32 [N]."""
    sums = {"maximum": maximum, "total": total, "weighted": weighted}
    sums = {name: tensor for name, tensor in sums.items() if tensor is not None}
    if total.ndim != 2 or total.shape[1] == 0 or any(tensor.shape != total.shape for tensor in sums.values()):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in sums.items())
        raise ValueError(f"partials must all be [N, K], with K at least 1: {shapes}")
    if total.shape[1] > MOST_BLOCKS:
        raise ValueError(f"partials [N, K] must be of at most {MOST_BLOCKS} blocks: {tuple(total.shape)}")
    if selected is not None:
        if selected.shape != total.shape[:1]:
            shapes = f"{tuple(selected.shape)}, {tuple(total.shape)}"
            raise ValueError(f"selected [N] and partials [N, K] do not fit: {shapes}")
        sums["selected"] = selected
    for name, tensor in sums.items():
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} must be float32: {tensor.dtype}")
    require_one_device(**sums)


def require_ids(ids: torch.Tensor, columns: int, *, check: bool) -> None:
    """Integers within 0 and columns - 1. An id outside would be read from padding or foreign memory."""
    if ids.dtype not in IDS:
        raise ValueError(f"ids must be integers, signed ones beyond 8 bits: {ids.dtype}")
    if check and ids.numel() and bool(((ids < 0) | (ids >= columns)).any()):
        raise ValueError(f"ids must be within 0 and {columns - 1}: {int(ids.min())} to {int(ids.max())}")


def require_vocab(vocab: int | None, width: int) -> int:
    """How many of `width` columns count: 1 to all of them."""
    columns = width if vocab is None else vocab
    require_integer("vocab", columns, least=0)
    if not 0 < columns <= width:
        raise ValueError(f"vocab must be within 1 and {width}: {columns}")
    return columns


def require_vocab_block(vocab_block: int, width: int) -> None:
    """Columns of a block, of which `width` columns are at most MOST_BLOCKS."""
    require_integer("vocab_block", vocab_block)
    if -(-width // vocab_block) > MOST_BLOCKS:
        raise ValueError(f"vocab_block must cut {width} columns into at most {MOST_BLOCKS} blocks: {vocab_block}")


def require_temperature(temperature: float) -> None:
    """A positive number that float32 can divide by."""
    number = isinstance(temperature, Real) and not isinstance(temperature, bool)
    if not number or not LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:  # NaN is not
        raise ValueError(f"temperature must be a positive number, and a float32 as its reciprocal: {temperature}")


def require_integer(name: str, value: int, *, least: int = 1) -> None:
    """A whole number from `least` on; a float that is one is none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer: {value!r}")
    if value < least:
        raise ValueError(f"{name} must be {'positive' if least == 1 else f'{least} or more'}: {value}")


def require_float32(name: str, value: float, *, positive: bool) -> None:
    """A number that is a finite one in float32, too."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not abs(value) <= torch.finfo(torch.float32).max or (positive and not value > 0):
        raise ValueError(f"{name} must be {'positive and ' if positive else ''}finite, in float32, too: {value}")


def require_floats(**tensors: torch.Tensor) -> None:
    """bfloat16, float16, float32 or float64."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} must be floating point of 16 to 64 bits: {tensor.dtype}")


def require_one_device(**tensors: torch.Tensor) -> None:
    """All on one device."""
    if len({tensor.device for tensor in tensors.values()}) > 1:
        places = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"tensors on several devices: {places}")
