"""Sizes that must divide a model, and what follows from them: world sizes, heads and vocabulary of a rank.

Tensor parallelism of size t splits heads: t divides the attention heads, and t divides the key-value heads or they
divide t (each then stands on several ranks). The vocabulary is padded up to a multiple of t. Context parallelism splits
positions and divides nothing of the model. The layout an engine really has is read back; here is what must follow.
"""

from __future__ import annotations

from typing import Any


def conflict(tensor_parallel_size: int, model: dict[str, int]) -> str | None:
    """Why a model's heads do not split over that many ranks; None when they do."""
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    if heads % tensor_parallel_size:
        return f"does not divide the model's {heads} attention heads"
    if kv_heads % tensor_parallel_size and tensor_parallel_size % kv_heads:
        return f"neither divides the model's {kv_heads} key-value heads nor is a multiple of them"
    return None


def derived(values: dict[str, Any], model: dict[str, int] | None) -> dict[str, int | None]:
    """What follows from a case's knobs and the model's sizes. Where the model, or a knob, is unknown, null."""
    tensor_parallel_size, context_parallel_size = (values[f"rollout.{kind}_parallel_size"] for kind in
                                                   ("tensor", "context"))  # fmt: skip
    known = tensor_parallel_size is not None and context_parallel_size is not None
    sizes: dict[str, int | None] = {
        "rollout_world_size": tensor_parallel_size * context_parallel_size if known else None,
        "training_world_size": 1 if values["training.sharding"] == "unsharded" else None,
        "attention_heads_per_rank": None,
        "kv_heads_per_rank": None,
        "kv_head_replicas": None,
        "vocab_size": None,
        "vocab_padded_size": None,
        "vocab_shard_size": None,
    }
    if model is not None and tensor_parallel_size is None:
        sizes["vocab_size"] = model["vocab_size"]
    elif model is not None:
        kv_heads, vocab_size = model["num_key_value_heads"], model["vocab_size"]
        shard = -(-vocab_size // tensor_parallel_size)
        sizes |= {
            "attention_heads_per_rank": model["num_attention_heads"] // tensor_parallel_size,
            "kv_heads_per_rank": max(1, kv_heads // tensor_parallel_size),
            "kv_head_replicas": max(1, tensor_parallel_size // kv_heads),
            "vocab_size": vocab_size,
            "vocab_padded_size": shard * tensor_parallel_size,
            "vocab_shard_size": shard,
        }
    return sizes
