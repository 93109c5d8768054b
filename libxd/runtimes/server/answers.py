"""Requests of prompt logprobs, and their answers, read to the last token. Pure: JSON in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from libxd.errors import Status, XdError

#: what vLLM writes where a logprob is minus infinity, or is none
_STAND_IN = -9999.0


@dataclass(frozen=True)
class Answer:
    """What a server says of one prompt of L tokens: the ids that it was fed, and the logprob (JSON) of each in nats;
    None for the first."""

    token_ids: list[int]
    logprobs: list[Any]


def request(model: str, prompts: list[list[int]]) -> dict[str, Any]:
    """The body of a request for the logprobs of these prompts' tokens. No server answers without sampling one more."""
    return {"model": model, "prompt": prompts, "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True,
            "add_special_tokens": False, "stream": False}  # fmt: skip


def read(value: Any, model: str, prompts: Sequence[list[int]], names: Sequence[str]) -> list[Answer]:
    """The answers to `request(model, prompts)`, in the order of the prompts, which errors call by their names.

    XdError 69 for a server that gives no prompt logprobs or does not say which ids it was fed; 70 when what it gives is
    of another form, another model, other ids, or of fewer tokens.
    """
    choices = value.get("choices") if isinstance(value, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise _wrong("the server's answer is no completion", "answer", type(value).__name__, "choices")
    if value.get("model") != model:
        raise _wrong("the server answers for another model", "answer", value.get("model"), model)
    by_index = {choice.get("index"): choice for choice in choices if type(choice.get("index")) is int}
    if len(choices) != len(prompts) or sorted(by_index) != list(range(len(prompts))):
        raise _wrong("the server answers another number of prompts", "answer", len(choices), len(prompts))
    return [_read(by_index[i], prompt, names[i]) for i, prompt in enumerate(prompts)]


def _read(choice: dict[str, Any], prompt: list[int], name: str) -> Answer:
    for key, what in (("prompt_logprobs", "gives no prompt logprobs"),
                      ("prompt_token_ids", "does not say which ids it was fed")):  # fmt: skip
        if not isinstance(choice.get(key), list):
            raise XdError(f"the server {what}", status=Status.REFUSED, code="unsupported-server", where=name,
                          hint="a server of vLLM does, where a request asks for it")  # fmt: skip
    fed, given = choice["prompt_token_ids"], choice["prompt_logprobs"]
    if len(given) != len(prompt):
        raise _wrong("the server gives another number of logprobs than there are tokens", name, len(given), len(prompt))
    if fed != prompt:
        raise _wrong("the server was fed other ids than the frozen ones", name, fed, prompt)
    entries = enumerate(zip(given[1:], prompt[1:], strict=True), 1)
    return Answer(fed, [None, *(_of(entry, token, name, place) for place, (entry, token) in entries)])


def _of(entry: Any, token: int, name: str, place: int) -> Any:
    """The logprob of an id in a token's entry, whatever it is."""
    found = entry.get(str(token)) if isinstance(entry, dict) else None
    if not isinstance(found, dict):
        ids = sorted(entry) if isinstance(entry, dict) else entry
        raise _wrong("the server gives the logprob of another id than the frozen one", name, ids, [str(token)], place)
    return found.get("logprob")


def require_logprobs(values: Sequence[Any], first: int, name: str) -> np.ndarray:
    """float32 [n] of an answer's values, from token `first` on. XdError 70 for one that is no finite logprob."""
    for i, value in enumerate(values):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value > 0 or value == _STAND_IN:
            raise _wrong("the server gives no finite logprob of a token", name, value, "a number up to 0", first + i)
    return np.array(values, np.float32)


def _wrong(what: str, where: str, found: Any, expected: Any, place: int | None = None) -> XdError:
    return XdError(what, status=Status.BUG, code="engine-output", where=where,
                   path="" if place is None else f"/{place}", found=found, expected=expected)  # fmt: skip
