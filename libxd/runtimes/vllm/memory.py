"""How large a vLLM engine is: its longest request, its cache, its forwards, and the memory that it needs. No torch.

The engine serves every batch size of the frozen sequences, so its cache holds all of them: nothing is preempted, and no
prefix is evicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from libxd.runtimes import sizes
from libxd.runtimes.planning import BYTES

#: the most prompt tokens that go into one forward while decoding; longer batches of prompts go in pieces
PROMPT_TOKENS = 16384
#: an interpreter with vLLM in it, and on CUDA a context with its libraries
_PROCESS_BYTES = {"cpu": 3 << 29, "cuda": 3 << 30}


@dataclass(frozen=True)
class Sizes:
    """requests: at once; length: the longest, in tokens; forward: tokens that may go in together; cache: a rank's
    bytes."""

    requests: int
    length: int
    forward: int
    cache: int


def of(engine: dict[str, Any], locations: dict[str, Any]) -> Sizes:
    """The sizes for these frozen sequences. XdError 65 when the config does not say a model's sizes."""
    directory, lengths = locations["checkpoint"], sizes.lengths(locations.get("sequences"))
    token = _token_cache(sizes.of_model(directory), engine)
    # a token more than is frozen: the one that vLLM samples after the last
    total, longest = sum(lengths) + len(lengths), max(lengths, default=0) + 1
    forward = total if engine["mode"] == "prefill" else min(total, PROMPT_TOKENS)
    block = engine["block_size"]
    # a last block that is not full for each sequence, and the one that vLLM keeps for itself
    blocks = sum(-(-(length + 1) // block) for length in lengths) + len(lengths) + 1
    return Sizes(max(len(lengths), 1), longest, max(forward, longest), blocks * block * token)


def _token_cache(model: dict[str, int], engine: dict[str, Any]) -> int:
    """Bytes of a token's keys and values on one rank, which has a part of the heads, or at least one."""
    whole, heads = sizes.token_cache(model, BYTES[engine["dtype"]]), model["num_key_value_heads"]
    return whole // heads * max(1, heads // engine["tensor_parallel_size"])


def estimate(engine: dict[str, Any], locations: dict[str, Any]) -> int:
    """Bytes, roughly: weights, cache, activations, the process.

    On a CPU of all ranks, which share the memory, with the head packed beside the embedding, and all that is packed
    kept beside it as it was recovered. On CUDA of one rank, which has a device of its own. 0 when the checkpoint
    is not at hand. XdError as reading a checkpoint.
    """
    directory = locations["checkpoint"]
    if not directory:
        return 0
    width = BYTES[engine["dtype"]]
    wanted, model = of(engine, locations), sizes.of_model(directory)
    head = model["vocab_size"] * model["hidden_size"] * width
    # residual, its norm, queries, keys, values and output, and the three products of a gated MLP
    row = (6 * model["hidden_size"] + 3 * model["intermediate_size"]) * width
    rows = wanted.length if engine["mode"] == "prefill" else wanted.requests
    logits = rows * model["vocab_size"] * (width + 2 * BYTES["float32"])
    weights = sizes.weights(directory, width)
    of_each = wanted.cache + wanted.forward * row + logits + _PROCESS_BYTES[engine["device"]]
    ranks = engine["tensor_parallel_size"]
    if engine["device"] == "cuda":
        return weights // ranks + of_each
    return 2 * (weights + head) + ranks * of_each
