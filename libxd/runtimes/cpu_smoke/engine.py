"""What both sides' engines have in common: weights held, the operator bound, how a forward becomes logprobs.

Read-back looks at the live model: shards held and partial sums added, dtypes of the parameters, kernels called, the
operator's own counter. Nothing here repeats an argument.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from libxd.errors import XdError
from libxd.runtimes import live
from libxd.runtimes.cpu_smoke import attention, geometry, weights
from libxd.runtimes.cpu_smoke.kernels import Kernels
from libxd.runtimes.cpu_smoke.model import Attention, Decoder, Piece
from libxd.runtimes.cpu_smoke.recorder import Recorder
from libxd.runtimes.cpu_smoke.shards import FlatShardStore, TensorParallelStore
from libxd.runtimes.protocol import Observation, Request, Scores, submission_chunks
from libxd.sequences import Sequences


class Engine(ABC):
    """A decoder and what is needed to score with it; `RolloutEngine` and `TrainingEngine` say how it is run."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._operator: Any = None
        self._forget_run()

    def _forget_run(self) -> None:
        """Behaviour is that of one scoring: whatever was counted before goes."""
        self._chunk_sizes: list[int] = []
        self._operator_calls = 0
        self._logits_dtypes: set[str] = set()
        self._request: Request | None = None
        self._num_sequences = 0
        self.model.summed.clear()
        self.model.kernels.calls = 0

    # -- protocol

    def bind(self, operator: Any) -> None:
        self._operator = operator

    def state(self) -> dict[str, Any]:
        return live.state(self.model)

    def parameters(self) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
        for name, tensor in self.model.store.full():
            yield name, live.DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), live.raw_bytes(tensor)

    def buffers(self) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
        return live.buffers(self.model)

    def score(self, sequences: Sequences, request: Request) -> Scores:
        """logprobs float32 [T] in nats of every token this side can see a prediction for; quiet NaN elsewhere."""
        self._forget_run()
        self._request = request
        self._num_sequences = sequences.num_sequences
        self._require_known_ids(sequences)
        recorder = Recorder(sequences.cu_seqlens)
        logprobs = np.full(len(sequences.token_ids), np.nan, np.float32)
        hook = self.model.register_forward_pre_hook(recorder.hook)
        try:
            with torch.inference_mode():
                for chunk in self._chunks(self._num_sequences, request):
                    self._chunk_sizes.append(len(chunk))
                    self._score_chunk(sequences, chunk, request, recorder, logprobs)
        finally:
            hook.remove()
        return Scores(logprobs, None, recorder.observed(self._cache_in_use()), "+".join(sorted(self._logits_dtypes)))

    def describe(self) -> dict[str, Any]:
        return {
            "class": type(self).__name__,
            "model": type(self.model).__name__,
            "store": type(self.model.store).__name__,
            "kernels": type(self.model.kernels).__name__,
            "device": "cpu",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }

    def close(self) -> None:
        self._operator = None
        del self.model

    # -- what a side fills in

    @abstractmethod
    def _score_chunk(
        self, sequences: Sequences, chunk: list[int], request: Request, recorder: Recorder, logprobs: np.ndarray
    ) -> None:
        """Score the sequences of one chunk into `logprobs`."""

    @abstractmethod
    def _cache_in_use(self) -> Literal["kv_cache", "none"]:
        """Whether keys and values outlived a forward."""

    # -- shared steps

    def _chunks(self, num_sequences: int, request: Request) -> list[list[int]]:
        return submission_chunks(num_sequences, request.submission, request.batch_size)

    def _require_known_ids(self, sequences: Sequences) -> None:
        largest = int(sequences.token_ids.max(initial=0))
        if largest >= self.model.geometry.vocab:
            raise XdError(
                "a token id is beyond the model's vocabulary",
                code="bad-sequences",
                where="cpu-smoke",
                found=largest,
                expected=f"below {self.model.geometry.vocab}",
            )

    def _forward(self, sequences: Sequences, attention: Attention) -> Tensor:
        """Hidden states [M, E] of the rows that the attention's pieces name."""
        ids, positions = self._feed(sequences, attention.pieces)
        return self.model(_indices(ids), _indices(positions), attention)

    def _feed(self, sequences: Sequences, pieces: list[Piece]) -> tuple[np.ndarray, np.ndarray]:
        """The frozen ids and positions of these rows: [M] each."""
        cells = np.concatenate([cells_of(sequences, piece) for piece in pieces])
        return sequences.token_ids[cells], sequences.positions[cells]

    def _take(
        self, sequences: Sequences, pieces: list[Piece], hidden: Tensor, request: Request, recorder: Recorder,
        logprobs: np.ndarray, first_index: dict[int, int],
    ) -> None:  # fmt: skip
        """Score, from these rows, every token that follows one of them, from `first_index` of its sequence on."""
        rows, cells, row = [], [], 0
        for piece in pieces:
            begin, end = int(sequences.cu_seqlens[piece.sequence]), int(sequences.cu_seqlens[piece.sequence + 1])
            for index in range(piece.start, piece.start + piece.count):
                following = index + 1
                if first_index[piece.sequence] <= following < end - begin:
                    rows.append(row)
                    cells.append(begin + following)
                row += 1
        if rows:
            ids = self._selected_ids(sequences, cells)
            recorder.selected(cells, ids)
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
            values, _ = self._call(normed, shards[0], ids, temperature)
            return values.float()
        selected, parts, first = torch.zeros(len(ids)), [], 0
        for shard in shards:
            local = ids - first
            held = (local >= 0) & (local < shard.shape[0])
            probe = torch.where(held, local, torch.zeros_like(local))
            values, probed = self._call(normed, shard, probe, temperature)
            parts.append(probed - values.float())
            selected = selected + torch.where(held, probed, torch.zeros_like(probed))
            first += shard.shape[0]
        return selected - attention.merge_log_sum_exp(parts)

    def _call(self, normed: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """The operator's logprobs [N] over one vocabulary shard, and the scaled logits float32 [N] of the ids."""
        before = self._operator.calls
        logits = self.model.kernels.linear(normed, weight)  # [N, V / ranks]
        self._logits_dtypes.add(live.DTYPE_NAMES[logits.dtype])
        if self._operator.inputs == "hidden":
            values = self._operator(normed, weight, ids, temperature=temperature)
        else:
            values = self._operator(logits, ids, temperature=temperature)
        self._operator_calls += self._operator.calls - before
        return values, logits.gather(1, ids.unsqueeze(1)).squeeze(1).float() / temperature

    # -- read-back shared by the sides

    def _batch_size(self) -> Observation:
        """The chunks as run; where there are fewer samples than a chunk holds, they fit the size that was asked."""
        assert self._request is not None
        asked = submission_chunks(self._num_sequences, self._request.submission, self._request.batch_size)
        largest = max(self._chunk_sizes, default=0)
        fits = self._chunk_sizes == [len(chunk) for chunk in asked]
        return Observation(self._request.batch_size if fits else largest, {"chunks": self._chunk_sizes})

    def _logp_backend(self) -> Observation:
        ran = self._operator.backend if self._operator_calls else "none"
        return Observation(ran, {"calls": self._operator_calls})

    def _parameter_dtype(self) -> Observation:
        held = sorted({live.DTYPE_NAMES[parameter.dtype] for parameter in self.model.store.parameters()})
        return Observation(held[0] if len(held) == 1 else None, {"parameters": held})


def build(
    synthetic: dict[str, Any], dtype: str, kernels: Kernels, *, tensor_parallel_size: int = 1, fsdp_world_size: int = 0
) -> Decoder:
    """The model of a synthetic checkpoint, cast to `dtype` and spread as asked (fsdp_world_size 0: not at all).

    The process computes on one thread from now on: products this small gain nothing from more, and their results no
    longer depend on how many cores there are.
    """
    torch.set_num_threads(1)
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
