"""vLLM's RequestOutput (offline `LLM.generate`) as JSON: its members by their own names.

A position of `logprobs` or `prompt_logprobs` is an object, token id -> {"logprob", "rank", "decoded_token"}; of them
the one of the token itself counts, which vLLM always has. With `flat_logprobs` the positions are parts of flat lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from libxd.imports.files import JSON
from libxd.imports.formats.format import Format, joined, span_version, unmasked
from libxd.imports.record import Record
from libxd.imports.rows import Row

_ASK = "ask for it: SamplingParams(logprobs=0) gives the sampled token's"


def _parse(row: Row, sides: Sequence[str]) -> Iterator[Record]:
    if "choices" in row:
        raise row.error("choices", "is a server's answer and no RequestOutput", code="other-format",
                        hint="xd-import openai")  # fmt: skip
    (side,) = sides
    prompt = row.ids("prompt_token_ids")
    of_prompt = of_positions(row, "prompt_logprobs", prompt) if "prompt_logprobs" in row else None
    for output in row.rows("outputs"):
        response = output.ids("token_ids")
        output.need("logprobs", _ASK)
        yield joined(
            output, prompt, response, {side: of_positions(output, "logprobs", response)},
            of_prompt=None if of_prompt is None else {side: of_prompt},
            prompt=row.key("request_id"), version=span_version(output),
        )  # fmt: skip


def _parse_prompts(row: Row, sides: Sequence[str]) -> Iterator[Record]:
    (side,) = sides
    prompt = row.ids("prompt_token_ids")
    row.need("prompt_logprobs", "ask for it: SamplingParams(prompt_logprobs=0)")
    yield unmasked(row, prompt, {side: of_positions(row, "prompt_logprobs", prompt)}, prompt=row.key("request_id"))


def of_positions(row: Row, name: str, ids: np.ndarray) -> np.ndarray:
    """float32 [n]: of each position's logprobs that of the token itself; NaN at a null one (a prompt's first)."""
    if isinstance(row.need(name), dict):
        return _of_flat(row.row(name), ids)
    positions = row.list(name)
    if len(positions) != len(ids):
        raise row.error(name, f"{name} are of another length than the tokens", found=len(positions), expected=len(ids))
    values = []
    for at, (position, token) in enumerate(zip(positions, ids.tolist(), strict=True)):
        if position is None:
            values.append(None)
            continue
        entry = position.get(str(token)) if isinstance(position, dict) else None
        if not isinstance(entry, dict) or "logprob" not in entry:
            found = sorted(position)[:8] if isinstance(position, dict) else type(position).__name__
            raise row.error(name, "has no logprob of the token itself", at=at, found=found,
                            expected=f'"{token}": {{"logprob": …}}')  # fmt: skip
        values.append(entry["logprob"])
    return Row({name: values}, row.where, row.notes).floats(name)


def _of_flat(flat: Row, ids: np.ndarray) -> np.ndarray:
    """The same of FlatLogprobs: position i has the entries from start_indices[i] to end_indices[i]."""
    starts, ends = (flat.ids(name).tolist() for name in ("start_indices", "end_indices"))
    of_entry, values = flat.ids("token_ids").tolist(), flat.floats("logprobs", len(flat.list("token_ids")))
    if len(starts) != len(ids) or len(ends) != len(ids):
        raise flat.error("start_indices", "positions are of another number than the tokens", found=len(starts),
                         expected=len(ids))  # fmt: skip
    result = np.full(len(ids), np.nan, np.float32)
    for at, (start, end, token) in enumerate(zip(starts, ends, ids.tolist(), strict=True)):
        if start == end:
            continue
        try:
            result[at] = values[of_entry.index(token, start, end)]
        except ValueError:
            raise flat.error("token_ids", "the token itself is not among its position's", at=start,
                             found=of_entry[start:end][:8], expected=token) from None  # fmt: skip
    return result


FORMAT = Format(
    name="vllm",
    about="RequestOutput of vLLM's LLM.generate",
    files=JSON,
    parse=_parse,
    of_prompts=_parse_prompts,
    unknown="whether logprobs are raw or processed (logprobs_mode)",
)
