"""What a command line declares of a dump, read from its texts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from libxd.errors import Status, XdError
from libxd.identity import UNPROCESSED
from libxd.imports.request import dtype_name
from libxd.knobs import DTYPES
from libxd.rundir import SIDES

_PENALTIES = tuple(UNPROCESSED["penalties"])
_NUMBERS = ("temperature", "top_p", "top_k", *_PENALTIES)


def dtypes(texts: Iterable[str]) -> dict[str, str]:
    """side -> dtype, of "DTYPE" for both or "SIDE=DTYPE". XdError 2 for a side twice, that is none, or of no dtype."""
    result: dict[str, str] = {}
    for text in texts:
        side, equals, name = text.rpartition("=")
        sides = (side,) if equals else SIDES
        for each in sides:
            if each not in SIDES or each in result:
                raise _usage(f"--dtype {text}", "says a side's dtype twice" if each in result else "names no side",
                             "DTYPE, or rollout=DTYPE and training=DTYPE")  # fmt: skip
            result[each] = dtype_name(name)
            if result[each] not in DTYPES:
                raise _usage(f"--dtype {text}", "is no dtype to compute in", " or ".join(DTYPES))
    for side in SIDES:
        if side not in result:
            what = f"say what the {side} side computed in: the contract's threshold goes by it, and it has no default"
            raise _usage("--dtype", what, " or ".join(DTYPES))
    return result


def semantics(text: str | None) -> dict[str, Any] | None:
    """A config's semantics of "raw", or of "temperature=0.7,top_p=0.9": processed, and what is not named left alone."""
    if text is None:
        return None
    if text == "raw":
        return {"logprobs": "raw", **UNPROCESSED}
    said: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if name not in _NUMBERS or name in said or not math.isfinite(number):
            raise _usage(f"--semantics {text}", f"cannot be read at {part!r}",
                         f"raw, or numbers for {', '.join(_NUMBERS)}")  # fmt: skip
        said[name] = number
    top_k = said.get("top_k", UNPROCESSED["top_k"])
    if top_k != int(top_k):
        raise _usage(f"--semantics {text}", "top_k is no whole number", "0 for all tokens")
    return {
        "logprobs": "processed",
        "temperature": said.get("temperature", UNPROCESSED["temperature"]),
        "top_p": said.get("top_p", UNPROCESSED["top_p"]),
        "top_k": int(top_k),
        "penalties": {name: said.get(name, UNPROCESSED["penalties"][name]) for name in _PENALTIES},
    }


def _usage(option: str, what: str, expected: str) -> XdError:
    return XdError(f"{option}: {what}", status=Status.USAGE, code="usage", expected=expected)
