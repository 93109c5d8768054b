"""Make a checkpoint of a named shape with random weights: engines and kernels of a size whose weights cannot be had.

The weights are those of transformers' initialisation under a seed, drawn on the device that is named: another device or
release of torch draws others. The tokenizer is copied from a checkpoint whose vocabulary fits into the shape's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

_QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
          "rope_theta": 1e6, "rms_norm_eps": 1e-6}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {**_QWEN3, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
                 "intermediate_size": 12288, "tie_word_embeddings": False},
    "qwen3-8l": {**_QWEN3, "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
                 "intermediate_size": 3072, "tie_word_embeddings": True},
}  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a checkpoint directory to copy it from")
    parser.add_argument("--out", type=Path, required=True, help="the directory to make; it appears whole or not at all")
    parser.add_argument("--device", default="cpu", help="where the weights are drawn (default: cpu)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.out.exists():
        sys.exit(f"make_random_model: {given.out}: already there (move it away and run this again)")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{given.out.name}-", dir=given.out.parent) as scratch:
        made = Path(scratch) / "checkpoint"
        count = save(SHAPES[given.shape], given.tokenizer, made, given.device, given.seed)
        made.rename(given.out)
    print(f"{given.out}: {count / 1e9:.2f}e9 random parameters, bfloat16, seed {given.seed}")


def save(shape: dict[str, Any], tokenizer: Path, out: Path, device: str, seed: int) -> int:
    """Draw and write the model and its tokenizer; how many parameters it has."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    special = json.loads((tokenizer / "config.json").read_text())
    ids = {name: special.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**shape, **ids), dtype=torch.bfloat16)
    model.save_pretrained(out)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, out)
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    main()
