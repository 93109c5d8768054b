"""Scores through a running server: a batch a request, and its answer believed only as far as it goes.

Shapes: B sequences, T tokens over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from libxd.errors import Status, XdError
from libxd.operators.session import EnginesOwn
from libxd.runtimes.protocol import Observation, ObservedInputs, Request, Scores, submission_batches
from libxd.runtimes.server import account, answers
from libxd.runtimes.server.client import WHERE, Client
from libxd.runtimes.server.runtime import SETTINGS
from libxd.sequences import Sequences


class RolloutEngine:
    """One server, held to be the one whose account is `materialized`."""

    def __init__(self, url: str, materialized: dict[str, Any]) -> None:
        self._materialized = materialized
        self._client = Client(url)
        self._operator: EnginesOwn | None = None
        self._sizes: list[int] = []
        self._request: Request | None = None
        self._sequences: Sequences | None = None
        self._model = self._same_server()

    def _same_server(self) -> str:
        """The model's name at the server. XdError 69 when the server is not the materialised one any more."""
        name, said = account.of(self._client)
        if said != self._materialized:
            raise XdError("the server is another than the one it was materialised for", status=Status.REFUSED,
                          code="environment-differs", where=WHERE, found=said, expected=self._materialized,
                          hint="materialise the row again")  # fmt: skip
        return name

    # -- protocol

    def bind(self, operator: EnginesOwn) -> None:
        self._operator = operator

    def settings(self) -> dict[str, Observation]:
        """By the server's own account of now; None where it does not show one."""
        self._model = self._same_server()
        config = self._materialized["config"]
        shown = {path: config.get(path.rpartition(".")[2]) for path in SETTINGS}
        return {
            **{path: Observation(value, {"shown_by": "the server"} if value is not None else {})
               for path, value in shown.items()},
            "logp.backend": Observation(None),
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        return {"mode": None, "optimizer": None}

    def parameters(self) -> None:
        """No endpoint shows weights."""
        return None

    def buffers(self) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
        yield from ()

    def not_parameters(self) -> list[str]:
        return []

    def score(self, sequences: Sequences, request: Request) -> Scores:
        """Logprobs float32 [T] in nats of every token behind a prompt; a quiet NaN elsewhere.

        XdError 65 for sequences that are longer than the server takes, 69 for such as no server can be given and for a
        request that it refuses, 70 for an answer that is none, 75 when the server dies.
        """
        assert self._operator is not None
        self._sequences, self._request, self._sizes = sequences, request, []
        self._require_fitting(sequences)
        logprobs = np.full(sequences.num_tokens, np.nan, np.float32)
        fed = np.full(sequences.num_tokens, -1, np.int32)
        scored = np.zeros(sequences.num_tokens, np.bool_)
        for batch in submission_batches(sequences.num_sequences, request.submission, request.batch_size):
            spans = [sequences.span(s) for s in batch]
            prompts = [sequences.token_ids[span].tolist() for span in spans]
            value = self._client.post("/v1/completions", answers.request(self._model, prompts))
            names = [f"sequence {s}" for s in batch]
            for s, span, answer in zip(batch, spans, answers.read(value, self._model, prompts, names), strict=True):
                first = span.start + int(sequences.prompt_lens[s])
                fed[span] = answer.token_ids
                place = first - span.start
                values = answers.require_logprobs(answer.logprobs[place:], place, f"sequence {s}")
                logprobs[first : span.stop] = values
                scored[first : span.stop] = True
                if len(values):
                    self._operator.gave(fed[first : span.stop], values)
            self._sizes.append(len(batch))
        self._same_server()
        observed = ObservedInputs(fed, fed, None, None, scored, cache=None, forwards=None)
        return Scores(logprobs, observed, None)

    def behaviour(self) -> dict[str, Observation]:
        """The prompts of each request: what was in flight together. What ran together, the server does not show."""
        assert self._request is not None and self._sequences is not None
        most, fitting = max(self._sizes, default=0), min(self._request.batch_size, self._sequences.num_sequences)
        size = self._request.batch_size if most == fitting else most
        return {"batch.size": Observation(size, {"prompts_of_requests": self._sizes})}

    def describe(self) -> dict[str, Any]:
        return {"class": "OpenAI-compatible server", **self._materialized}

    def close(self) -> None:
        self._client.close()

    # -- what can be given

    def _require_fitting(self, sequences: Sequences) -> None:
        unusual = sequences.unusual()
        if unusual is not None:
            raise XdError("a server counts positions from 0 and masks nothing, and these tokens are laid out otherwise",
                          status=Status.REFUSED, code="unsupported-sequences", where=f"sequence {unusual}")  # fmt: skip
        lengths, limit = np.diff(sequences.cu_seqlens), self._materialized["max_model_len"]
        # a token more than is frozen: no server answers without sampling one
        if limit is not None and len(lengths) and int(lengths.max()) >= limit:
            raise XdError("is longer than the server takes: its max_model_len has to hold it and a token more",
                          code="bad-sequences", where=f"sequence {int(lengths.argmax())}", found=int(lengths.max()),
                          expected=f"at most {limit - 1} tokens")  # fmt: skip
