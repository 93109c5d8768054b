"""Give a checkpoint heads of zeros, so that they split over more ranks; what it computes stays the same.

A query head of zeros looks at all tokens alike, and its columns in the output projection are zero, so nothing of it
arrives. Each new key-value head comes with its group of query heads, and the old ones keep their places. The directory
appears whole or not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from libxd import checkpoint

#: files beside config and weights that are taken over as they are
_SUMS = "SHA256SUMS"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="the checkpoint, in one safetensors file")
    parser.add_argument("--kv-heads", type=int, required=True, help="key-value heads afterwards")
    parser.add_argument("--out", type=Path, required=True, help="the directory to make")
    arguments = parser.parse_args()
    if arguments.out.exists():
        print(f"{arguments.out}: already there")
        return
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{arguments.out.name}-", dir=arguments.out.parent) as scratch:
        made = Path(scratch) / "checkpoint"
        made.mkdir()
        write(arguments.model, arguments.kv_heads, made)
        made.rename(arguments.out)
    print(f"{arguments.out}: {arguments.model} with {arguments.kv_heads} key-value heads")


def write(model: Path, kv_heads: int, out: Path) -> None:
    """The padded checkpoint in `out`."""
    from safetensors.torch import load_file, save_file

    config = checkpoint.config_of(model)
    heads, held = config["num_attention_heads"], config["num_key_value_heads"]
    if kv_heads <= held:
        sys.exit(f"pad_heads: {model}: has {held} key-value heads already (give more)")
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    group = heads // held
    rows = {"q_proj": kv_heads * group * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
    weights = {name: padded(name, weight, rows) for name, weight in load_file(model / checkpoint.SINGLE).items()}
    for path in model.iterdir():
        if path.is_file() and path.name not in ("config.json", checkpoint.SINGLE, _SUMS):
            shutil.copy(path, out)
    save_file(weights, out / checkpoint.SINGLE, {"format": "pt"})
    (out / checkpoint.SINGLE).chmod((model / checkpoint.SINGLE).stat().st_mode & 0o777)
    config |= {"num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for path in out.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def padded(name: str, weight: Any, rows: dict[str, int]) -> Any:
    """A parameter with zeros behind: more rows of queries, keys and values, more columns of the output projection."""
    from torch.nn import functional

    kind = name.split(".")[-2] if "." in name else name
    if kind in rows:
        more = rows[kind] - weight.shape[0]
        return functional.pad(weight, (0, more) if weight.dim() == 1 else (0, 0, 0, more)).contiguous()
    if kind == "o_proj" and weight.dim() == 2:
        return functional.pad(weight, (0, rows["q_proj"] - weight.shape[1])).contiguous()
    return weight


if __name__ == "__main__":
    main()
