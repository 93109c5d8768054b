"""A Llama checkpoint in Hugging Face's form, written as a float32 GGUF file.

llama.cpp rotates pairs of neighbours where the checkpoint rotates two halves of a head, so rows of the query and key
projections change places. Nothing is rounded: float32 holds every value of bfloat16 and float16.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from libxd import checkpoint, strictjson
from libxd.errors import Status, XdError
from libxd.tensors import TensorFile

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_BACK = {theirs: ours for ours, theirs in _TOP.items()}
_LAYER_BACK = {theirs: ours for ours, theirs in _LAYER.items()}
#: what a config must say, where it says it at all, for the graph that llama.cpp builds to be this model's
_PLAIN = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_NORMAL, _CONTROL = 1, 3  # kinds of token, by GGUF's own numbers


def hf_name(name: str) -> str | None:
    """The checkpoint's name of a GGUF tensor; None for one that no checkpoint has."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight" if match[2] in _LAYER else None
    own = name.removesuffix(".weight")
    return f"{_TOP[own]}.weight" if own in _TOP else None


def gguf_name(name: str) -> str | None:
    """The other way round."""
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name):
        return f"blk.{match[1]}.{_LAYER_BACK[match[2]]}.weight" if match[2] in _LAYER_BACK else None
    own = name.removesuffix(".weight")
    return f"{_TOP_BACK[own]}.weight" if own in _TOP_BACK else None


def rotated_heads(name: str, config: dict[str, Any]) -> int | None:
    """Over how many heads the rows of a tensor (by the checkpoint's name) change places; None: they do not."""
    if name.endswith("self_attn.q_proj.weight"):
        return config["num_attention_heads"]
    if name.endswith("self_attn.k_proj.weight"):
        return config.get("num_key_value_heads", config["num_attention_heads"])
    return None


def to_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * head_dim, hidden] from two halves a head to pairs side by side."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def to_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """The other way round."""
    pairs = weight.reshape(heads, len(weight) // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def config_of(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The checkpoint's config. XdError 69 for a model that this adapter cannot write."""
    config = checkpoint.config_of(directory)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    odd = {name: config[name] for name, wanted in _PLAIN.items() if config.get(name, wanted) != wanted}
    if "model_type" not in config:
        odd["model_type"] = None
    if kind != "default":
        odd["rope_type"] = kind
    if odd:
        raise XdError("this adapter writes plain Llama models as GGUF, and this is another one", status=Status.REFUSED,
                      code="unsupported-model", where=str(Path(directory) / "config.json"), found=odd)  # fmt: skip
    return config


def write(directory: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Write the GGUF file. XdError 69 for a model or a tokenizer of another kind, 65 for a config without sizes."""
    config = config_of(directory)
    writer = gguf.GGUFWriter(path, "llama")
    try:
        _write_sizes(writer, config)
    except (KeyError, TypeError) as error:
        raise XdError(f"a model's config says its sizes: {type(error).__name__}: {error}", code="bad-checkpoint",
                      where=str(Path(directory) / "config.json")) from error  # fmt: skip
    _write_vocabulary(writer, directory, config)
    for name, weight in _parameters(directory, config):
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def _write_vocabulary(writer: gguf.GGUFWriter, directory: str | os.PathLike[str], config: dict[str, Any]) -> None:
    """The tokens' texts, by which the server cuts its answers into characters; no text is ever tokenised."""
    path = Path(directory) / "tokenizer.json"
    value = strictjson.load(path)
    model = value.get("model") if isinstance(value, dict) else None
    if not isinstance(model, dict) or model.get("type") != "BPE" or "ByteLevel" not in path.read_text():
        raise XdError("this adapter writes byte-level BPE vocabularies alone", status=Status.REFUSED,
                      code="unsupported-tokenizer", where=str(path))  # fmt: skip
    size = config["vocab_size"]
    texts = [f"[unused {i}]" for i in range(size)]
    kinds = [_NORMAL] * size
    for text, i in model["vocab"].items():
        if i < size:
            texts[i] = text
    for added in value.get("added_tokens", []):
        if added["id"] < size:
            texts[added["id"]], kinds[added["id"]] = added["content"], _CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    writer.add_add_bos_token(False)


def _parameters(directory: str | os.PathLike[str], config: dict[str, Any]) -> list[tuple[str, np.ndarray]]:
    found, unknown = [], []
    for path, names in checkpoint.weight_files(directory).items():
        with TensorFile(path, follow_symlinks=True) as file:
            for name in names if names is not None else file.names:
                theirs = gguf_name(name)
                if theirs is None:
                    unknown.append(name)
                    continue
                weight = checkpoint.to_float32(file.array(name), file.dtype(name))
                heads = rotated_heads(name, config)
                found.append((theirs, to_pairs(weight, heads) if heads else np.ascontiguousarray(weight)))
    if unknown:
        raise XdError("the checkpoint has tensors that llama.cpp's Llama has not", status=Status.REFUSED,
                      code="unsupported-model", where=str(directory), found=sorted(unknown))  # fmt: skip
    return found
