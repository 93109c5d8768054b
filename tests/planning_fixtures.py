"""An experiment, a checkpoint directory and evidence of two scorers, small and whole, for tests to spoil."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np

from libxd import canon, config, tensors
from libxd.experiment import Experiment
from libxd.identity import UNPROCESSED

HEADS, KV_HEADS, VOCABULARY = 12, 4, 259


def experiment_config(**changes: Any) -> dict[str, Any]:
    """A config that needs no file but a sequences file, which is not at hand. `changes` replace top-level fields."""
    return copy.deepcopy({
        "schema_version": "xd.experiment_config.v1",
        "experiment_id": "trial",
        "scenario_id": "trial-cpu",
        "contract_source": "ws1",
        "contract_version": "current",
        "strategy": "one_at_a_time",
        "strict_fallback": True,
        "identity": {
            "checkpoint": {"synthetic": {"name": "xd-smoke-1", "seed": 7}},
            "tokenizer": {"id": "none", "policy": "token_ids"},
            "sequences": {"path": None},
            "semantics": {
                "logprobs": "raw", "temperature": 1.0, "top_p": 1.0, "top_k": 0,
                "penalties": {"repetition": 1.0, "presence": 0.0, "frequency": 0.0},
            },
            "rollout_mode": "decode",
            "cache_policy": {"rollout": "kv_cache", "training": "forbidden"},
            "model_state": "pre_update",
            "model": {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY},
        },
        "baseline": {
            "batch": {"size": 8},
            "rollout": {
                "tensor_parallel_size": 1, "context_parallel_size": 1, "dtype": "bfloat16",
                "enable_prefix_caching": True, "enforce_eager": True,
            },
            "training": {"attention_backend": "sdpa", "compute_dtype": "bfloat16", "sharding": "unsharded"},
            "logp": {"backend": "native"},
        },
        "interventions": [
            {"path": "batch.size", "values": [1, 2]},
            {"path": "rollout.dtype", "values": ["float32"]},
        ],
        "scenario": {"level": "S0", "device": "cpu"},
        **changes,
    })  # fmt: skip


def put(value: Any, pointer: str, item: Any) -> Any:
    """Set the place of a JSON pointer; returns the whole."""
    *parents, last = pointer.strip("/").split("/")
    place = value
    for name in parents:
        place = place[int(name) if isinstance(place, list) else name]
    place[int(last) if isinstance(place, list) else last] = item
    return value


def parse(value: Any, base: Path = Path(".")) -> Experiment:
    return config.parse(value, base, "trial.json")


def checkpoint_directory(path: Path, **facts: int) -> Path:
    """A directory that looks like a checkpoint and its tokenizer; its weight file holds one small tensor."""
    path.mkdir(parents=True)
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY}
    (path / "config.json").write_text(json.dumps(sizes | facts))
    tensors.write(path / "model.safetensors", {"w": np.zeros(1, np.float32)}, {})
    (path / "tokenizer.json").write_text("{}")
    (path / "README.md").write_text("not part of it")
    return path


def evidence(identity: dict[str, Any], side: str) -> list[dict[str, Any]]:
    """What a faithful scorer of `side` leaves: the parts of its readback and score file that identity is judged by."""
    sequences, weights = identity["sequences"], identity["weights"][side]
    observed = {
        **{name: sequences[name] for name in
           ("token_ids", "selected_ids", "cu_seqlens", "active_mask", "attention_mask", "positions")},
        "weights_before": weights["digest"], "weights_after": weights["digest"], "weights_dtype": weights["dtype"],
        "mode_before": "eval", "mode_after": "eval", "optimizer": False,
        "cache": "kv_cache" if side == "rollout" else "none",
        "scoring_mode": "decode" if side == "rollout" else "teacher_forced",
        "semantics": UNPROCESSED, "model_state": "pre_update",
    }  # fmt: skip
    readback = {"observed": observed, "parameters": weights["parameters"], "changed_parameters": {},
                "buffers": {"rotary": {"dtype": "float32", "digest": "4" * 64}}, "not_parameters": []}  # fmt: skip
    metadata = {"semantics": UNPROCESSED, "mode": observed["scoring_mode"], "observed": observed}
    score = {"metadata": metadata, **{name: sequences[name] for name in ("token_ids", "active_mask", "cu_seqlens")}}
    return json.loads(json.dumps([readback, score]))  # no two places share an object


def pinned_identity() -> dict[str, Any]:
    """An identity.json in which nothing is null."""
    digests = {name: canon.digest(name) for name in
               ("token_ids", "selected_ids", "cu_seqlens", "active_mask", "attention_mask", "positions", "prompt_lens")
               }  # fmt: skip
    resolved = parse(experiment_config()).resolution.identity
    whole = canon.digest(digests | {"packing": "none"})
    counts = {"num_sequences": 2, "num_tokens": 9, "num_active": 4, "packing": "none"}
    return {
        **copy.deepcopy(resolved),
        "schema_version": "xd.identity.v1",
        "case_id": "c-" + "0" * 16,
        "sequences": {**digests, **counts, "digest": whole},
        "weights": {side: held_weights("bfloat16") for side in ("rollout", "training")},
    }


def held_weights(dtype: str) -> dict[str, Any]:
    parameters = {f"model.layers.{i}.weight": canon.digest([dtype, i]) for i in range(3)}
    return {"dtype": dtype, "digest": canon.digest(parameters), "parameters": parameters}
