"""What SGLang's /generate answers: `meta_info` with entries [logprob, token id, text] for output and input tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from libxd.imports.files import JSON
from libxd.imports.formats.format import Format, joined, span_version, unmasked, version
from libxd.imports.record import Record
from libxd.imports.rows import Row

_ASK = "add return_logprob=True to the request"


def _parse(row: Row, sides: Sequence[str]) -> Iterator[Record]:
    (side,) = sides
    about = row.row("meta_info")
    response, values = _entries(about, "output_token_logprobs")
    _check_output(row, about, response)
    prompt, of_prompt = _prompt(row, about)
    policy = span_version(about)
    if policy is None and "weight_versions" not in about and "weight_version" in about:
        policy = version([about.need("weight_version")])
    inputs = None if of_prompt is None else {side: of_prompt}
    yield joined(row, prompt, response, {side: values}, of_prompt=inputs, version=policy)


def _parse_prompts(row: Row, sides: Sequence[str]) -> Iterator[Record]:
    (side,) = sides
    prompt, values = _prompt(row, row.row("meta_info"))
    if prompt is None or values is None:
        raise row.error("meta_info", "holds no logprobs of the whole prompt", hint="ask with logprob_start_len=0")
    yield unmasked(row, prompt, {side: values})


def _entries(about: Row, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(ids [n], float32 logprobs [n]); a null logprob (an input's first) is NaN."""
    entries = about.list(name, _ASK)
    for at, entry in enumerate(entries):
        if not isinstance(entry, list) or len(entry) not in (2, 3):
            raise about.error(name, "is no [logprob, token id, text]", at=at, found=entry)
    fields = {"logprob": [entry[0] for entry in entries], "token id": [entry[1] for entry in entries]}
    columns = Row(fields, about.where, about.notes, f"/meta_info/{name}")
    return columns.ids("token id"), columns.floats("logprob")


def _check_output(row: Row, about: Row, response: np.ndarray) -> None:
    if "output_ids" in row:
        listed = row.ids("output_ids")
        common = min(len(listed), len(response))
        if len(listed) != len(response):
            raise row.error("output_ids", "are of another number than output_token_logprobs", found=len(listed),
                            expected=len(response))  # fmt: skip
        if (other := listed[:common] != response[:common]).any():
            at = int(np.argmax(other))
            raise row.error("output_ids", "is not the token whose logprob stands beside it", at=at,
                            found=int(listed[at]), expected=int(response[at]))  # fmt: skip
    count = about.integer("completion_tokens")
    if count is not None and count != len(response):
        raise about.error("output_token_logprobs", "are of another number than the tokens generated",
                          found=len(response), expected=count)  # fmt: skip


def _prompt(row: Row, about: Row) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(ids, float32 logprobs) of the prompt; None for what the answer does not hold.

    Input logprobs begin at `logprob_start_len`, which is not in the answer: they are the prompt's last tokens.
    """
    ids, values = None, None
    if "input_token_logprobs" in about and about.list("input_token_logprobs"):
        ids, values = _entries(about, "input_token_logprobs")
    if "prompt_token_ids" in row:
        prompt = row.ids("prompt_token_ids")
        if ids is None:
            return prompt, None
        start = len(prompt) - len(ids)
        if start < 0 or not np.array_equal(prompt[start:], ids):
            raise about.error("input_token_logprobs", "are not of the last tokens of prompt_token_ids")
        return prompt, np.concatenate([np.full(start, np.nan, np.float32), values])
    if ids is not None and len(ids) == about.integer("prompt_tokens"):
        return ids, values
    return None, None


FORMAT = Format(
    name="sglang",
    about="answers of SGLang's /generate with return_logprob",
    files=JSON,
    parse=_parse,
    of_prompts=_parse_prompts,
    unknown="whether output logprobs are before or after temperature (SGLANG_RETURN_ORIGINAL_LOGPROB); the prompt, "
    "unless logprob_start_len=0 or return_prompt_token_ids was asked for",
)
