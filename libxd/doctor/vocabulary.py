"""What a tokenizer's and a model's directory say of ids: how many there are, which of them mean something special."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libxd import strictjson
from libxd.errors import Status, XdError

#: tokens that open a turn, the word after which says whose it is
_OPENERS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|start|>")
_OTHER_ROLES = ("user", "system", "tool", "developer", "ipython", "observation", "function")


@dataclass(frozen=True)
class Vocabulary:
    """size: how many ids the model has rows for, None when unknown. bos, eos, pad: ids, empty or None when unknown.

    openers: ids that open a turn. other_roles: ids of the words that say that a turn is not the model's own, with the
    word.
    """

    size: int | None = None
    bos: int | None = None
    eos: frozenset[int] = frozenset()
    pad: int | None = None
    openers: frozenset[int] = frozenset()
    other_roles: dict[int, str] = field(default_factory=dict)


def read(directories: Iterable[str | os.PathLike[str]]) -> Vocabulary:
    """From config.json, generation_config.json, tokenizer_config.json and tokenizer.json, as far as they are there.

    XdError 66 when a directory is not there or holds none of them, 65 when one cannot be read.
    """
    directories = [Path(directory) for directory in directories]
    config, generation, tokenizer_config, tokenizer = ({} for _ in range(4))
    for directory in directories:
        if not directory.is_dir():
            raise XdError("no such directory", status=Status.MISSING, code="missing", where=str(directory))
        found = {name: _load(directory / f"{name}.json")
                 for name in ("config", "generation_config", "tokenizer_config", "tokenizer")}  # fmt: skip
        if not any(found.values()):
            raise XdError("holds no config.json and no tokenizer.json", status=Status.MISSING, code="missing",
                          where=str(directory))  # fmt: skip
        config |= found["config"]
        generation |= found["generation_config"]
        tokenizer_config |= found["tokenizer_config"]
        tokenizer |= found["tokenizer"]
    ids = _ids(tokenizer)

    def special(name: str) -> list[int]:
        """By whoever says so: the tokenizer's word first, then the configs' ids."""
        word = tokenizer_config.get(f"{name}_token")
        word = word.get("content") if isinstance(word, dict) else word
        if isinstance(word, str) and word in ids:
            return [ids[word]]
        for said in (generation.get(f"{name}_token_id"), config.get(f"{name}_token_id")):
            if said is not None:
                return [each for each in (said if isinstance(said, list) else [said]) if type(each) is int]
        return []

    ends = {*special("eos"), *_listed(generation.get("eos_token_id")), *_listed(config.get("eos_token_id"))}
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    size = text.get("vocab_size", max(ids.values()) + 1 if ids else None)
    return Vocabulary(
        size=size if type(size) is int else None,
        bos=next(iter(special("bos")), None),
        eos=frozenset(ends),
        pad=next(iter(special("pad")), None),
        openers=frozenset(ids[word] for word in _OPENERS if word in ids),
        other_roles={ids[word]: word for word in _OTHER_ROLES if word in ids},
    )


def _listed(value: Any) -> list[int]:
    return [each for each in (value if isinstance(value, list) else [value]) if type(each) is int]


def _ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Word -> id of a tokenizer.json of a word, byte-pair or piece model. What is no word with an id is passed over:
    what a tokenizer must be is its library's to say."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    pairs: list[tuple[Any, Any]] = []
    if isinstance(vocabulary, dict):
        pairs += vocabulary.items()
    elif isinstance(vocabulary, list):
        pairs += [(entry[0], number) for number, entry in enumerate(vocabulary) if isinstance(entry, list) and entry]
    if isinstance(added, list):
        pairs += [(token.get("content"), token.get("id")) for token in added if isinstance(token, dict)]
    return {word: number for word, number in pairs if isinstance(word, str) and type(number) is int}


def _load(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        # not strictly: tokenizers write lengths beyond any number that two readers would agree on
        value = json.loads(strictjson.read_bytes(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, XdError):
            raise
        raise XdError("is no JSON", code="not-json", where=str(path)) from error
    if not isinstance(value, dict):
        raise XdError("is no JSON object", code="bad-tokenizer", where=str(path))
    return value
