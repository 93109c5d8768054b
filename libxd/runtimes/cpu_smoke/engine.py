"""What both sides' engines have in common: weights held, the operator bound, how a forward becomes logprobs.

Read-back looks at the live model: shards held and partial sums added, dtypes of the parameters, kernels called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from libxd.runtimes import live
from libxd.runtimes.cpu_smoke import attention, geometry, weights
from libxd.runtimes.cpu_smoke.kernels import Kernels
from libxd.runtimes.cpu_smoke.model import Attention, Decoder
from libxd.runtimes.cpu_smoke.shards import FlatShardStore, TensorParallelStore
from libxd.runtimes.protocol import Piece, Request
from libxd.runtimes.torch_engine import TorchEngine
from libxd.scoring.observer import Observer
from libxd.sequences import Sequences


class Engine(TorchEngine):
    """A decoder and what is needed to score with it; `RolloutEngine` and `TrainingEngine` say how it is run."""

    model: Decoder

    def __init__(self, model: Decoder) -> None:
        self.model = model
        super().__init__()

    def _forget_run(self) -> None:
        super()._forget_run()
        self.model.summed.clear()
        self.model.kernels.calls = 0

    # -- protocol

    def parameters(self) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
        for name, tensor in self.model.store.full():
            yield name, live.DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), live.raw_bytes(tensor)

    def not_parameters(self) -> list[str]:
        return []

    def describe(self) -> dict[str, Any]:
        return {
            "class": type(self).__name__,
            "model": type(self.model).__name__,
            "store": type(self.model.store).__name__,
            "kernels": type(self.model.kernels).__name__,
            "device": "cpu",
            "torch": torch.__version__,
        }

    def close(self) -> None:
        self._operator = None
        del self.model

    # -- shared steps

    @contextlib.contextmanager
    def _watched(self, observer: Observer) -> Iterator[None]:
        def hook(_module: Any, arguments: tuple[Any, ...]) -> None:
            ids, positions, attention = arguments
            observer.forward(attention.pieces, ids.numpy(), positions.numpy(), np.array(attention.attended(), np.bool_))

        handle = self.model.register_forward_pre_hook(hook)
        try:
            with observer.on_head(self.model.logits):
                yield
        finally:
            handle.remove()

    def _vocabulary(self) -> int:
        return self.model.geometry.vocab

    def _forward(self, sequences: Sequences, attention: Attention) -> Tensor:
        """Hidden states [M, E] of the rows that the attention's pieces name."""
        ids, positions = self._feed(sequences, attention.pieces)
        return self.model(_indices(ids), _indices(positions), attention)

    def _feed(self, sequences: Sequences, pieces: list[Piece]) -> tuple[np.ndarray, np.ndarray]:
        """The frozen ids and positions of these rows: [M] each."""
        cells = np.concatenate([cells_of(sequences, piece) for piece in pieces])
        return sequences.token_ids[cells], sequences.positions[cells]

    def _score_following(
        self, sequences: Sequences, pieces: list[Piece], hidden: Tensor, request: Request, observer: Observer,
        logprobs: np.ndarray,
    ) -> None:  # fmt: skip
        """Score, from these rows, every token behind a prompt that follows one of them."""
        rows, cells, row = [], [], 0
        for piece in pieces:
            begin, end = int(sequences.cu_seqlens[piece.sequence]), int(sequences.cu_seqlens[piece.sequence + 1])
            for index in range(piece.start, piece.start + piece.count):
                following = index + 1
                if sequences.prompt_lens[piece.sequence] <= following < end - begin:
                    rows.append(row)
                    cells.append(begin + following)
                row += 1
        if rows:
            ids = self._selected_ids(sequences, cells)
            observer.selected(cells, ids)
            taken = self._select(hidden[rows], _indices(ids), live.temperature(request.semantics))
            logprobs[cells] = taken.numpy()

    def _selected_ids(self, sequences: Sequences, cells: list[int]) -> np.ndarray:
        return sequences.token_ids[cells]

    def _select(self, hidden: Tensor, ids: Tensor, temperature: float) -> Tensor:
        """Selected logprobs float32 [N] of ids [N], by the bound operator.

        With the vocabulary split over ranks, the operator sees a shard at a time: it gives logit - log-sum-exp of the
        shard for one of its ids, hence the shard's log-sum-exp; these are merged in rank order.
        """
        normed, shards = self.model.head(hidden)
        if len(shards) == 1:
            return self._call(normed, shards[0], ids, temperature)
        selected, parts, first = torch.zeros(len(ids)), [], 0
        for shard in shards:
            local = ids - first
            held = (local >= 0) & (local < shard.shape[0])
            probe = torch.where(held, local, torch.zeros_like(local))
            values = self._call(normed, shard, probe, temperature)
            probed = self._logits(normed, shard).gather(1, probe.unsqueeze(1)).squeeze(1).float() / temperature
            parts.append(probed - values)
            selected = selected + torch.where(held, probed, torch.zeros_like(probed))
            first += shard.shape[0]
        return selected - attention.merge_log_sum_exp(parts)

    def _call(self, normed: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> Tensor:
        """The operator's logprobs float32 [N] over one vocabulary shard."""
        if self._operator.inputs == "hidden":
            return self._operator(normed, weight, ids, temperature=temperature)
        return self._operator(self._logits(normed, weight), ids, temperature=temperature)

    def _logits(self, normed: Tensor, weight: Tensor) -> Tensor:
        """The head's logits over one vocabulary shard: [N, V / ranks]."""
        logits = self.model.logits(normed, weight)
        self._logits_dtypes.add(live.DTYPE_NAMES[logits.dtype])
        return logits


def build(
    synthetic: dict[str, Any], dtype: str, kernels: Kernels, *, tensor_parallel_size: int = 1, fsdp_world_size: int = 0
) -> Decoder:
    """The model of a synthetic checkpoint, cast to `dtype` and spread as asked (fsdp_world_size 0: not at all).

    The process computes on THREADS threads from now on: products this small gain nothing from more than one, and their
    results no longer depend on how many cores there are.
    """
    torch.set_num_threads(geometry.THREADS)
    shape = geometry.of(synthetic)
    tensors = {
        name: torch.from_numpy(array).to(live.DTYPES[dtype]) for name, array in weights.parameters(synthetic).items()
    }
    store: TensorParallelStore | FlatShardStore
    if fsdp_world_size:
        store = FlatShardStore(shape, tensors, fsdp_world_size)
    else:
        store = TensorParallelStore(shape, tensors, tensor_parallel_size)
    return Decoder(shape, store, kernels, live.DTYPES[dtype])


def _indices(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))


def cells_of(sequences: Sequences, piece: Piece) -> np.ndarray:
    """Where the rows of a piece stand in the flat batch: int64 [count]."""
    return int(sequences.cu_seqlens[piece.sequence]) + np.arange(piece.start, piece.start + piece.count)
