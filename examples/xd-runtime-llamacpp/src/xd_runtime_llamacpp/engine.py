"""The live engine: llama.cpp's server in this process decodes the frozen tokens one request after another.

A request feeds the tokens so far, of which the slot holds all but the last, and samples the next frozen one; its answer
has the logprobs of the whole vocabulary at that place, and they are what the operator is given. What was fed is read
from the slot when a sequence has ended, and how much went into each forward from the server's own counts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import xllamacpp

from libxd import checkpoint
from libxd.errors import Status, XdError
from libxd.runtimes import live, sizes
from libxd.runtimes.protocol import Observation, Piece, Request, Scores, submission_batches
from libxd.scoring import observer as observing
from libxd.scoring.observer import Observer
from libxd.sequences import Sequences
from xd_runtime_llamacpp import conversion, mapped
from xd_runtime_llamacpp.server import Answer, Server
from xd_runtime_llamacpp.slot import Slot


class RolloutEngine:
    """`engine` are the arguments that materialising wrote down. The GGUF file lives as long as the engine does."""

    def __init__(self, locations: dict[str, Any], engine: dict[str, Any]) -> None:
        directory = locations["checkpoint"]
        self._caching: bool = engine["enable_prefix_caching"]
        self._config = conversion.config_of(directory)
        self._checkpoint_tensors = checkpoint.tensor_names(directory)
        longest = max(sizes.lengths(locations.get("sequences")), default=1)
        limit = self._config["max_position_embeddings"]
        if longest > limit:
            raise XdError("a sequence is longer than the model's context", code="bad-sequences", where=str(directory),
                          found=longest, expected=f"at most {limit}")  # fmt: skip
        self._place = tempfile.TemporaryDirectory(prefix="xd-llamacpp-")
        try:
            self._path = Path(self._place.name, "model.gguf")
            self._write(directory)
            self._tensors = mapped.tensors(self._path)
            # one more than the longest: the token that is sampled behind the last
            self._server = Server(self._path, longest + 1, self._config["vocab_size"], engine["llamacpp_threads"])
        except BaseException:
            self._place.cleanup()
            raise
        self._operator: Any = None
        self._forget_run()

    def _write(self, directory: str) -> None:
        """Make the GGUF file that the server loads."""
        conversion.write(directory, self._path)

    def _forget_run(self) -> None:
        self._calls = 0
        self._request: Request | None = None
        self._sequences: Sequences | None = None
        self._observer: Observer | None = None
        self._cache_dtypes: set[str] = set()
        self._cells: list[tuple[int, int]] = []
        self._hits = self._could_hit = 0

    # -- protocol

    def bind(self, operator: Any) -> None:
        self._operator = operator

    def settings(self) -> dict[str, Observation]:
        whole = [name for name, _, _, raw in self._mapped() if raw is not None]
        found = {"tensors": len(self._tensors), "mapped": len(whole)}
        return {
            "rollout.dtype": self._parameter_dtype(),
            "rollout.tensor_parallel_size": Observation(1 if len(whole) == len(self._tensors) else None, found),
        }

    def state(self) -> dict[str, Any]:
        """llama.cpp's server has no training mode; an optimizer would be a torch one, and none knows these weights."""
        return {"mode": "eval", "optimizer": False}

    def parameters(self) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
        """From the pages that llama.cpp computes from, under the checkpoint's names and in its order of rows.

        XdError 69 for a tensor that is not mapped: then llama.cpp holds a copy that cannot be seen.
        """
        for name, dtype, shape, raw in self._mapped():
            if raw is None:
                raise XdError("llama.cpp holds this weight elsewhere than in its mapped file, and it cannot be seen",
                              status=Status.REFUSED, code="unobservable", where=name)  # fmt: skip
            heads = conversion.rotated_heads(name, self._config)
            if heads:
                words = np.frombuffer(raw, np.dtype(f"<u{len(raw) // int(np.prod(shape))}")).reshape(shape)
                raw = conversion.to_halves(words, heads).tobytes()
            yield name, dtype, shape, raw

    def buffers(self) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
        """None that could be seen: rotary angles are computed in each forward."""
        yield from ()

    def not_parameters(self) -> list[str]:
        return sorted(self._checkpoint_tensors - {name for name, _, _, _ in self._mapped()})

    def score(self, sequences: Sequences, request: Request) -> Scores:
        """Logprobs float32 [T] in nats of every token behind a prompt; a quiet NaN elsewhere.

        XdError 65 for an id beyond the vocabulary; 69 for sequences that the server cannot be given as they are, and
        for one whose logprobs it does not give token by token.
        """
        self._forget_run()
        self._request, self._sequences = request, sequences
        self._require_plain(sequences)
        observer = self._observer = Observer(sequences.cu_seqlens)
        logprobs = np.full(sequences.num_tokens, np.nan, np.float32)
        before, previous = self._operator.calls, None
        with torch.inference_mode():
            for batch in submission_batches(sequences.num_sequences, request.submission, request.batch_size):
                for s in batch:
                    self._score_sequence(s, previous, observer, logprobs)
                    previous = s
        self._calls = self._operator.calls - before
        observed = observer.observed(kept=bool(self._cells))
        # the server gives logprobs, not the head's logits: their bits and their dtype were not seen
        observed.head_outputs = None
        return Scores(logprobs, observed, None)

    def behaviour(self) -> dict[str, Observation]:
        assert self._request is not None and self._sequences is not None and self._observer is not None
        held = self._parameter_dtype()
        dtypes = sorted({*held.evidence["parameters"], *self._cache_dtypes})
        whole = all(cells == length for cells, length in self._cells)
        ran = self._calls > 0 or not self._sequences.answered()
        return {
            "batch.size": observing.batch_size(self._request, self._sequences, self._observer.forwards),
            "rollout.dtype": Observation(dtypes[0] if len(dtypes) == 1 else None,
                                         {**held.evidence, "cache": sorted(self._cache_dtypes)}),
            "rollout.context_parallel_size": Observation(1 if self._cells and whole else None,
                                                         {"whole_caches": len(self._cells)}),
            "rollout.enable_prefix_caching": self._prefix_caching(),
            # whether its graph ran operation by operation, the server shows in no way
            "rollout.enforce_eager": Observation(None),
            "logp.backend": Observation(self._operator.backend if ran else "none",
                                        {"calls": self._calls, "implementation": self._operator.implementation}),
        }  # fmt: skip

    def describe(self) -> dict[str, Any]:
        properties = self._server.properties()
        return {
            "class": "llama.cpp server",
            "device": "cpu",
            "file_type": properties.get("model_ftype"),
            "slots": properties.get("total_slots"),
            "context": properties.get("default_generation_settings", {}).get("n_ctx"),
            "system": xllamacpp.get_system_info(),
            "xllamacpp": xllamacpp.__version__,
            "gguf": getattr(gguf, "__version__", None),
            "torch": torch.__version__,
        }

    def close(self) -> None:
        self._operator = None
        self._forget_run()
        self._server.close()
        self._place.cleanup()

    # -- one sequence

    def _score_sequence(self, s: int, previous: int | None, observer: Observer, logprobs: np.ndarray) -> None:
        assert self._sequences is not None
        span = self._sequences.span(s)
        ids = self._sequences.token_ids[span].tolist()
        prompt = int(self._sequences.prompt_lens[s])
        pieces: list[Piece] = []
        for end in range(prompt, len(ids) + 1):
            first = end == prompt
            reuse = (self._caching and previous is not None) if first else True
            # behind the last token nothing is wanted: it is fed, as all frozen ones are, and any may be sampled
            wanted = end < len(ids)
            answer = self._server.ask(ids[:end], ids[end % len(ids)], logprobs=wanted, reuse=reuse)
            if answer.cached + answer.fed != end:
                raise XdError("llama.cpp's server counts other tokens than it was given", status=Status.BUG,
                              code="engine-output", where=f"sequence {s}", found=answer.cached + answer.fed,
                              expected=end)  # fmt: skip
            if first and previous is not None:
                self._hits += answer.cached
                self._could_hit += _common(ids[: prompt - 1], self._fed(previous))
            pieces.append(Piece(s, answer.cached, answer.fed))
            if wanted:
                value = self._logprob(answer, ids[end], f"sequence {s}", end)
                logprobs[span.start + end] = value
                observer.selected(np.array([span.start + end]), np.array(answer.ids))
        self._observe(s, self._server.slot(), pieces, observer)

    def _logprob(self, answer: Answer, token: int, where: str, place: int) -> float:
        """The operator's, of the one id that was asked for and answered. XdError 69 for any other answer."""
        if answer.ids != [token] or answer.logprobs is None:
            what = ("no logprob of a token: it is a part of a character, which this server does not answer by itself"
                    if len(answer.ids) < 1 else "logprobs of other tokens than the frozen one")  # fmt: skip
            raise XdError(f"llama.cpp's server gives {what}", status=Status.REFUSED, code="unsupported-sequences",
                          where=where, path=f"/{place}", found=answer.ids, expected=[token],
                          hint="leave this sequence out, or score with another runtime")  # fmt: skip
        if not answer.logprobs[token] > np.finfo(np.float32).min:
            raise XdError("llama.cpp's server rounds this token's probability to zero", status=Status.REFUSED,
                          code="unsupported-sequences", where=where, path=f"/{place}", expected=token)  # fmt: skip
        assert self._request is not None
        logits = torch.from_numpy(answer.logprobs).unsqueeze(0)
        ids = torch.tensor(answer.ids, dtype=torch.int64)
        return float(self._operator(logits, ids, live.temperature(self._request.semantics))[0])

    def _observe(self, s: int, held: Slot, pieces: list[Piece], observer: Observer) -> None:
        """What the slot holds is what was fed; a token that is not in it reached no model."""
        cells = observer.cells(Piece(s, 0, self._length(s)))
        count = min(len(held.token_ids), len(held.positions), self._length(s))
        ids, positions = np.full(self._length(s), -1, np.int32), np.full(self._length(s), -1, np.int32)
        ids[:count], positions[:count] = held.token_ids[:count], held.positions[:count]
        attended = ids >= 0
        for piece in pieces:
            rows = slice(piece.start, piece.start + piece.count)
            observer.forward([piece], ids[rows], positions[rows], attended[rows])
        # what an earlier sequence had left in the slot was not fed again, and is in it all the same
        observer.token_ids[cells], observer.positions[cells], observer.attention_mask[cells] = ids, positions, attended
        self._cache_dtypes |= held.dtypes
        self._cells.append((len(held.positions), self._length(s)))

    def _length(self, s: int) -> int:
        assert self._sequences is not None
        span = self._sequences.span(s)
        return span.stop - span.start

    def _fed(self, s: int) -> list[int]:
        assert self._sequences is not None
        return self._sequences.token_ids[self._sequences.span(s)].tolist()

    def _require_plain(self, sequences: Sequences) -> None:
        largest, vocabulary = int(sequences.token_ids.max(initial=0)), self._config["vocab_size"]
        if largest >= vocabulary:
            raise XdError("a token id of the sequences is beyond the vocabulary of the model", code="bad-sequences",
                          path=f"/token_ids/{int(sequences.token_ids.argmax())}", found=largest,
                          expected=f"below {vocabulary}")  # fmt: skip
        unusual = sequences.unusual()
        if unusual is not None:
            raise XdError("llama.cpp's server counts positions from 0 and masks nothing, and these tokens are laid out "
                          "otherwise", status=Status.REFUSED, code="unsupported-sequences",
                          where=f"sequence {unusual}")  # fmt: skip

    # -- read-back

    def _mapped(self) -> Iterator[tuple[str, str, tuple[int, ...], bytes | None]]:
        for tensor, raw in mapped.held(self._path, self._tensors):
            yield conversion.hf_name(tensor.name) or tensor.name, tensor.dtype, tensor.shape, raw

    def _parameter_dtype(self) -> Observation:
        found = sorted({tensor.dtype for tensor in self._tensors})
        return Observation(found[0] if len(found) == 1 else None, {"parameters": found})

    def _prefix_caching(self) -> Observation:
        """By tokens that a sequence began with and that were not fed again; None where none could be shared."""
        evidence = {"not_fed": self._hits, "could_hit": self._could_hit}
        return Observation(self._hits > 0 if self._could_hit else None, evidence)


def _common(ids: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))
