"""What servers answer in OpenAI's form: completions, chat completions, vLLM's /inference/v1/generate and run-batch.

OpenAI's own form names tokens by their text, which is no id. Ids come by vLLM's extensions of a request:
`return_token_ids`, or `return_tokens_as_token_ids`, which writes tokens as "token_id:N".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from libxd.imports.files import JSON
from libxd.imports.formats.format import Format, joined, span_version, unmasked
from libxd.imports.formats.vllm import of_positions
from libxd.imports.record import Record
from libxd.imports.rows import Row

_PREFIX = "token_id:"
_FLOOR = -9999.0  # what these servers write for -inf, for NaN, and for a token without an entry: JSON has none of them
_ASK = 'add "return_token_ids": true to the request (vLLM)'


def _parse(row: Row, sides: Sequence[str]) -> Iterator[Record]:
    row = _body(row)
    (side,) = sides
    for choice in row.rows("choices"):
        if "delta" in choice:
            raise choice.error("delta", "is a piece of a stream", code="other-format", hint="gather the whole answer")
        choice.need("logprobs", 'add "logprobs" to the request')
        ids, values = _tokens(choice)
        prompt = _prompt(row, choice)
        response, of_prompt = ids, None
        if "prompt_logprobs" in choice or "prompt_logprobs" in row:
            there = choice if "prompt_logprobs" in choice else row
            of_prompt = _floored(there, of_positions(there, "prompt_logprobs", prompt)) if prompt is not None else None
        if (echoed := _echoed(row, choice, prompt, ids, values)) is not None:
            prompt, response = ids[:echoed], ids[echoed:]
            of_prompt, values = values[:echoed], values[echoed:]
        yield joined(
            choice, prompt, response, {side: values}, of_prompt=None if of_prompt is None else {side: of_prompt},
            prompt=_group(row, choice), version=span_version(choice),
        )  # fmt: skip


def _parse_prompts(row: Row, sides: Sequence[str]) -> Iterator[Record]:
    """Of a chat's answer one, of completions one a choice, from `prompt_logprobs` or from an echo."""
    row = _body(row)
    (side,) = sides
    if "prompt_logprobs" in row:
        prompt = row.ids("prompt_token_ids", _ASK)
        values = _floored(row, of_positions(row, "prompt_logprobs", prompt))
        yield unmasked(row, prompt, {side: values}, prompt=row.key("id") or row.key("request_id"))
        return
    for choice in row.rows("choices"):
        if "prompt_logprobs" in choice and "prompt_token_ids" in choice:
            prompt = choice.ids("prompt_token_ids")
            values = _floored(choice, of_positions(choice, "prompt_logprobs", prompt))
        else:
            choice.need("logprobs", 'ask for "prompt_logprobs", or for "echo" and "logprobs"')
            ids, of_all = _tokens(choice)
            echoed = _echoed(row, choice, _prompt(row, choice), ids, of_all)
            if echoed is None:
                raise choice.error("logprobs", "are of the response alone", hint='ask for "prompt_logprobs" or "echo"')
            prompt, values = ids[:echoed], of_all[:echoed]
        yield unmasked(choice, prompt, {side: values}, prompt=_group(row, choice))


def _body(row: Row) -> Row:
    """The answer in a line of a batch's output, or the row itself."""
    if "choices" in row:
        return row
    if "outputs" in row:
        raise row.error("outputs", "is a RequestOutput and no server's answer", code="other-format",
                        hint="xd-import vllm")  # fmt: skip
    if "response" not in row:
        row.need("choices", "is this an answer of a completions endpoint?")
    if "error" in row:
        raise row.error("error", "the request failed", found=row.need("error"), hint="leave its line out")
    return row.row("response").row("body")


def _tokens(choice: Row) -> tuple[np.ndarray, np.ndarray]:
    """(ids [n], float32 logprobs [n]) that the choice's logprobs speak of: the response, or with echo all of it."""
    logprobs = choice.row("logprobs")
    if "content" in logprobs:
        entries = list(logprobs.rows("content"))
        names = [entry.integer("token_id") if "token_id" in entry else entry.text("token") for entry in entries]
        numbers: list[Any] = [entry.number("logprob") for entry in entries]
        holder, field = logprobs, "content"
    else:
        names, numbers = list(logprobs.list("tokens", _ASK)), list(logprobs.list("token_logprobs"))
        holder, field = logprobs, "token_logprobs"
    ids = _ids(choice, names, holder)
    values = Row({field: numbers}, choice.where, choice.notes).floats(field, len(ids))
    return ids, _floored(choice, values)


def _ids(choice: Row, names: list[Any], logprobs: Row) -> np.ndarray:
    named = [_id_of(name) for name in names]
    listed = choice.ids("token_ids") if "token_ids" in choice else None
    if listed is not None and None not in named and len(named) == len(listed) and named != listed.tolist():
        at = next(index for index, (one, other) in enumerate(zip(named, listed, strict=True)) if one != other)
        raise choice.error("token_ids", "is not the token whose logprob stands beside it", at=at, found=int(listed[at]),
                           expected=named[at])  # fmt: skip
    if named and None not in named:
        return Row({"tokens": named}, choice.where, choice.notes).ids("tokens")
    if listed is None:
        raise logprobs.error(None, "names its tokens by text, not by id", code="missing-field", found=names[:4],
                             hint=_ASK)  # fmt: skip
    if len(names) > len(listed) and "prompt_token_ids" in choice:  # echo
        return np.concatenate([choice.ids("prompt_token_ids"), listed])
    return listed


def _id_of(name: Any) -> int | None:
    if isinstance(name, int):
        return name
    digits = name.removeprefix(_PREFIX) if isinstance(name, str) and name.startswith(_PREFIX) else ""
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 11 else None


def _prompt(row: Row, choice: Row) -> np.ndarray | None:
    for there in (choice, row):
        if "prompt_token_ids" in there:
            return there.ids("prompt_token_ids")
    return None


def _echoed(row: Row, choice: Row, prompt: np.ndarray | None, ids: np.ndarray, values: np.ndarray) -> int | None:
    """How many of the tokens are the prompt's, which an answer with `echo` begins with; None without."""
    if prompt is not None:
        listed = len(choice.ids("token_ids")) if "token_ids" in choice else None
        echo = len(ids) == len(prompt) + listed if listed is not None else np.isnan(values[:1]).any()
        if not echo or not len(prompt):
            return None
        if not np.array_equal(ids[: len(prompt)], prompt):
            raise choice.error("prompt_token_ids", "are not the tokens that the echo begins with")
        return len(prompt)
    if not np.isnan(values[:1]).any():
        return None
    usage = row.row("usage").integer("prompt_tokens") if "usage" in row else None
    if usage is None or usage > len(ids) or len(row.list("choices")) > 1:
        raise choice.error("logprobs", "begins with the prompt, and nothing says where that ends", hint=_ASK)
    return usage


def _group(row: Row, choice: Row) -> Any:
    """The answer; of several prompts in one answer the prompt's ids, too."""
    answer = row.key("id") or row.key("request_id")
    return (answer, choice.ids("prompt_token_ids").tobytes()) if "prompt_token_ids" in choice else answer


def _floored(row: Row, values: np.ndarray) -> np.ndarray:
    floor = values == np.float32(_FLOOR)
    what = f"logprobs are {_FLOOR}, by which the server says -inf, NaN or none: taken as missing"
    row.notes.add(what, int(floor.sum()))
    return np.where(floor, np.float32(np.nan), values)


FORMAT = Format(
    name="openai",
    about="answers of OpenAI-style servers with token ids: completions, chat, vLLM's generate and run-batch",
    files=JSON,
    parse=_parse,
    of_prompts=_parse_prompts,
    unknown="whether logprobs are raw or processed; the prompt, unless its ids were asked for",
)
