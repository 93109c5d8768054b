"""What both sides' engines have in common: a causal language model held, the operator bound, forwards watched.

Shapes: M rows, L columns, H hidden size, V vocabulary, N logprobs taken at once, T tokens of all sequences.
"""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from libxd.errors import Status, XdError
from libxd.runtimes import live
from libxd.runtimes.protocol import Observation, Request, Scores, submission_chunks
from libxd.scoring.observer import Observer, Row
from libxd.sequences import Sequences

#: positions that go through the head together. Those that need a logprob are gathered first: the logits of a whole
#: padded batch are mostly thrown away, and at 150 thousand columns a thousand rows of them fill 600 MB in float32
HEAD_ROWS = 1024

#: what a causal language model may do behind its head that these engines do not
_BEHIND_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class Engine(ABC):
    """A model on a device, and what is needed to score with it; the sides say how it is run."""

    def __init__(self, directory: str, engine: dict[str, Any]) -> None:
        self.device = torch.device(engine["device"])
        self.model = load(directory, live.DTYPES[engine["dtype"]], engine["attention"]).to(self.device)
        self.base = self.model.base_model
        self.head = self.model.get_output_embeddings()
        accepted = inspect.signature(self.base.forward).parameters
        # transformers 5 renamed the argument on the way
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self._operator: Any = None
        self._forget_run()

    def _forget_run(self) -> None:
        """Behaviour is that of one scoring: whatever was counted before goes."""
        self._chunk_sizes: list[int] = []
        self._computed_dtypes: set[str] = set()
        self._operator_calls = 0
        self._logits_dtypes: set[str] = set()
        self._caches_seen = 0
        self._request: Request | None = None
        self._num_sequences = 0

    # -- protocol

    def bind(self, operator: Any) -> None:
        """XdError 69 for an operator of hidden states when the head is more than a weight."""
        if operator.inputs == "hidden" and getattr(self.head, "bias", None) is not None:
            raise XdError("takes hidden states and the head's weight, and this head adds a bias", status=Status.REFUSED,
                          code="unsupported-model", where=f"operator {operator.backend}",
                          found=type(self.model).__name__)
        self._operator = operator

    def state(self) -> dict[str, Any]:
        return live.state(self.model)

    def parameters(self) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
        for name, tensor in self.model.named_parameters():  # a tied weight comes once, as in the checkpoint
            yield name, live.DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), live.raw_bytes(tensor)

    def buffers(self) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
        return live.buffers(self.model)

    def score(self, sequences: Sequences, request: Request) -> Scores:
        """Logprobs float32 [T] in nats of every token behind the prompt; quiet NaN elsewhere."""
        self._forget_run()
        self._request, self._num_sequences = request, sequences.num_sequences
        self._require_known_ids(sequences)
        logprobs = np.full(sequences.num_tokens, np.nan, np.float32)
        observer = Observer(sequences.cu_seqlens)
        with torch.inference_mode():
            for chunk in submission_chunks(sequences.num_sequences, request.submission, request.batch_size):
                self._score_chunk(sequences, chunk, request, observer, logprobs)
        cache = "kv_cache" if self._caches_seen else "none"
        return Scores(logprobs, None, observer.observed(cache), "+".join(sorted(self._logits_dtypes)))

    def describe(self) -> dict[str, Any]:
        return {
            "class": type(self.model).__name__,
            "device": str(self.device) if self.device.type == "cpu" else torch.cuda.get_device_name(self.device),
            "attention": self.model.config._attn_implementation,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "mkldnn": torch.backends.mkldnn.is_available(),
            "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        }

    def close(self) -> None:
        self._operator = None
        del self.model, self.base, self.head
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- what a side fills in

    @abstractmethod
    def _score_chunk(
        self, sequences: Sequences, chunk: list[int], request: Request, observer: Observer, logprobs: np.ndarray
    ) -> None:
        """Score the sequences of one chunk into `logprobs`."""

    # -- shared steps

    def _require_known_ids(self, sequences: Sequences) -> None:
        vocab, largest = self.model.config.vocab_size, int(sequences.token_ids.max(initial=0))
        if largest >= vocab:
            raise XdError("a token id is beyond the model's vocabulary", code="bad-sequences", where="hf",
                          found=largest, expected=f"below {vocab}")

    def _forward(
        self, module: Any, ids: Tensor, positions: Tensor, mask: Tensor, rows: Sequence[Row], observer: Observer,
        cache: Any = None,
    ) -> Tensor:  # fmt: skip
        """Hidden states [M, L, H] of ids [M, L] at positions [M, L] under mask [M, S]; `module` is watched meanwhile.

        A cache is filled when one is given; without, none may come back.
        """
        given = {self._cache_argument: cache} if cache is not None else {}
        with observer.on(module, rows):
            out = module(
                input_ids=ids.to(self.device),
                position_ids=positions.to(self.device),
                attention_mask=mask.to(self.device),
                use_cache=cache is not None,
                **given,
            )
        if getattr(out, self._cache_argument, None) is not None:
            self._caches_seen += 1
        self._computed_dtypes.add(live.DTYPE_NAMES[out.last_hidden_state.dtype])
        if torch.is_autocast_enabled(self.device.type):  # its matrix products are in another dtype than their inputs
            self._computed_dtypes.add(live.DTYPE_NAMES[torch.get_autocast_dtype(self.device.type)])
        return out.last_hidden_state

    def _one_pass(
        self, sequences: Sequences, chunk: list[int], request: Request, observer: Observer, logprobs: np.ndarray
    ) -> None:
        """A chunk of whole sequences in one forward, padded on the right, without a cache."""
        spans = [sequences.span(s) for s in chunk]
        lengths = [span.stop - span.start for span in spans]
        shape = (len(chunk), max(lengths))
        ids, positions, mask = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
        for row, (span, length) in enumerate(zip(spans, lengths, strict=True)):
            ids[row, :length] = tensor(sequences.token_ids[span])
            positions[row, :length] = tensor(sequences.positions[span])
            mask[row, :length] = tensor(sequences.attention_mask[span])
        rows = [Row(row, s, 0, length) for row, (s, length) in enumerate(zip(chunk, lengths, strict=True))]
        hidden = self._forward(self.base, ids, positions, mask, rows, observer)
        self._chunk_sizes.append(hidden.shape[0])
        # token t is predicted by the hidden state of token t - 1; the prompt's own tokens were never sampled
        places = [
            (row, t - 1, span.start + t)
            for row, (s, span, length) in enumerate(zip(chunk, spans, lengths, strict=True))
            for t in range(int(sequences.prompt_lens[s]), length)
        ]
        for first in range(0, len(places), HEAD_ROWS):
            rows_, columns, cells = (list(part) for part in zip(*places[first : first + HEAD_ROWS], strict=True))
            self._take(hidden[rows_, columns], np.array(cells), sequences, request, observer, logprobs)

    def _take(
        self, hidden: Tensor, cells: np.ndarray, sequences: Sequences, request: Request, observer: Observer,
        logprobs: np.ndarray,
    ) -> None:  # fmt: skip
        """Logprobs of the tokens at `cells` [N] from the hidden states [N, H] before them, by the bound operator."""
        ids = tensor(sequences.token_ids[cells]).to(self.device)
        scaled_by = live.temperature(request.semantics)
        before = self._operator.calls
        if self._operator.inputs == "hidden":
            values = self._operator(hidden, self.head.weight, ids, temperature=scaled_by)
            self._logits_dtypes.add("float32")
        else:
            logits = self.head(hidden)  # [N, V]
            self._logits_dtypes.add(live.DTYPE_NAMES[logits.dtype])
            self._computed_dtypes.add(live.DTYPE_NAMES[logits.dtype])
            values = self._operator(logits, ids, temperature=scaled_by)
        self._operator_calls += self._operator.calls - before
        observer.selected(cells, ids.cpu().numpy())
        logprobs[cells] = values.cpu().numpy()

    # -- read-back shared by the sides

    def _batch_size(self) -> Observation:
        """The rows of the batches that ran; sequences too few to fill a chunk fit the size that was asked."""
        assert self._request is not None
        asked = submission_chunks(self._num_sequences, self._request.submission, self._request.batch_size)
        fits = self._chunk_sizes == [len(chunk) for chunk in asked]
        largest = max(self._chunk_sizes, default=0)
        return Observation(self._request.batch_size if fits else largest, {"chunks": self._chunk_sizes})

    def _logp_backend(self) -> Observation:
        ran = self._operator.backend if self._operator_calls else "none"
        return Observation(ran, {"calls": self._operator_calls, "implementation": self._operator.implementation})

    def _parameter_dtype(self) -> Observation:
        held = sorted({live.DTYPE_NAMES[parameter.dtype] for parameter in self.model.parameters()})
        return Observation(held[0] if len(held) == 1 else None, {"parameters": held})

    def _compute_dtype(self) -> Observation:
        """What hidden states and logits came out in, and the products between them."""
        seen = sorted(self._computed_dtypes)
        return Observation(seen[0] if len(seen) == 1 else None, {"computed": seen, **self._parameter_dtype().evidence})

    def _world(self) -> tuple[int, dict[str, Any]]:
        """Over how many ranks the model's matrices are split, and what shows it."""
        from torch.distributed.tensor import DTensor

        meshes = {p.device_mesh.size() for p in self.model.parameters() if isinstance(p, DTensor)}
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        ranks = torch.distributed.get_world_size() if distributed else 1
        return max(meshes, default=1), {"distributed_tensors": sorted(meshes), "process_group": ranks}


def load(directory: str, dtype: torch.dtype, attention: str) -> Any:
    """The causal language model of a checkpoint directory, in eval mode.

    XdError 65 when transformers refuses it or would make up a weight; 69 for a model that does more than this runtime.
    """
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation=attention, local_files_only=True, use_safetensors=True,
            output_loading_info=True,
        )  # fmt: skip
    except (OSError, ValueError, KeyError) as error:
        raise XdError(f"transformers cannot load this checkpoint: {error}", code="bad-checkpoint",
                      where=os.path.basename(directory)) from error
    made_up = sorted({*map(str, loaded["missing_keys"]), *map(str, loaded["mismatched_keys"])})
    if made_up:  # transformers would draw them at random
        raise XdError("the checkpoint lacks weights of the model", code="bad-checkpoint",
                      where=os.path.basename(directory), found=made_up)
    unusual = [name for name in _BEHIND_THE_HEAD if getattr(model.config, name, None) not in (None, 1, 1.0)]
    if unusual:
        raise XdError("this runtime does not do what the model does behind its head", status=Status.REFUSED,
                      code="unsupported-model", where=type(model).__name__, found=unusual)
    return model.eval()


def tensor(array: np.ndarray) -> Tensor:
    """An int64 tensor of ids, positions or masks."""
    return torch.from_numpy(array.astype(np.int64))
