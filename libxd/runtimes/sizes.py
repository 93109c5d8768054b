"""What adapters reckon with before anything is built: sizes of checkpoints and of frozen sequences. No torch."""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

from libxd import checkpoint
from libxd.runtimes.planning import BYTES
from libxd.tensors import TensorFile


def weights(directory: str, width: int) -> int:
    """Bytes of a checkpoint's parameters, floating ones `width` bytes an element, by the headers of its files."""
    total = 0
    for path, names in checkpoint.weight_files(directory).items():
        with TensorFile(path, follow_symlinks=True) as file:
            for name in names if names is not None else file.names:
                held = len(file.raw(name))
                total += math.prod(file.shape(name)) * width if file.dtype(name) in BYTES else held
    return total


def lengths(path: str | None) -> list[int]:
    """Tokens of each frozen sequence; none when they are not at hand."""
    if path is None or not os.path.exists(path):
        return []
    with TensorFile(path, follow_symlinks=True) as file:
        bounds = file.array("cu_seqlens").tolist()
    return [end - start for start, end in itertools.pairwise(bounds)]


def text(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that is about text; a multimodal one keeps it apart."""
    return config.get("text_config") or config


def token_cache(config: dict[str, Any], width: int) -> int:
    """Bytes of a token's keys and values in all layers, `width` bytes an element. KeyError: it says not all."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * head_dim * width
