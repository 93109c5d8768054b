"""What a format is: whose entries, in what files, of which sides; and the pieces that their parsers are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from libxd.imports.record import Record
from libxd.imports.rows import Row

#: (an entry, the sides that are asked for) -> its sequences
Parse = Callable[[Row, Sequence[str]], Iterator[Record]]


@dataclass(frozen=True)
class Format:
    """`files`: suffixes. `lead`: columns that say how many rows a file of tensors has; `inside`: members of such a file
    that hold its rows. `sides`: () where an entry holds one logprob a token and the caller knows whose. `unknown`: what
    cannot be told from it, beside semantics, weights and knobs, which are in none. `entries`: a file's rows as entries.
    `of_prompts`: parses entries whose sequences went in as prompts, to be scored; what was generated is left out.
    """

    name: str
    about: str
    files: tuple[str, ...]
    parse: Parse
    lead: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    sides: tuple[str, ...] = ()
    unknown: str = ""
    entries: Callable[[Iterator[Row]], Iterator[Row]] = iter
    of_prompts: Parse | None = None


def joined(
    row: Row,
    prompt: np.ndarray | None,
    response: np.ndarray,
    of_response: Mapping[str, np.ndarray],
    /,
    *,
    active: np.ndarray | None = None,
    of_prompt: Mapping[str, np.ndarray] | None = None,
    **about: Any,
) -> Record:
    """A record of prompt ids [P] and response ids [R]; None where the prompt is not known.

    of_response: side -> float32 [R]; of_prompt: side -> float32 [P], else none were scored. active: bool [R] of the
    response, by default all of it.
    """
    length = len(prompt) if prompt is not None else 0
    if length + len(response) == 0:
        raise row.error(None, "holds no tokens", code="empty")
    ids = (response if prompt is None else np.concatenate([prompt, response])).astype(np.int32)
    active = np.ones(len(response), bool) if active is None else active
    unscored = np.full(length, np.nan, np.float32)
    logprobs = {
        side: np.concatenate([(of_prompt or {}).get(side, unscored), values]) for side, values in of_response.items()
    }
    return Record(ids, None if prompt is None else length, np.concatenate([np.zeros(length, bool), active]), logprobs,
                  where=row.place, **about)  # fmt: skip


def whole(row: Row, ids: np.ndarray, active: np.ndarray, logprobs: Mapping[str, np.ndarray], **about: Any) -> Record:
    """A record of ids [T] that are not told apart by prompt and response: what precedes the first active token is
    prompt, all of it where none is."""
    if not len(ids):
        raise row.error(None, "holds no tokens", code="empty")
    prompt_len = int(np.argmax(active)) if active.any() else len(ids)
    return Record(ids.astype(np.int32), prompt_len, active, dict(logprobs), where=row.place, **about)


def unmasked(row: Row, ids: np.ndarray, logprobs: Mapping[str, np.ndarray], **about: Any) -> Record:
    """A record of ids [T] of which the dump does not say what counts."""
    if not len(ids):
        raise row.error(None, "holds no tokens", code="empty")
    return Record(ids.astype(np.int32), None, None, dict(logprobs), where=row.place, **about)


def beside_tokens(
    row: Row, fields: Mapping[str, str], sides: Sequence[str], active: np.ndarray, padded: int
) -> dict[str, np.ndarray]:
    """Side -> float32 [T] of fields of `padded` cells, cell i of token i, of which the first T count: the rollout's
    where the token was sampled, the training's wherever something comes before."""
    there = {"rollout": active, "training": np.arange(len(active)) > 0}
    return {side: only(row.floats(fields[side], padded)[: len(active)], there[side]) for side in sides}


def only(values: np.ndarray, where: np.ndarray) -> np.ndarray:
    """float32 values, NaN outside of bool `where`: what stands there is a fill and no logprob."""
    return np.where(where, values, np.float32(np.nan)).astype(np.float32)


def kept(row: Row, name: str, mask: np.ndarray, *, at_end: bool) -> slice:
    """The part of a padded row that a mask of attention [n] keeps: at its end, or at its beginning.

    XdError 65 when the mask keeps something else than one such part.
    """
    count = int(mask.sum())
    part = slice(len(mask) - count, len(mask)) if at_end else slice(0, count)
    if not mask[part].all():
        side = "left" if at_end else "right"
        raise row.error(name, f"{name} is not 0 for padding on the {side} and 1 for all else",
                        at=int(np.argmin(mask[part])) + part.start)  # fmt: skip
    return part


def version(names: Sequence[Any]) -> int | None:
    """The one policy version of all of them, where it is a number."""
    found = set(map(str, names))
    (name,) = found if len(found) == 1 else ("",)
    return int(name) if name.isascii() and name.isdigit() and len(name) <= 15 else None


def span_version(row: Row) -> int | None:
    """The version in `weight_versions`: spans {"version", "start", "end"} of output tokens (vLLM, SGLang)."""
    if "weight_versions" not in row:
        return None
    return version([span.need("version") for span in row.rows("weight_versions")])
