"""One sequence as somebody else's dump has it: what every format is parsed into, and what is published from."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

#: what was done to the logits before the softmax, where a dump does not say: a value of its own, never a default
UNKNOWN_SEMANTICS: dict[str, Any] = {"temperature": None, "top_p": None, "top_k": None, "penalties": None}


@dataclass(frozen=True)
class Record:
    """One sequence of L tokens, prompt and response.

    token_ids: integers [L]. prompt_len: how many of them are prompt; None where the dump holds the response alone.
    active: bool [L], the tokens that decide; None where the dump
    does not say which (`Dump.masked_by`). logprobs: side -> float32 [L] in nats, index i of token i given the tokens
    before it, NaN where the dump has none. prompt: equal for samples of one prompt (a group); None: unknown.
    advantage: a number, or float [L]. version: of the policy that sampled (a step). where: its place in the dump, for
    messages.
    """

    token_ids: np.ndarray
    prompt_len: int | None
    active: np.ndarray | None
    logprobs: Mapping[str, np.ndarray]
    prompt: Hashable | None = None
    advantage: float | np.ndarray | None = None
    reward: float | None = None
    version: int | None = None
    where: str = ""
