"""How much memory an hf engine needs, from a checkpoint's headers, its config and the frozen sequences. No torch.

An engine serves cases of several batch sizes, so a batch is taken to hold the longest sequences, `_ROWS` at most.
"""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

from libxd import checkpoint
from libxd.errors import XdError
from libxd.runtimes.planning import BYTES
from libxd.tensors import TensorFile

#: positions that go through the head together: the logits of a whole padded batch are mostly thrown away
HEAD_ROWS = 1024
_ROWS = 64
#: an interpreter with torch in it, and on CUDA a context with its libraries
_PROCESS_BYTES = {"cpu": 512 << 20, "cuda": 1 << 30}


def estimate(side: str, engine: dict[str, Any], locations: dict[str, Any]) -> int:
    """Bytes, roughly: weights in the engine's dtype, KV cache or activations, logits, the process.

    0 when the checkpoint is not at hand. XdError as reading a checkpoint.
    """
    directory = locations["checkpoint"]
    if not directory:
        return 0
    config = checkpoint.config_of(directory)
    width = BYTES[engine["dtype"]]
    lengths = _lengths(locations.get("sequences"))
    rows, columns = min(len(lengths), _ROWS), max(lengths, default=0)
    head_rows = min(HEAD_ROWS, sum(lengths))
    try:
        of_head, of_token = _head_row(_text(config), width), _token(side, engine, _text(config), width, columns)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise XdError(f"a model's config says its sizes: {type(error).__name__}: {error}", code="bad-checkpoint",
                      where=os.path.join(directory, "config.json")) from error  # fmt: skip
    needed = weights(directory, width) + head_rows * of_head + rows * columns * of_token
    return needed + _PROCESS_BYTES[engine["device"]]


def weights(directory: str, width: int) -> int:
    """Bytes of a checkpoint's parameters, floating ones `width` bytes an element, by the headers of its files."""
    total = 0
    for path, names in checkpoint.weight_files(directory).items():
        with TensorFile(path, follow_symlinks=True) as file:
            for name in names if names is not None else file.names:
                held = len(file.raw(name))
                total += math.prod(file.shape(name)) * width if file.dtype(name) in BYTES else held
    return total


def _lengths(path: str | None) -> list[int]:
    """Tokens of each frozen sequence; none when they are not at hand."""
    if path is None or not os.path.exists(path):
        return []
    with TensorFile(path, follow_symlinks=True) as file:
        bounds = file.array("cu_seqlens").tolist()
    return [end - start for start, end in itertools.pairwise(bounds)]


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that is about text; a multimodal one keeps it apart."""
    return config.get("text_config") or config


def _head_row(config: dict[str, Any], width: int) -> int:
    """Logits as the head gives them, upcast, divided by the temperature, and their log-softmax."""
    return config["vocab_size"] * (width + 3 * 4)


def _token(side: str, engine: dict[str, Any], config: dict[str, Any], width: int, columns: int) -> int:
    """Bytes a token of a batch: its keys and values in all layers, or one layer's activations."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    # residual, its norm, queries, keys, values and output, and the three products of a gated MLP
    activations = (6 * hidden + 3 * (config.get("intermediate_size") or 4 * hidden)) * width
    if side == "training":
        scores = heads * columns * (width + 4) if engine["attention"] == "eager" else 0
        return activations + scores
    cached = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * head_dim * width
    return activations + cached * (2 if engine["enable_prefix_caching"] else 1)  # shared prefixes are copies
