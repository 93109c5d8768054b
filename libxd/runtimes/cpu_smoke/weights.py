"""The weights of a synthetic checkpoint, from a counter: the same bits under any version of numpy and torch.

Each parameter is a stream of its own: BLAKE3 in extendable-output mode over the canonical JSON of model name, seed and
parameter name, read as little-endian 16-bit numbers. A draw is the sum of twelve of them (Irwin-Hall: near enough to
normal), which is exact in integers, so that no rounding of a library function enters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from libxd import canon, checkpoint
from libxd.runtimes.cpu_smoke import geometry

if TYPE_CHECKING:
    import numpy as np

_DRAWS = 12
#: standard deviations; a matrix whose own is not listed has fan_in ** -0.5, which keeps the scale of its input
_EMBEDDING_STD = 1.0
_HEAD_STD = 0.3  # logits of standard deviation 2.4: an entropy like that of a small language model
_NORM_STD = 0.1  # around a gain of one


def parameters(synthetic: dict[str, Any]) -> dict[str, np.ndarray]:
    """Hugging Face name -> float32 array, in model order."""
    shapes = geometry.of(synthetic).shapes()
    return {name: _parameter(synthetic, name, shape) for name, shape in shapes.items()}


def digests(synthetic: dict[str, Any], dtype: str) -> dict[str, str]:
    """Hugging Face name -> digest of the parameter cast to `dtype`; numpy only."""
    return {
        name: checkpoint.parameter_digest(dtype, array.shape, [checkpoint.from_float32(array, dtype)])
        for name, array in parameters(synthetic).items()
    }


def _parameter(synthetic: dict[str, Any], name: str, shape: tuple[int, ...]) -> np.ndarray:
    import numpy as np

    normal = standard_normal({"name": synthetic["name"], "seed": synthetic["seed"], "parameter": name}, shape)
    if len(shape) == 1:
        scaled = 1.0 + _NORM_STD * normal
    elif name == "model.embed_tokens.weight":
        scaled = _EMBEDDING_STD * normal
    elif name == "lm_head.weight":
        scaled = _HEAD_STD * normal
    else:
        scaled = normal / np.sqrt(np.float64(shape[1]))
    return scaled.astype(np.float32)


def standard_normal(key: Any, shape: tuple[int, ...]) -> np.ndarray:
    """float64 draws of mean 0 and variance 1 (to 2e-10), a pure function of a JSON key and the shape."""
    import numpy as np
    from blake3 import blake3

    count = int(np.prod(shape))
    stream = blake3(canon.dumps(key)).digest(length=2 * _DRAWS * count)
    sums = np.frombuffer(stream, dtype="<u2").reshape(count, _DRAWS).sum(axis=1, dtype=np.int64)
    return ((2 * sums - _DRAWS * 65535) / 131072.0).reshape(shape)
