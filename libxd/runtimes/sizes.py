"""What adapters reckon with before anything is built: sizes of checkpoints and of frozen sequences. No torch."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable

from libxd import checkpoint
from libxd.errors import XdError
from libxd.runtimes.planning import BYTES
from libxd.tensors import TensorFile

#: what a config must say -> what else it may be called there
_NAMES: dict[str, tuple[str, ...]] = {
    "vocab_size": (), "hidden_size": ("n_embd",), "num_hidden_layers": ("n_layer",), "num_attention_heads": ("n_head",),
}  # fmt: skip
#: what follows from that where a config leaves it out
_USUAL: dict[str, Callable[[dict[str, int]], int]] = {
    "num_key_value_heads": lambda model: model["num_attention_heads"],
    "head_dim": lambda model: model["hidden_size"] // max(model["num_attention_heads"], 1),
    "intermediate_size": lambda model: 4 * model["hidden_size"],
}


def weights(directory: str, width: int) -> int:
    """Bytes of a checkpoint's parameters, floating ones `width` bytes an element, by the headers of its files."""
    total = 0
    for path, names in checkpoint.weight_files(directory).items():
        with TensorFile(path, follow_symlinks=True) as file:
            for name in names if names is not None else file.names:
                held = len(file.raw(name))
                total += math.prod(file.shape(name)) * width if file.dtype(name) in BYTES else held
    return total


def lengths(path: str | None) -> list[int]:
    """Tokens of each frozen sequence; none when they are not at hand."""
    if path is None or not os.path.exists(path):
        return []
    with TensorFile(path, follow_symlinks=True) as file:
        bounds = file.array("cu_seqlens").tolist()
    return [end - start for start, end in itertools.pairwise(bounds)]


def of_model(directory: str) -> dict[str, int]:
    """A decoder's sizes, by the names that most configs give them: those of `_NAMES` and `_USUAL`.

    XdError 65 where a checkpoint's config does not say one that nothing else tells, or says no positive integer.
    """
    config = checkpoint.config_of(directory)
    text = config.get("text_config") or config  # a multimodal model keeps it apart
    found = {name: next((text[other] for other in (name, *others) if text.get(other) is not None), None)
             for name, others in _NAMES.items()}  # fmt: skip
    for name, usual in _USUAL.items():
        given = text.get(name)
        found[name] = usual(found) if given is None and None not in found.values() else given
    for name, value in found.items():
        if type(value) is not int or value < 1:
            raise XdError("does not say how large the model is", code="bad-checkpoint", found=value,
                          where=os.path.join(directory, "config.json"), path=f"/{name}", expected="a positive integer",
                          )  # fmt: skip
    return found


def token_cache(model: dict[str, int], width: int) -> int:
    """Bytes of a token's keys and values in all layers, `width` bytes an element."""
    return 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"] * width
