"""What the dishonest engines do: each function takes a cpu-smoke engine and spoils one thing of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from libxd.operators import catalog
from libxd.operators.session import OperatorSession
from libxd.runtimes.cpu_smoke import attention
from libxd.runtimes.protocol import Observation, Piece, submission_batches

ALTERED_CELL = 3  # a prompt token of the first sequence
UNIT, WEIGHT = "layer.1", "model.layers.1.mlp.down_proj.weight"  # the weight that is touched


# -- knobs ignored


def fixed_batch_size(engine: Any, side: str, size: int) -> Any:
    engine._batches = lambda count, request: submission_batches(count, request.submission, size)
    return engine


def own_operator(engine: Any, side: str, backend: str) -> Any:
    """Takes the operator it is handed and goes on using its own."""
    session = OperatorSession(catalog.load(False))
    session.resolve(side, {"backend": backend, "options": {}})
    own = session.instance(side)
    honest = engine.bind
    engine.bind = lambda operator: honest(own)
    return engine


# -- what it says is not what it did: refused


def ignores_submission(engine: Any) -> Any:
    """Always in the order of the file."""
    engine._batches = lambda count, request: submission_batches(count, "canonical", request.batch_size)
    return engine


def counts_the_schedule(engine: Any) -> Any:
    """Scores one by one, and says what it was asked for."""
    engine._batches = lambda count, request: submission_batches(count, request.submission, 1)
    honest = engine.behaviour
    engine.behaviour = lambda: {**honest(), "batch.size": Observation(engine._request.batch_size, {"batches": "all"})}
    return engine


def calls_operator_once(engine: Any) -> Any:
    """The first logprobs by the operator, all others by its own log-softmax."""
    honest = engine._call
    called = []

    def call(normed: Any, weight: Any, ids: Any, temperature: float) -> Any:
        if not called:
            called.append(True)
            return honest(normed, weight, ids, temperature)
        logits = engine._logits(normed, weight)
        return (logits.float() / temperature).log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)

    engine._call = call
    return engine


def corrects_operator(engine: Any) -> Any:
    """Calls the operator for every token and publishes something else."""
    honest = engine._select
    engine._select = lambda hidden, ids, temperature: honest(hidden, ids, temperature) + 1e-6
    return engine


def sets_numerics(engine: Any) -> Any:
    """Leaves the process in another precision than it found it in."""
    return _afterwards(engine, lambda: torch.set_float32_matmul_precision("high"))


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


def alters_mask(engine: Any) -> Any:
    """Lets nobody see the second token of the first sequence."""
    hidden = 1

    def attended(attention: Any) -> None:
        for index, piece in enumerate(attention.pieces):
            if piece.sequence == 0 and piece.start <= hidden < piece.start + piece.count:
                if hasattr(attention, "_tables"):
                    attention._tables[index].blocks[0].attended[hidden] = False
                else:
                    attention._attended[index][hidden] = False

    honest = engine._forward

    def forward(sequences: Any, attention: Any) -> Any:
        attended(attention)
        return honest(sequences, attention)

    engine._forward = forward
    return engine


def prefills(engine: Any) -> Any:
    """Scores in one pass, whatever mode it is asked for, by way of its cache."""
    honest = engine._score_batch
    engine._score_batch = lambda sequences, batch, request, *rest: honest(
        sequences, batch, dataclasses.replace(request, mode="prefill"), *rest
    )
    return engine


def other_temperature(engine: Any) -> Any:
    honest = engine._select
    engine._select = lambda hidden, ids, temperature: honest(hidden, ids, 0.9)
    return engine


def masks_logits(engine: Any) -> Any:
    """Top-k behind the head: all but the 64 largest logits go before the operator sees them."""
    honest = engine._logits

    def logits(normed: Any, weight: Any) -> Any:
        given = honest(normed, weight)
        least = given.topk(64, dim=-1).values[:, -1:]
        return torch.where(given < least, given.new_full((), -30.0), given)

    engine._logits = logits
    return engine


def holds_other_buffer(engine: Any) -> Any:
    """Rotary frequencies that went through bfloat16."""
    buffer = engine.model.rotary_frequencies
    buffer.copy_(buffer.to(torch.bfloat16))
    return engine


def changes_buffer(engine: Any) -> Any:
    return _afterwards(engine, lambda: engine.model.rotary_frequencies.mul_(1.5))


def holds_other_weight(engine: Any) -> Any:
    _nudge(engine)
    return engine


def changes_weight(engine: Any) -> Any:
    return _afterwards(engine, lambda: _nudge(engine))


def trains(engine: Any) -> Any:
    engine.model.train()
    return engine


def ends_training(engine: Any) -> Any:
    """In eval mode while it is looked at before, in train mode afterwards."""
    return _afterwards(engine, lambda: engine.model.train())


def owns_optimizer(engine: Any) -> Any:
    engine.optimizer = torch.optim.SGD(engine.model.parameters(), lr=1.0)
    return engine


def uses_cache(engine: Any) -> Any:
    """A training side that scores prompts first and responses against their kept keys and values."""

    def score_batch(sequences: Any, batch: Any, request: Any, observer: Any, logprobs: Any) -> None:
        # a forward for each part of the whole batch, as honest batches are
        spans = {s: sequences.span(s) for s in batch}
        kept = {s: _Kept(engine._implementation) for s in batch}
        for part in (0, 1):
            for s in batch:
                length, prompt = spans[s].stop - spans[s].start, int(sequences.prompt_lens[s])
                start, end = ((0, prompt), (prompt, length))[part]
                kept[s].pieces = [Piece(s, start, end - start)]
            together = _Together([kept[s] for s in batch])
            hidden = engine._forward(sequences, together)
            engine._score_following(sequences, together.pieces, hidden, request, observer, logprobs)
        engine._attention_ran.add(engine._implementation)

    engine._score_batch = score_batch
    return engine


class _Together:
    """Attentions of several sequences in one forward."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts
        self.pieces = [piece for part in parts for piece in part.pieces]

    def attended(self) -> list[bool]:
        return [seen for part in self._parts for seen in part.attended()]

    def run(self, layer: int, queries: Any, keys: Any, values: Any) -> list[torch.Tensor]:
        counts = [piece.count for piece in self.pieces]
        split = [[tensor.split(counts) for tensor in given] for given in (queries, keys, values)]
        outs = [
            part.run(layer, *([ranks[index] for ranks in given] for given in split))
            for index, part in enumerate(self._parts)
        ]
        return [torch.cat([out[0] for out in outs])]


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


def _afterwards(engine: Any, act: Any) -> Any:
    """An engine that does something once it has scored."""
    honest = engine.score

    def score(sequences: Any, request: Any) -> Any:
        scores = honest(sequences, request)
        act()
        return scores

    engine.score = score
    return engine


def _nudge(engine: Any) -> None:
    """One element of one weight, in place."""
    engine.model.store.unit(UNIT)[0]["down_proj"].view(-1)[:1].add_(0.1)
