"""Sampling from a synthetic model: the rollout engine's own forward, a batch of prompts, a token a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from libxd import canon
from libxd.errors import XdError
from libxd.runtimes.cpu_smoke import geometry
from libxd.runtimes.cpu_smoke.cache import BlockPool, BlockTable
from libxd.runtimes.cpu_smoke.engine import build
from libxd.runtimes.cpu_smoke.kernels import EagerKernels
from libxd.runtimes.cpu_smoke.model import PagedAttention
from libxd.runtimes.protocol import Piece

#: the ids that end a response: so many that an untrained model, which has no end in mind, meets one in a while
EOS_IDS = frozenset(range(16))
#: rotary angles are exact to float32 far beyond; longer prompts would be no smoke test
MAX_POSITIONS = 4096


class SmokeGenerator:
    """The `Generator` of runtime cpu-smoke. Text is token ids separated by spaces: there is no tokenizer."""

    def __init__(self, synthetic: dict[str, Any], dtype: str) -> None:
        self._synthetic = synthetic
        self._model = build(synthetic, dtype, EagerKernels())
        self.vocab_size = geometry.of(synthetic).vocab
        self.max_positions = MAX_POSITIONS
        self.eos_ids = EOS_IDS
        self._tables: list[BlockTable] = []

    def encode(self, prompt: dict[str, Any]) -> list[int]:
        words = prompt["text"].split() if "text" in prompt else None
        if words is None or not all(word.isdecimal() and int(word) < self.vocab_size for word in words):
            raise XdError(
                "not token ids",
                code="bad-prompt",
                found=prompt.get("text", "messages"),
                expected=f"text: ids below {self.vocab_size}, separated by spaces",
            )
        return [int(word) for word in words]

    def prefill(self, prompts: list[list[int]]) -> np.ndarray:
        shape = self._model.geometry
        pool = BlockPool(shape.layers, 1, 1, (shape.kv_heads, shape.head_dim), self._model.dtype, share_prefixes=False)
        self._tables = [
            pool.table(tuple((token, index, True) for index, token in enumerate(prompt)), 0) for prompt in prompts
        ]
        pieces = [Piece(row, 0, len(prompt)) for row, prompt in enumerate(prompts)]
        return self._logits(pieces, [token for prompt in prompts for token in prompt])

    def step(self, ids: list[int]) -> np.ndarray:
        pieces = [Piece(row, table.length, 1) for row, table in enumerate(self._tables)]
        for table in self._tables:
            table.reserve([True])
        return self._logits(pieces, ids)

    def _logits(self, pieces: list[Piece], ids: list[int]) -> np.ndarray:
        """Logits float32 [B, V] after the last row of each piece."""
        positions = [index for piece in pieces for index in range(piece.start, piece.start + piece.count)]
        last = np.cumsum([piece.count for piece in pieces]) - 1
        with torch.inference_mode():
            attention = PagedAttention(self._model.kernels, pieces, self._tables)
            hidden = self._model(torch.tensor(ids), torch.tensor(positions), attention)
            normed, (weight,) = self._model.head(hidden[torch.from_numpy(last)])
            return self._model.logits(normed, weight).float().numpy()

    def describe(self) -> dict[str, Any]:
        return {
            "model": {"digest": canon.digest(self._synthetic), "synthetic": self._synthetic},
            "tokenizer": {"policy": "token_ids", "digest": None},
            "engine": {
                "class": type(self).__name__,
                "device": "cpu",
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            },
        }

    def close(self) -> None:
        self._tables = []
        del self._model
