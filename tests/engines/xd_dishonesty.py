"""What the dishonest engines do: each function takes a cpu-smoke engine and spoils one thing of it."""

from __future__ import annotations

from typing import Any

import torch

from libxd.operators import catalog
from libxd.operators.session import OperatorSession
from libxd.runtimes.cpu_smoke import attention
from libxd.runtimes.cpu_smoke.model import Piece
from libxd.runtimes.protocol import submission_chunks

ALTERED_CELL = 3  # a prompt token of the first sequence
UNIT, WEIGHT = "layer.1", "model.layers.1.mlp.down_proj.weight"  # the weight that is touched


# -- knobs ignored


def fixed_batch_size(engine: Any, side: str, size: int) -> Any:
    engine._chunks = lambda count, request: submission_chunks(count, request.submission, size)
    return engine


def own_operator(engine: Any, side: str, backend: str) -> Any:
    """Takes the operator it is handed and goes on using its own."""
    session = OperatorSession(catalog.load(False))
    session.resolve(side, {"backend": backend, "options": {}})
    own = session.instance(side)
    honest = engine.bind
    engine.bind = lambda operator: honest(own)
    return engine


# -- identities violated


def alters_id(engine: Any) -> Any:
    honest = engine._feed

    def feed(sequences: Any, pieces: Any) -> Any:
        ids, positions = honest(sequences, pieces)
        row = 0
        for piece in pieces:
            if piece.sequence == 0 and piece.start <= ALTERED_CELL < piece.start + piece.count:
                ids[row + ALTERED_CELL - piece.start] ^= 1
            row += piece.count
        return ids, positions

    engine._feed = feed
    return engine


def alters_selected_id(engine: Any) -> Any:
    honest = engine._selected_ids
    last = {"done": False}

    def selected(sequences: Any, cells: Any) -> Any:
        ids = honest(sequences, cells)
        if not last["done"]:
            ids[0] ^= 1
            last["done"] = True
        return ids

    engine._selected_ids = selected
    return engine


def shifts_positions(engine: Any) -> Any:
    honest = engine._feed

    def feed(sequences: Any, pieces: Any) -> Any:
        ids, positions = honest(sequences, pieces)
        return ids, positions + 1

    engine._feed = feed
    return engine


def holds_other_weight(engine: Any) -> Any:
    _nudge(engine)
    return engine


def changes_weight(engine: Any) -> Any:
    honest = engine.score

    def score(sequences: Any, request: Any) -> Any:
        scores = honest(sequences, request)
        _nudge(engine)
        return scores

    engine.score = score
    return engine


def trains(engine: Any) -> Any:
    engine.model.train()
    return engine


def ends_training(engine: Any) -> Any:
    """In eval mode while it is looked at before, in train mode afterwards."""
    honest = engine.score

    def score(sequences: Any, request: Any) -> Any:
        scores = honest(sequences, request)
        engine.model.train()
        return scores

    engine.score = score
    return engine


def owns_optimizer(engine: Any) -> Any:
    engine.optimizer = torch.optim.SGD(engine.model.parameters(), lr=1.0)
    return engine


def uses_cache(engine: Any) -> Any:
    """A training side that scores prompts first and responses against their kept keys and values."""
    used = {"cache": "none"}

    def score_chunk(sequences: Any, chunk: Any, request: Any, recorder: Any, logprobs: Any) -> None:
        for sequence in chunk:
            span = sequences.span(sequence)
            length, prompt = span.stop - span.start, int(sequences.prompt_lens[sequence])
            kept = _Kept(engine._implementation)
            for start, end in ((0, prompt), (prompt, length)):
                kept.pieces = [Piece(sequence, start, end - start)]
                hidden = engine._forward(sequences, kept)
                engine._take(sequences, kept.pieces, hidden, request, recorder, logprobs, {sequence: 1})
            used["cache"] = "kv_cache"
            engine._attention_ran.add(engine._implementation)

    engine._score_chunk = score_chunk
    engine._cache_in_use = lambda: used["cache"]
    return engine


class _Kept:
    """Attention of one sequence over what earlier forwards left and what this one adds."""

    def __init__(self, implementation: str) -> None:
        self.pieces: list[Piece] = []
        self._attend = attention.IMPLEMENTATIONS[implementation]
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attended(self) -> list[bool]:
        return [True] * self.pieces[0].count

    def run(self, layer: int, queries: Any, keys: Any, values: Any) -> list[torch.Tensor]:
        (query,), (key,), (value,) = queries, keys, values
        if layer in self._kept:
            key, value = (torch.cat(pair) for pair in zip(self._kept[layer], (key, value), strict=True))
        self._kept[layer] = key, value
        rows, start = query.shape[0], self.pieces[0].start
        visible = torch.ones(rows, start + rows, dtype=torch.bool).tril(start)
        return [self._attend(query, key, value, visible)]


def _nudge(engine: Any) -> None:
    """One element of one weight, in place."""
    engine.model.store.unit(UNIT)[0]["down_proj"].view(-1)[:1].add_(0.1)
