"""A random Llama of two layers with a byte-level vocabulary, frozen sequences of its tokens, and rows of a plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from libxd import sequences
from libxd.sequences import Sequences

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS, CONTEXT = 260, 64, 4, 2, 16, 96, 2, 64
BIN = Path(sys.executable).parent
#: runtimes that are llamacpp but for one thing, found by entry point
ENGINES = Path(__file__).parent / "engines"


def byte_tokens() -> list[str]:
    """How byte-level BPE writes the 256 bytes: printable ones as they are, the others from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def save_model(directory: Path, seed: int = 7, **changes: Any) -> Path:
    """A token's id is its byte; 256 is "he", 257 and 258 are nothing's, 259 ends."""
    directory.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
                "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
                "post_attention_layernorm": (HIDDEN,),
                "mlp.gate_proj": (INNER, HIDDEN),
                "mlp.up_proj": (INNER, HIDDEN),
                "mlp.down_proj": (HIDDEN, INNER),
            }.items()
        }
    weights = {name: draw.normal(1.0 if len(shape) == 1 else 0.0, 0.2, shape).astype(np.float32)
               for name, shape in shapes.items()}  # fmt: skip
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": HEAD_DIM,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "tie_word_embeddings": True,
        "vocab_size": VOCABULARY, "attention_bias": False, "mlp_bias": False, **changes,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    vocabulary = {text: i for i, text in enumerate([*byte_tokens(), "he"])}
    (directory / "tokenizer.json").write_text(json.dumps({
        "version": "1.0",
        "added_tokens": [{"id": 259, "content": "<|end|>", "special": True}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [["h", "e"]]},
    }))  # fmt: skip
    return directory


def frozen(*parts: tuple[str, str]) -> Sequences:
    """Sequences of (prompt, answer), a byte a token."""
    prompts, answers = zip(*([list(text.encode()) for text in part] for part in parts), strict=True)
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    active = np.concatenate([[False] * len(p) + [True] * len(a) for p, a in zip(prompts, answers, strict=True)])
    order = {tuple(prompt): i for i, prompt in reversed(list(enumerate(prompts)))}
    return Sequences(
        token_ids=np.concatenate([p + a for p, a in zip(prompts, answers, strict=True)]).astype(np.int32),
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int64),
        active_mask=active.astype(np.bool_),
        attention_mask=np.ones(sum(lengths), np.bool_),
        positions=np.concatenate([np.arange(length) for length in lengths]).astype(np.int32),
        prompt_lens=np.array([len(prompt) for prompt in prompts], np.int32),
        prompt_index=np.array([order[tuple(prompt)] for prompt in prompts], np.int32),
        logprobs=np.where(active, -1.0, np.nan).astype(np.float32),
    )


def config(model: Path, held: Path, **rollout: Any) -> dict[str, Any]:
    """An experiment's config, float32 on both sides."""
    semantics = {"logprobs": "raw", "temperature": 1.0, "top_p": 1.0, "top_k": 0,
                 "penalties": {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}}  # fmt: skip
    return {
        "schema_version": "xd.experiment_config.v1", "experiment_id": "tiny", "scenario_id": "tiny-llamacpp",
        "contract_source": "ws1", "contract_version": "current", "strategy": "one_at_a_time", "strict_fallback": False,
        "identity": {
            "checkpoint": {"path": str(model), "digest": None},
            "tokenizer": {"id": "tiny", "policy": "token_ids", "path": None, "digest": None},
            "sequences": {"path": str(held), "digest": None}, "semantics": semantics, "rollout_mode": "decode",
            "cache_policy": {"rollout": "kv_cache", "training": "forbidden"}, "model_state": "pre_update",
            "model": {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY},
        },
        "baseline": {
            "batch": {"size": 1},
            "rollout": {"tensor_parallel_size": 1, "context_parallel_size": 1, "dtype": "float32",
                        "enable_prefix_caching": True, "enforce_eager": True, **rollout},
            "training": {"attention_backend": "sdpa", "compute_dtype": "float32", "sharding": "unsharded"},
            "logp": {"backend": "native"},
        },
        "interventions": [], "scenario": {"level": "S1", "device": "cpu"},
    }  # fmt: skip


def tool(name: str, *arguments: object, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """One of xd's tools, as it is installed beside this interpreter."""
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ENGINES), **environment}
    return subprocess.run([BIN / name, *map(str, arguments)], input=stdin, capture_output=True, text=True, check=False,
                          timeout=300, env={**os.environ, **settings})  # fmt: skip


def row(place: Path, model: Path, held: Sequences, **rollout: Any) -> dict[str, Any]:
    """A planned row; its files are in `place`, a directory of its own."""
    place.mkdir(parents=True, exist_ok=True)
    sequences.write(place / "sequences.safetensors", held)
    (place / "tiny.json").write_text(json.dumps(config(model, place / "sequences.safetensors", **rollout)))
    done = tool("xd-plan", place / "tiny.json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[0])
