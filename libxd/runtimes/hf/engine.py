"""What both sides' engines have in common: a causal language model held, the operator bound, forwards watched.

Shapes: M rows, L columns, H hidden size, V vocabulary, N logprobs taken at once, T tokens of all sequences.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

from libxd import checkpoint
from libxd.errors import Status, XdError
from libxd.runtimes import live
from libxd.runtimes.hf.decoding import tensor
from libxd.runtimes.hf.loading import load, require_plain_head
from libxd.runtimes.hf.memory import HEAD_ROWS
from libxd.runtimes.protocol import Observation, Request
from libxd.runtimes.ranks.group import local_device
from libxd.runtimes.torch_engine import TorchEngine
from libxd.scoring.observer import Observer, Row
from libxd.sequences import Sequences

#: a parameter's name, which part of it, whether other ranks hold a copy of that, and the part
Part = tuple[str, tuple[int, ...], bool, Tensor]


class Engine(TorchEngine):
    """A model on a device, and what is needed to score with it; the sides say how it is run."""

    def __init__(self, directory: str, engine: dict[str, Any]) -> None:
        self.device = local_device(engine["device"])
        # where it is spread over ranks, each takes its part to its device, and no rank's holds the whole
        self.model = self._spread(load(directory, live.DTYPES[engine["dtype"]], engine["attention"]), engine)
        self.model.to(self.device)
        self.base = self.model.base_model
        self.head = self.model.get_output_embeddings()
        accepted = inspect.signature(self.base.forward).parameters
        # transformers 5 renamed the argument on the way
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self._checkpoint_tensors = checkpoint.tensor_names(directory)
        super().__init__()
        with self._attending():
            require_plain_head(self.model)

    def _spread(self, model: Any, engine: dict[str, Any]) -> Any:
        """The model as this rank holds it."""
        return model

    def _attending(self) -> AbstractContextManager[None]:
        """Meanwhile transformers finds the attention that this engine brings along, if any."""
        return contextlib.nullcontext()

    def _forget_run(self) -> None:
        super()._forget_run()
        self._computed_dtypes: set[str] = set()
        self._caches_seen = 0

    # -- protocol

    def bind(self, operator: Any) -> None:
        """XdError 69 for an operator of hidden states when the head is more than a weight."""
        if operator.inputs == "hidden" and getattr(self.head, "bias", None) is not None:
            raise XdError("takes hidden states and the head's weight, and this head adds a bias", status=Status.REFUSED,
                          code="unsupported-model", where=f"operator {operator.backend}",
                          found=type(self.model).__name__)
        super().bind(operator)

    def parameters(self) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
        for name, whole in self.whole():
            yield name, live.DTYPE_NAMES[whole.dtype], tuple(whole.shape), live.raw_bytes(whole)

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by name, put together from the ranks one at a time; all of them take part."""
        for name, held in self.model.named_parameters():  # a tied weight comes once, as in the checkpoint
            yield name, held.full_tensor() if isinstance(held, DTensor) else held.detach()

    def parts(self) -> Iterator[Part]:
        """What this rank holds of every parameter, and whether another rank of the world holds a copy of that."""
        ranks = self._ranks()
        for name, held in self.model.named_parameters():
            part: tuple[int, ...] = ()
            local = held.detach()
            copies = ranks
            if isinstance(held, DTensor):
                mesh, local = held.device_mesh, held.to_local().detach()
                sharded = [dim for dim, placement in enumerate(held.placements) if placement.is_shard()]
                part = tuple(mesh.get_local_rank(dim) for dim in sharded)
                copies //= math.prod(mesh.size(dim) for dim in sharded)
            yield name, part, copies > 1, local

    def not_parameters(self) -> list[str]:
        """Persistent buffers, and what old exports hold of tables that models compute today."""
        held = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return sorted(self._checkpoint_tensors - held)

    def describe(self) -> dict[str, Any]:
        return {
            "class": type(self.model).__name__,
            "device": str(self.device) if self.device.type == "cpu" else torch.cuda.get_device_name(self.device),
            "attention": self.model.config._attn_implementation,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    def close(self) -> None:
        self._operator = None
        del self.model, self.base, self.head
        if self.device.type == "cuda":
            gc.collect()  # what a traceback or a cycle still holds is not given back before
            torch.cuda.empty_cache()

    # -- shared steps

    def _watched(self, observer: Observer) -> AbstractContextManager[None]:
        return observer.on_head(self.head)

    def _kept_cache(self) -> bool:
        return self._caches_seen > 0

    def _vocabulary(self) -> int:
        return self.model.config.get_text_config().vocab_size

    def _context_length(self) -> int | None:
        said = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return said if type(said) is int else None

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
        self, sequences: Sequences, batch: list[int], request: Request, observer: Observer, logprobs: np.ndarray
    ) -> None:
        """A batch of whole sequences in one forward, padded on the right, without a cache."""
        spans = [sequences.span(s) for s in batch]
        lengths = [span.stop - span.start for span in spans]
        shape = (len(batch), max(lengths))
        ids, positions, mask = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
        for row, (span, length) in enumerate(zip(spans, lengths, strict=True)):
            ids[row, :length] = tensor(sequences.token_ids[span])
            positions[row, :length] = tensor(sequences.positions[span])
            mask[row, :length] = tensor(sequences.attention_mask[span])
        rows = [Row(row, s, 0, length) for row, (s, length) in enumerate(zip(batch, lengths, strict=True))]
        hidden = self._forward(self.base, ids, positions, mask, rows, observer)
        # token t is predicted by the hidden state of token t - 1; the prompt's own tokens were never sampled
        places = [
            (row, t - 1, span.start + t)
            for row, (s, span, length) in enumerate(zip(batch, spans, lengths, strict=True))
            for t in range(int(sequences.prompt_lens[s]), length)
        ]
        for first in range(0, len(places), HEAD_ROWS):
            rows_, columns, cells = (list(part) for part in zip(*places[first : first + HEAD_ROWS], strict=True))
            self._select(hidden[rows_, columns], np.array(cells), sequences, request, observer, logprobs)

    def _select(
        self, hidden: Tensor, cells: np.ndarray, sequences: Sequences, request: Request, observer: Observer,
        logprobs: np.ndarray,
    ) -> None:  # fmt: skip
        """Logprobs of the tokens at `cells` [N] from the hidden states [N, H] before them, by the bound operator."""
        ids = tensor(sequences.token_ids[cells]).to(self.device)
        scaled_by = live.temperature(request.semantics)
        if self._operator.inputs == "hidden":
            values = self._operator(hidden, self.head.weight, ids, temperature=scaled_by)
        else:
            logits = self.head(hidden)  # [N, V]
            self._logits_dtypes.add(live.DTYPE_NAMES[logits.dtype])
            self._computed_dtypes.add(live.DTYPE_NAMES[logits.dtype])
            values = self._operator(logits, ids, temperature=scaled_by)
        observer.selected(cells, ids.cpu().numpy())
        logprobs[cells] = values.cpu().numpy()

    # -- read-back shared by the sides

    def _compute_dtype(self) -> Observation:
        """What hidden states and logits came out in, and the products between them."""
        seen = sorted(self._computed_dtypes)
        return Observation(seen[0] if len(seen) == 1 else None, {"computed": seen, **self._parameter_dtype().evidence})

    def _ranks(self) -> int:
        """Of the live process group; 1 without one."""
        return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1

    def _placements(self) -> dict[str, Any]:
        """How the live parameters lie over the ranks: how many of them in each way, and this process's rank."""
        ways = Counter(
            f"{'+'.join(map(str, p.placements))} of {p.device_mesh.size()}" if isinstance(p, DTensor) else "whole"
            for p in self.model.parameters()
        )
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return {"process_group": self._ranks(), "rank": rank, "parameters": dict(sorted(ways.items()))}

    def _split_over(self) -> int:
        """Over how many ranks the live matrices are split."""
        return max((p.device_mesh.size() for p in self.model.parameters() if isinstance(p, DTensor)), default=1)
