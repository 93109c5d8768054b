"""Sampling sequences from a runtime's generator, so that a rerun draws the same.

The random number of a draw is a function of (seed, prompt id, sample, step) and of nothing else: neither the batch a
sequence is decoded in nor the prompts beside it move it. Probabilities are float64, of the generator's float32 logits.

Shapes: B rows of a batch, V columns of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blake3 import blake3

from libxd import canon
from libxd.errors import XdError, XdErrors
from libxd.prompts import Prompt

if TYPE_CHECKING:
    import numpy as np

    from libxd.runtimes.protocol import Generator

#: the rule of `uniform`, by name
DRAWS = "blake3-53"


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: `samples` a prompt, at most `max_new_tokens` each; temperature > 0, 0 < top_p <= 1."""

    samples: int
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    batch_size: int
    dtype: str


@dataclass
class Response:
    """One sequence as it grows: its prompt's place in the list, its ids, and the logprobs (nats) of those drawn."""

    prompt_index: int
    prompt_id: str
    sample: int
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    finished: bool = False


def sample(
    generator: Generator, prompts: list[Prompt], sampling: Sampling, finished: Callable[[Response], None]
) -> list[Response]:
    """All responses, the samples of a prompt one after another; `finished` is told of each as it ends.

    XdErrors 65 for prompts that the model cannot take, before anything is sampled.
    """
    encoded = _encode(generator, prompts, sampling.max_new_tokens)
    responses = [
        Response(index, prompt.id, number, encoded[index], [], [])
        for index, prompt in enumerate(prompts)
        for number in range(sampling.samples)
    ]
    for start in range(0, len(responses), sampling.batch_size):
        for response in _decode(generator, responses[start : start + sampling.batch_size], sampling):
            finished(response)
    return responses


def uniform(seed: int, prompt_id: str, sample: int, step: int) -> float:
    """A number in [0, 1): the top 53 bits of the first 8 bytes (little-endian) of BLAKE3 over the tuple as JSON."""
    data = blake3(canon.dumps([seed, prompt_id, sample, step])).digest(length=8)
    return (int.from_bytes(data, "little") >> 11) * 2.0**-53


def draw(logits: np.ndarray, temperature: float, top_p: float, number: float) -> int:
    """The id at `number` of the cumulative distribution of softmax(logits [V] / temperature), cut to its nucleus.

    The nucleus is the smallest set of most probable ids whose mass reaches top_p (Holtzman et al. 2020, "The Curious
    Case of Neural Text Degeneration"); of equally probable ones the lower ids come first.
    """
    import numpy as np

    with np.errstate(over="ignore"):  # so cold that others than the most probable have no chance
        weights = np.exp((logits.astype(np.float64) - np.float64(logits.max())) / temperature)
    if top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        mass = np.cumsum(weights[order])
        weights[order[np.searchsorted(mass, top_p * mass[-1]) + 1 :]] = 0.0
    mass = np.cumsum(weights)
    # number < 1, yet the product may round up to the whole mass, which is the last id's
    return int(min(np.searchsorted(mass, number * mass[-1], side="right"), np.flatnonzero(weights)[-1]))


def logprob(logits: np.ndarray, token_id: int) -> float:
    """log softmax(logits [V])[token_id] in nats, accumulated in float64."""
    import numpy as np

    shifted = logits.astype(np.float64) - np.float64(logits.max())
    return float(shifted[token_id] - np.log(np.exp(shifted).sum()))


def _encode(generator: Generator, prompts: list[Prompt], max_new_tokens: int) -> list[list[int]]:
    encoded: list[list[int]] = []
    issues: list[XdError] = []
    for prompt in prompts:
        try:
            ids = generator.encode(prompt.content)
        except XdError as error:
            error.where = error.where or prompt.where
            issues += error.issues
            continue
        encoded.append(ids)
        if not ids:
            issues.append(XdError("the prompt has no token", code="empty-prompt", where=prompt.where))
        elif len(ids) + max_new_tokens > generator.max_positions:
            issues.append(XdError("prompt and response do not fit the model", code="too-long", where=prompt.where,
                                  found=f"{len(ids)} + {max_new_tokens} tokens",
                                  expected=f"at most {generator.max_positions}"))  # fmt: skip
    if issues:
        raise XdErrors(issues)
    return encoded


def _decode(generator: Generator, batch: list[Response], sampling: Sampling) -> Iterator[Response]:
    """Sample one batch to its end; each response is yielded when it is finished."""
    logits = generator.prefill([response.prompt_ids for response in batch])
    for step in range(sampling.max_new_tokens):
        for row, response in enumerate(batch):
            if response.finished:
                continue
            _extend(response, logits[row], step, sampling)
            if response.ids[-1] in generator.eos_ids or step + 1 == sampling.max_new_tokens:
                response.finished = True
                yield response
        if all(response.finished for response in batch):
            return
        logits = generator.step([response.ids[-1] for response in batch])


def _extend(response: Response, logits: np.ndarray, step: int, sampling: Sampling) -> None:
    import numpy as np

    if not np.isfinite(logits).all():
        raise XdError("the model's logits are not finite", code="not-finite", where=f"prompt {response.prompt_id}",
                      found=f"sample {response.sample}, step {step}", hint="is the checkpoint whole?")  # fmt: skip
    number = uniform(sampling.seed, response.prompt_id, response.sample, step)
    response.ids.append(draw(logits, sampling.temperature, sampling.top_p, number))
    response.logprobs.append(logprob(logits, response.ids[-1]))
