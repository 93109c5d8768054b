"""How much memory an hf engine needs, from a checkpoint's headers, its config and the frozen sequences. No torch.

An engine serves cases of several batch sizes, so a batch is taken to hold the longest sequences, `_ROWS` at most. Over
ranks it is what one device needs, or, on the CPU, what all ranks need of the machine.
"""

from __future__ import annotations

from typing import Any

from libxd.runtimes import sizes
from libxd.runtimes.planning import BYTES

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
    model = sizes.of_model(directory)
    width = BYTES[engine["dtype"]]
    tokens = sizes.lengths(locations.get("sequences"))
    rows, columns = min(len(tokens), _ROWS), max(tokens, default=0)
    head_rows = min(HEAD_ROWS, sum(tokens))
    held = sizes.weights(directory, width)
    if engine["device"] == "cuda":
        held = _part(held, side, engine, model, width)
    batch = rows * columns * _token(side, engine, model, width, columns)
    needed = held + head_rows * _head_row(model, width) + batch + _PROCESS_BYTES[engine["device"]]
    # a rank on the CPU has loaded the whole before it keeps its part
    return needed if engine["device"] == "cuda" else needed * engine["world_size"]


def _part(whole: int, side: str, engine: dict[str, Any], model: dict[str, int], width: int) -> int:
    """Bytes of weights on a rank's device: its part; sharded, beside it what is gathered at once, head and a layer."""
    if side == "rollout":
        return whole // engine["tensor_parallel_size"]
    ranks = engine["world_size"]
    gathered = 2 * model["vocab_size"] * model["hidden_size"] * width + whole // model["num_hidden_layers"]
    return whole if ranks == 1 else min(whole, whole // ranks + gathered)


def _head_row(model: dict[str, int], width: int) -> int:
    """Logits as the head gives them, upcast, divided by the temperature, and their log-softmax."""
    return model["vocab_size"] * (width + 3 * 4)


def _token(side: str, engine: dict[str, Any], model: dict[str, int], width: int, columns: int) -> int:
    """Bytes a token of a batch: its keys and values in all layers, or one layer's activations."""
    heads, hidden = model["num_attention_heads"], model["hidden_size"]
    # residual, its norm, queries, keys, values and output, and the three products of a gated MLP
    activations = (6 * hidden + 3 * model["intermediate_size"]) * width
    if side == "training":
        scores = heads * columns * (width + 4) if engine["attention"] == "eager" else 0
        return activations + scores
    copies = 2 if engine["enable_prefix_caching"] else 1  # shared prefixes are copies
    context = engine["context_parallel_size"]
    # partial attention is written out in float32: logits and exponentials
    scores = heads * columns * 2 * 4 // context if context > 1 else 0
    return activations + scores + sizes.token_cache(model, width) * copies // (context * engine["tensor_parallel_size"])
