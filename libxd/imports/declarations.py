"""What a command line declares of a dump, read from its texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from libxd import contract
from libxd.errors import Status, XdError
from libxd.identity import UNPROCESSED
from libxd.imports.request import dtype_name
from libxd.knobs import DTYPES
from libxd.rundir import EXPERIMENT_ID, SIDES

_PENALTIES = tuple(UNPROCESSED["penalties"])
_NUMBERS = ("temperature", "top_p", "top_k", *_PENALTIES)
#: name -> (whether a number can be that, in words), as the schema of semantics has it
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda number: 0 < number <= 100, "above 0, at most 100"),
    "top_p": (lambda number: 0 < number <= 1, "above 0, at most 1"),
    "top_k": (lambda number: number >= 0 and number == int(number), "a whole number; 0 for all tokens"),
    "repetition": (lambda number: number > 0, "above 0; 1 is none"),
}


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
        if name in _RANGES and not _RANGES[name][0](number):
            raise _usage(f"--semantics {text}", f"{name} cannot be {value.strip()}", _RANGES[name][1])
        said[name] = number
    top_k = said.get("top_k", UNPROCESSED["top_k"])
    return {
        "logprobs": "processed",
        "temperature": said.get("temperature", UNPROCESSED["temperature"]),
        "top_p": said.get("top_p", UNPROCESSED["top_p"]),
        "top_k": int(top_k),
        "penalties": {name: said.get(name, UNPROCESSED["penalties"][name]) for name in _PENALTIES},
    }


def contract_source(name: str) -> str:
    """The name of a numerical contract. XdError 2 for one that is none."""
    if name not in contract.sources():
        raise _usage(f"--contract {name}", "is no numerical contract", " or ".join(contract.sources()))
    return name


def experiment(name: str) -> str:
    """An experiment's name. XdError 2 for one that cannot name a directory."""
    if not EXPERIMENT_ID.match(name):
        raise _usage(f"--experiment {name}", "is no name of an experiment",
                     "letters, digits, '.', '_', '-'; no leading '.'")  # fmt: skip
    return name


def _usage(option: str, what: str, expected: str) -> XdError:
    return XdError(f"{option}: {what}", status=Status.USAGE, code="usage", expected=expected)
