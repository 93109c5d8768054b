"""Prompts that xd-rollout samples from: JSONL rows, each a conversation or a plain text under a unique id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from libxd import canon, schema, strictjson
from libxd.errors import XdError, XdErrors

KINDS = ("messages", "text")
MAX_ROW_BYTES = 1 << 20


@dataclass(frozen=True)
class Prompt:
    """One row: its id, its content ({"messages": …} or {"text": …}), and where it stood."""

    id: str
    content: dict[str, Any]
    where: str

    @property
    def kind(self) -> str:
        """ "messages" or "text"."""
        return next(iter(self.content))


def rows(data: bytes, where: str) -> Iterator[tuple[str, bytes]]:
    """(place, line) of the non-blank lines of a JSONL file's bytes."""
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield f"{where}:{number}", line


def parse(lines: Iterable[tuple[str, bytes | str]], where: str) -> list[Prompt]:
    """The prompts of all (place, line) pairs. XdErrors with the flaws of every row; `where` names an empty input.

    One kind of content in all rows: how text became ids is one policy of the whole.
    """
    prompts: list[Prompt] = []
    issues: list[XdError] = []
    first_at: dict[str, str] = {}
    for place, line in lines:
        try:
            prompt = _parse_row(line, place)
        except XdError as error:
            issues += error.issues
            continue
        if prompt.id in first_at:
            issues.append(XdError(f"another prompt with this id, first at {first_at[prompt.id]}", code="duplicate-id",
                                  where=place, path="/id", found=prompt.id))  # fmt: skip
        elif prompts and prompt.kind != prompts[0].kind:
            issues.append(XdError("conversations and plain texts in one input", code="mixed-prompts", where=place,
                                  found=prompt.kind, expected=f"{prompts[0].kind}, as before"))  # fmt: skip
        else:
            first_at[prompt.id] = place
            prompts.append(prompt)
    if issues:
        raise XdErrors(issues)
    if not prompts:
        raise XdError("no prompt", code="empty", where=where)
    return prompts


def digest(prompts: list[Prompt]) -> str:
    """BLAKE3 over the prompts' rows, in order."""
    return canon.digest([{"id": prompt.id, **prompt.content} for prompt in prompts])


def _parse_row(line: bytes | str, where: str) -> Prompt:
    row = strictjson.loads(line, where, max_bytes=MAX_ROW_BYTES)
    if not isinstance(row, dict):
        raise XdError("a prompt is a JSON object", code="wrong-type", where=where, found=row)
    if sum(kind in row for kind in KINDS) != 1:
        raise XdError("a prompt has either messages or text", code="missing-field", where=where, found=sorted(row))
    schema.validate("prompt", row, where)
    return Prompt(row["id"], {kind: row[kind] for kind in KINDS if kind in row}, where)
