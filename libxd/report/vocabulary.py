"""What a token says: text by the tokenizer whose digest the identity pins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from libxd import canon
from libxd.errors import XdError
from libxd.plain import plain, shortened

NAME = "tokenizer.json"
_MOST = 40  # characters of one token
_MARKS = {"\n": "↵", "\r": "␍", "\t": "⇥"}


class Vocabulary:
    """Texts of token ids, by a tokenizer.json; each id is decoded once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str | None] = {}

    def text(self, token: int) -> str | None:
        """A token as a person reads it, of bounded length; None for an id that is none, or bytes that are no text."""
        if token not in self._texts:
            self._texts[token] = self._decode(token)
        return self._texts[token]

    def _decode(self, token: int) -> str | None:
        if token < 0 or (entry := self._tokenizer.id_to_token(token)) is None:
            return None
        text = self._tokenizer.decode([token], skip_special_tokens=False) or entry
        if "\ufffd" in text:  # part of a character's bytes
            return None
        for char, mark in _MARKS.items():
            text = text.replace(char, mark)
        return shortened(plain(text), _MOST)


def find(row: dict[str, Any], directory: str | os.PathLike[str] | None) -> tuple[Vocabulary | None, str]:
    """The vocabulary of a plan row's tokens, else why there is none.

    directory: where it must be; None: where the row says that it was, if it is there. A tokenizer.json must have the
    digest that the row pins. XdError 65 for another one in `directory`, 66 for none.
    """
    pinned = row["identity"]["tokenizer"]["files"].get(NAME)
    place = directory or row["locations"]["tokenizer"]
    if place is None:
        return None, "no tokenizer made them"
    path = Path(place) / NAME
    if directory is None and not path.is_file():
        return None, f"{path} is not at hand (--tokenizer DIR says where it is)"
    try:
        found = canon.digest_file(path)
    except OSError as error:
        raise XdError("holds no tokenizer.json", status=66, code="missing", where=str(place)) from error
    if pinned is not None and found != pinned:
        if directory is None:
            return None, f"{path} is another tokenizer (--tokenizer DIR says where the right one is)"
        raise XdError("is not the tokenizer that the ids were made with", code="other-tokenizer", where=str(path),
                      found=found, expected=pinned)  # fmt: skip
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None, "the package tokenizers is not installed"
    try:
        return Vocabulary(Tokenizer.from_file(str(path))), ""
    except Exception as error:  # what that library raises has no type of its own
        raise XdError(f"is no tokenizer that can be read: {error}", code="bad-tokenizer", where=str(path)) from error
