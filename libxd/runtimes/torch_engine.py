"""What scorers built on torch share: the operator bound, one way to run a request, and read-back of the live objects.

Shapes: B sequences, T tokens over all of them.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from libxd.errors import XdError
from libxd.runtimes import live
from libxd.runtimes.protocol import Observation, Request, Scores, submission_batches
from libxd.scoring import observer as observing
from libxd.scoring.observer import Observer
from libxd.sequences import Sequences


class TorchEngine(ABC):
    """A module held, and what is needed to score with it. Nothing that it shows repeats an argument."""

    model: torch.nn.Module

    def __init__(self) -> None:
        self._operator: Any = None
        self._forget_run()

    def _forget_run(self) -> None:
        """Behaviour is that of one scoring: whatever was counted before goes."""
        self._logits_dtypes: set[str] = set()
        self._operator_calls = 0
        self._request: Request | None = None
        self._sequences: Sequences | None = None
        self._observer: Observer | None = None

    # -- protocol

    def bind(self, operator: Any) -> None:
        self._operator = operator

    def state(self) -> dict[str, Any]:
        return live.state(self.model)

    def buffers(self) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
        return live.buffers(self.model)

    def score(self, sequences: Sequences, request: Request) -> Scores:
        """Logprobs float32 [T] in nats of every token behind a prompt; a quiet NaN elsewhere.

        XdError 65 for ids that the model does not know, and for positions that it was not made for.
        """
        self._forget_run()
        self._request, self._sequences = request, sequences
        self._require_known_ids(sequences)
        self._require_known_positions(sequences)
        observer = self._observer = Observer(sequences.cu_seqlens)
        logprobs = np.full(sequences.num_tokens, np.nan, np.float32)
        before = self._operator.calls
        with torch.inference_mode(), self._watched(observer):
            for batch in self._batches(sequences.num_sequences, request):
                self._score_batch(sequences, batch, request, observer, logprobs)
        self._operator_calls = self._operator.calls - before
        dtypes = "+".join(sorted(self._logits_dtypes))
        return Scores(logprobs, observer.observed(self._kept_cache()), dtypes or None)

    # -- what a runtime fills in

    @abstractmethod
    def _score_batch(
        self, sequences: Sequences, batch: list[int], request: Request, observer: Observer, logprobs: np.ndarray
    ) -> None:
        """Score the sequences of one batch into `logprobs` [T]."""

    @abstractmethod
    def _vocabulary(self) -> int:
        """How many ids the model knows."""

    def _context_length(self) -> int | None:
        """How many positions the model was made for; None where it does not say."""
        return None

    def _architecture(self) -> str:
        """The model's class."""
        return type(self.model).__name__

    def _watched(self, observer: Observer) -> AbstractContextManager[None]:
        """Hooks that tell the observer what runs, for as long as a request takes."""
        return contextlib.nullcontext()

    def _kept_cache(self) -> bool:
        """Whether keys and values were seen to outlive a forward; the observer sees where they were gone on with."""
        return False

    # -- shared

    def _batches(self, num_sequences: int, request: Request) -> list[list[int]]:
        return submission_batches(num_sequences, request.submission, request.batch_size)

    def _require_known_ids(self, sequences: Sequences) -> None:
        largest, vocabulary = int(sequences.token_ids.max(initial=0)), self._vocabulary()
        if largest >= vocabulary:
            raise XdError(f"a token id of the sequences is beyond the vocabulary of {self._architecture()}",
                          code="bad-sequences", path=f"/token_ids/{int(sequences.token_ids.argmax())}", found=largest,
                          expected=f"below {vocabulary}")  # fmt: skip

    def _require_known_positions(self, sequences: Sequences) -> None:
        length, context = int(sequences.positions.max(initial=-1)) + 1, self._context_length()
        if context is not None and length > context:
            raise XdError(f"a sequence is longer than the context of {self._architecture()}", code="bad-sequences",
                          path=f"/positions/{int(sequences.positions.argmax())}", found=length,
                          expected=f"at most {context} tokens")  # fmt: skip

    def _batch_size(self) -> Observation:
        """By what went through the model together."""
        assert self._request is not None and self._sequences is not None and self._observer is not None
        return observing.batch_size(self._request, self._sequences, self._observer.forwards)

    def _logp_backend(self) -> Observation:
        """The operator that was called; the one that is bound where no token was to be scored."""
        assert self._sequences is not None
        ran = self._operator_calls > 0 or not self._sequences.answered()
        evidence = {"calls": self._operator_calls, "implementation": self._operator.implementation}
        return Observation(self._operator.backend if ran else "none", evidence)

    def _parameter_dtype(self) -> Observation:
        held = sorted({live.DTYPE_NAMES[parameter.dtype] for parameter in self.model.parameters()})
        return Observation(held[0] if len(held) == 1 else None, {"parameters": held})
