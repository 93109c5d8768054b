"""The sampler of a replay: it takes the frozen token, and the bound operator's logprob of it, at every step.

Shapes: N rows of logits, V vocabulary, H hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from libxd.runtimes import live
from libxd.runtimes.protocol import Request
from libxd.runtimes.vllm.forwards import Fed, Forwards
from libxd.scoring.observer import Observer
from libxd.sequences import Sequences


@dataclass(frozen=True)
class _Head:
    """One product of the head: hidden [N, H], and the cell that each row predicts, int64 [N]; -1: none of interest."""

    hidden: Tensor
    cells: np.ndarray

    @property
    def wanted(self) -> np.ndarray:
        """Bool [N]."""
        return self.cells >= 0

    def rows(self, tensor: Tensor) -> Tensor:
        """The wanted ones of N rows; the tensor itself when all are."""
        return tensor if self.wanted.all() else tensor[torch.from_numpy(self.wanted).to(tensor.device)]


class Replay:
    """One scoring: which cells the head's rows predict, and what the operator says of them.

    Decoding, a row predicts the token behind the last one that was fed; what is sampled behind a whole sequence, or
    within a prompt, is of no interest. In prefill, vLLM gives the head all rows of a request again for its prompt
    logprobs, and only there is a logprob taken.
    """

    def __init__(
        self, sequences: Sequences, request: Request, operator: Any, observer: Observer, forwards: Forwards,
        head_weight: Tensor | None,
    ) -> None:  # fmt: skip
        self.logits_dtypes: set[str] = set()
        self.hidden_dtypes: set[str] = set()
        self._sequences = sequences
        self._decoding = request.mode == "decode"
        self._temperature = live.temperature(request.semantics)
        self._operator = operator
        self._observer = observer
        self._forwards = forwards
        self._weight = head_weight
        self._head: _Head | None = None

    def multiplied(self, hidden: Tensor, logits: Tensor) -> None:
        """The head gave `logits` [N, V] for `hidden` [N, H]."""
        self._head = _Head(hidden, self._cells(hidden))
        self.hidden_dtypes.add(live.DTYPE_NAMES[hidden.dtype])
        self.logits_dtypes.add(live.DTYPE_NAMES[logits.dtype])
        if self._head.wanted.any():
            self._observer.logits(self._head.rows(logits))

    def sample(self, logits: Tensor) -> SamplerOutput:
        """The frozen ids as those sampled, [N, 1] int32, and the operator's float32 logprobs of them.

        0 and NaN where there is no token left to replay: vLLM samples once more behind the last one.
        """
        head = self._take_head()
        ids = np.zeros(len(logits), np.int64)
        ids[head.wanted] = self._sequences.token_ids[head.cells[head.wanted]]
        found = self._logprobs(head, logits, torch.from_numpy(ids).to(logits.device))
        return SamplerOutput(found.logprob_token_ids, found)

    def of_prompt(self, logits: Tensor, ids: Tensor) -> LogprobsTensors:
        """The logprobs of vLLM's own targets, int64 [N], in a prompt that is a whole sequence."""
        return self._logprobs(self._take_head(), logits, ids)

    def _logprobs(self, head: _Head, logits: Tensor, ids: Tensor) -> LogprobsTensors:
        values = torch.full((len(head.cells),), torch.nan, device=logits.device)
        if head.wanted.any():
            asked = head.rows(ids)
            operands = (head.rows(logits),) if self._weight is None else (head.rows(head.hidden), self._weight)
            given = self._operator(*operands, asked, temperature=self._temperature)
            values[torch.from_numpy(head.wanted).to(values.device)] = given
            self._observer.selected(head.cells[head.wanted], asked.cpu().numpy())
        ranks = torch.zeros(len(head.cells), dtype=torch.int64, device=logits.device)
        return LogprobsTensors(ids.to(torch.int32).unsqueeze(-1), values.unsqueeze(-1), ranks)

    def _take_head(self) -> _Head:
        """What the head was last given, taken once: each product is sampled from, or is of a prompt."""
        assert self._head is not None, "logits that no head gave"
        head, self._head = self._head, None
        return head

    def _cells(self, hidden: Tensor) -> np.ndarray:
        """The cell that each row of `hidden` predicts: of a view of the forward's output, or else of each row's end."""
        output, fed = self._forwards.output, self._forwards.fed
        assert output is not None
        if hidden.untyped_storage().data_ptr() != output.untyped_storage().data_ptr():
            return np.array([self._predicted(f, f.end) if self._decoding else -1 for f in fed], np.int64)
        first = (hidden.storage_offset() - output.storage_offset()) // output.stride(0)
        owner = next(f for f in fed if f.first <= first < f.first + f.count)
        begin = owner.start + first - owner.first + 1
        return np.array([self._predicted(owner, begin + row) for row in range(len(hidden))], np.int64)

    def _predicted(self, fed: Fed, token: int) -> int:
        """The cell of a sequence's token, when its logprob is wanted; else -1."""
        span = self._sequences.span(fed.sequence)
        inside = int(self._sequences.prompt_lens[fed.sequence]) <= token < span.stop - span.start
        return span.start + token if inside else -1


class ReplaySampler(Sampler):
    """vLLM's sampler; while something is replayed, its logprobs are the operator's and its tokens the frozen ones."""

    def __init__(self, original: Sampler) -> None:
        super().__init__(original.logprobs_mode)
        self.replay: Replay | None = None

    def forward(self, logits: Tensor, *arguments: Any, **given: Any) -> SamplerOutput:
        if self.replay is None:
            return super().forward(logits, *arguments, **given)
        return self.replay.sample(logits)

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """Replaying, the logits themselves: what becomes of them is up to the operator."""
        return Sampler.compute_logprobs(logits) if self.replay is None else logits

    def gather_logprobs(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        if self.replay is None:
            return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
        return self.replay.of_prompt(logprobs, token_ids)


@contextlib.contextmanager
def replaying(runner: Any, replay: Replay) -> Iterator[None]:
    """Have a model runner replay meanwhile; afterwards it is as it was."""
    original, model = runner.sampler, runner.model
    compute_logits = model.compute_logits

    def watched(hidden: Tensor) -> Tensor:
        logits = compute_logits(hidden)
        replay.multiplied(hidden, logits)
        return logits

    runner.sampler = ReplaySampler(original)
    runner.sampler.replay = replay
    model.compute_logits = watched
    try:
        yield
    finally:
        runner.sampler = original
        del model.compute_logits

