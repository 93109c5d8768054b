"""The same tokens by a third scorer: a model in float32, and what it would say if one thing were done otherwise.

`rescore` runs the `hf` runtime's training side over whole sequences, one at a time, with an operator of its own that
takes more from the logits than the selected logprob. torch is imported here alone, when it is called.

Shapes: N scored tokens, V columns of the vocabulary, K temperatures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from libxd.sequences import Sequences

if TYPE_CHECKING:
    import torch

RUNTIME = "hf"
#: 1.1^k: logprobs between two of them are interpolated
TEMPERATURES = tuple(1.1**k for k in range(-17, 11))
NUCLEI = (0.8, 0.9, 0.95, 0.98, 0.99)
TOP_KS = (20, 40, 50, 100)
_ROWS = 64  # of logits that are sorted at once: some copies of them are held
_SEMANTICS = {
    "logprobs": "raw", "temperature": 1.0, "top_p": 1.0, "top_k": 0,
    "penalties": {"repetition": 1.0, "presence": 0.0, "frequency": 0.0},
}  # fmt: skip


@dataclass(frozen=True)
class Rescored:
    """What the third scorer says of N tokens, in nats.

    cells int64 [N]: their flat indices. plain float32 [N]: the raw logprob. logit, log_sum_exp float32 [N]: its two
    parts. by_temperature float32 [N, K]. otherwise: name -> float32 [N], the logprob with one thing done otherwise;
    -inf where that leaves the token out, NaN where it has no answer.
    """

    cells: np.ndarray
    plain: np.ndarray
    logit: np.ndarray
    log_sum_exp: np.ndarray
    by_temperature: np.ndarray
    otherwise: Mapping[str, np.ndarray]

    def at_temperature(self, value: float) -> np.ndarray:
        """float64 [N] at a temperature within the grid: by the parabola through the three nearest, in log T."""
        grid = np.log(TEMPERATURES)
        x = math.log(value)
        centre = int(np.clip(np.abs(grid - x).argmin(), 1, grid.size - 2))
        near = self.by_temperature[:, centre - 1 : centre + 2].astype(np.float64)
        return near @ _lagrange(grid[centre - 1 : centre + 2], x)

    def padded(self, columns: int) -> np.ndarray:
        """float64 [N]: with so many more columns of logit zero in the sum over the vocabulary."""
        return self.logit - np.logaddexp(self.log_sum_exp.astype(np.float64), math.log(columns))


def _lagrange(places: np.ndarray, x: float) -> np.ndarray:
    return np.array([
        math.prod((x - places[j]) / (places[i] - places[j]) for j in range(3) if j != i) for i in range(3)
    ])  # fmt: skip


def rescore(model: str, sequences: Sequences, bos: int | None = None) -> Rescored:
    """Every token behind a prompt, by the checkpoint directory `model` in float32.

    bos: where it is known, also with that id once more before each sequence. XdError 65 or 69 as the runtime says.
    """
    from libxd.runtimes import registry
    from libxd.runtimes.protocol import EngineContext, Request

    arguments = {"device": "cpu", "dtype": "float32", "attention": "sdpa", "sharding": "unsharded", "world_size": 1}
    engine = registry.load(RUNTIME).open("training", {"engine": arguments}, EngineContext({}, {"checkpoint": model}))
    request = Request(1, "teacher_forced", "canonical", _SEMANTICS)
    try:
        operator = Otherwise()
        engine.bind(operator)
        said = engine.score(sequences, request).logprobs
        if bos is not None:
            again = Otherwise(plain_alone=True)
            engine.bind(again)
            engine.score(_begun_with(sequences, bos), request)
    finally:
        engine.close()
    cells = np.flatnonzero(~np.isnan(said))
    found = operator.taken()
    assert np.array_equal(found["plain"], said[cells]), "the operator is called in the order of the tokens"
    otherwise = {name: column for name, column in found.items() if name not in _PARTS}
    otherwise |= of_other_places(otherwise, sequences, cells)
    if bos is not None:
        otherwise["begun with another BOS"] = again.taken()["plain"]
    return Rescored(cells, *(found[name] for name in _PARTS), otherwise)


_PARTS = ("plain", "logit", "log_sum_exp", "by_temperature")


class Otherwise:
    """The operator: the plain logprob is what it returns, and the rest is kept until `taken`."""

    backend, inputs, implementation = "xd-doctor", "logits", "libxd.doctor.rescoring:Otherwise"

    def __init__(self, plain_alone: bool = False) -> None:
        self.calls = 0
        self._plain_alone = plain_alone
        self._kept: list[dict[str, np.ndarray]] = []

    def __call__(self, logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
        """logits: [N, V] of one sequence in order; ids: int64 [N]. float32 [N] in nats; temperature is 1."""
        import torch

        self.calls += 1
        logits = logits.to(torch.float32)
        plain = _selected(logits, ids)
        kept = {"plain": plain.numpy()}
        if not self._plain_alone:
            others = ids, ids.roll(-1), ids.roll(1)
            blocks = [_otherwise(logits[at : at + _ROWS], *(each[at : at + _ROWS] for each in others))
                      for at in range(0, len(ids), _ROWS)]  # fmt: skip
            kept |= {name: np.concatenate([block[name].numpy() for block in blocks]) for name in blocks[0]}
        self._kept.append(kept)
        return plain

    def taken(self) -> dict[str, np.ndarray]:
        """Each column over all calls."""
        return {name: np.concatenate([kept[name] for kept in self._kept]) for name in self._kept[0]}


def _selected(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.log_softmax(logits, -1).gather(-1, ids[:, None])[:, 0]


def _otherwise(
    logits: torch.Tensor, ids: torch.Tensor, following: torch.Tensor, last: torch.Tensor
) -> dict[str, torch.Tensor]:  # fmt: skip
    import torch

    logit = logits.gather(-1, ids[:, None])[:, 0]
    log_sum_exp = logits.logsumexp(-1)
    ordered = (logits.sort(-1, descending=True).values - log_sum_exp[:, None]).exp()
    mass = ordered.cumsum(-1)  # float32, of a sum that ends at one
    rank = (logits > logit[:, None]).sum(-1)
    plain = logit - log_sum_exp
    columns = {
        "logit": logit,
        "log_sum_exp": log_sum_exp,
        "by_temperature": torch.stack([_selected(logits / t, ids) for t in TEMPERATURES], 1),
        "logits in bfloat16": _selected(logits.bfloat16().float(), ids),
        "logits in float16": _selected(logits.half().float(), ids),
        "the likeliest token's": logits.max(-1).values - log_sum_exp,
        "the next token's": _selected(logits, following),
        "the last token's": _selected(logits, last),
    }
    for p in NUCLEI:
        kept = (mass < p).sum(-1)  # the place of the last token in the nucleus
        columns[f"top-p {p}"] = _renormalised(plain, mass, kept, rank)
    for k in TOP_KS:
        columns[f"top-k {k}"] = _renormalised(plain, mass, torch.full_like(rank, k - 1), rank)
    return columns


def _renormalised(plain: torch.Tensor, mass: torch.Tensor, last: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    import torch

    last = last.clamp(max=mass.shape[-1] - 1)
    inside = plain - mass.gather(-1, last[:, None])[:, 0].log()
    return torch.where(rank <= last, inside.clamp(max=0), -torch.inf)


def of_other_places(
    columns: Mapping[str, np.ndarray], sequences: Sequences, cells: np.ndarray
) -> dict[str, np.ndarray]:
    """The token's own id under the logits one place early or late, which is another place's other token."""
    of = np.searchsorted(sequences.cu_seqlens, cells, side="right")
    found = {}
    for name, other, step in (
        ("logits of the place before", "the next token's", -1),
        ("logits of the place behind", "the last token's", 1),
    ):
        moved = np.roll(columns[other], -step)
        found[name] = np.where(np.roll(of, -step) == of, moved, np.float32(np.nan))
    return found


def _begun_with(sequences: Sequences, bos: int) -> Sequences:
    """The same, each sequence with one more id before it."""
    starts = sequences.cu_seqlens[:-1]

    def grown(values: np.ndarray, first: Any) -> np.ndarray:
        return np.insert(values, starts, first)

    lengths = np.diff(sequences.cu_seqlens) + 1
    return Sequences(
        token_ids=grown(sequences.token_ids, bos), cu_seqlens=np.cumsum([0, *lengths], dtype=np.int64),
        active_mask=grown(sequences.active_mask, False), attention_mask=grown(sequences.attention_mask, True),
        positions=np.concatenate([np.arange(length) for length in lengths]).astype(np.int32),
        prompt_lens=sequences.prompt_lens + 1, prompt_index=sequences.prompt_index,
        logprobs=grown(sequences.logprobs, np.float32(np.nan)),
    )  # fmt: skip
