"""Pairs of scorers of one tiny random model that are both right, in any dtype: numpy alone, milliseconds each.

What two engines may do differently is drawn for each pair: in how many parts the terms of a product are added, where
a result is rounded to the dtype and where it goes on in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from libxd.roundoff import UNIT_ROUNDOFF, Sample

SEQUENCES, LENGTH = 4, 12


@dataclass(frozen=True)
class Engine:
    """How one of the two computes: parts of a product's terms, what stays in float32, what it gets wrong."""

    parts: int = 1
    wide_norm: bool = False
    wide_attention: bool = False
    wide_logits: bool = False
    temperature: float = 1.0
    weight: float = 1.0
    scale: float = 1.0
    shift: int = 0


class Model:
    """A causal transformer of random sizes: one head, rotary-free positions, weights of float32 [in, out]."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.hidden = int(draw.choice([8, 16, 32, 64, 128]))
        self.layers = int(draw.integers(1, 5))
        vocabulary = int(draw.choice([32, 64, 256, 1024]))
        gain = float(draw.choice([1.0, 2.0, 4.0]))  # of the head: how far logits are apart

        def matrix(rows: int, columns: int, size: float = 1.0) -> np.ndarray:
            return (draw.standard_normal((rows, columns)) * size / np.sqrt(rows)).astype(np.float32)

        h = self.hidden
        self.embedding = draw.standard_normal((vocabulary, h)).astype(np.float32)
        self.places = draw.standard_normal((LENGTH + 1, h)).astype(np.float32)
        self.blocks = [
            {"qkv": matrix(h, 3 * h), "out": matrix(h, h), "up": matrix(h, 4 * h), "down": matrix(4 * h, h)}
            for _ in range(self.layers)
        ]
        self.head = matrix(h, vocabulary, gain)
        self.ids = draw.integers(0, vocabulary, (SEQUENCES, LENGTH))
        self.engines = [
            Engine(int(draw.choice([1, 2, 4])), *(bool(flag) for flag in draw.integers(0, 2, 3))) for _ in range(2)
        ]

    def logprobs(self, dtype: str, engine: Engine) -> np.ndarray:
        """float32 [SEQUENCES, LENGTH - 1], in nats."""
        cast = CASTS[dtype]

        def product(a: np.ndarray, b: np.ndarray, wide: bool = False) -> np.ndarray:
            terms = np.array_split(np.arange(a.shape[-1]), engine.parts)
            total = sum((a[..., t] @ b[..., t, :] for t in terms[1:]), a[..., terms[0]] @ b[..., terms[0], :])
            return total if wide else cast(total)

        def norm(x: np.ndarray) -> np.ndarray:
            scaled = np.square(x).mean(-1, keepdims=True, dtype=np.float32) + np.float32(1e-5)
            return cast(x / np.sqrt(scaled) if engine.wide_norm else x * cast(1 / np.sqrt(scaled)))

        places = np.arange(LENGTH) + engine.shift * (np.arange(LENGTH) >= LENGTH // 2)
        x = cast(cast(self.embedding)[self.ids] + cast(self.places)[places])
        mask = np.where(np.tril(np.ones((LENGTH, LENGTH), bool)), np.float32(0), np.float32(-1e4))
        for number, block in enumerate(self.blocks):
            q, k, v = np.split(product(norm(x), cast(block["qkv"])), 3, axis=-1)
            root = np.float32(engine.scale / np.sqrt(self.hidden))
            scores = product(q, k.swapaxes(-1, -2), engine.wide_attention) * root + mask
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            x = cast(x + product(product(weights if engine.wide_attention else cast(weights), v), cast(block["out"])))
            down = block["down"] * np.float32(engine.weight if number == 0 else 1)
            x = cast(x + product(np.maximum(product(norm(x), cast(block["up"])), 0), cast(down)))
        logits = product(norm(x), cast(self.head), engine.wide_logits)[:, :-1] / np.float32(engine.temperature)
        shifted = logits - logits.max(-1, keepdims=True)
        selected = np.take_along_axis(shifted, self.ids[:, 1:, None], -1)[..., 0]
        return selected - np.log(np.exp(shifted).sum(-1))


def samples(model: Model, rollout: Engine, training: Engine) -> list[Sample]:
    """The rungs of a pair, both sides in each dtype."""
    return [sample(dtype, model.logprobs(dtype, rollout), model.logprobs(dtype, training)) for dtype in CASTS]


def sample(dtype: str, rollout: np.ndarray, training: np.ndarray) -> Sample:
    """A rung of logprobs float32 [B, N], all of them active."""
    d = np.abs(training - rollout).astype(np.float64)
    return Sample(UNIT_ROUNDOFF[dtype], d.sum(1), np.full(len(d), d.shape[1]), float(d.max()))


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(
        np.float32
    )


CASTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bfloat16": _bfloat16,
    "float16": lambda x: np.asarray(x, np.float16).astype(np.float32),
    "float32": lambda x: np.asarray(x, np.float32),
}
