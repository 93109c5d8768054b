"""The epsilons and thresholds that an impact is told for, and how a command line changes them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from libxd import scores
from libxd.errors import Status, XdError
from libxd.functional.corrections import CORRECTIONS, Correction
from libxd.functional.objectives import OBJECTIVES, Objective
from libxd.pairs import Pair
from libxd.scores import ScoreFile


@dataclass(frozen=True)
class Settings:
    """objectives and corrections, with their epsilons and thresholds. beta: weight of the k3 penalty against
    `reference` (float32 [T] logprobs of a reference policy, nats), 0 without one."""

    objectives: Sequence[Objective] = OBJECTIVES
    corrections: Sequence[Correction] = CORRECTIONS
    beta: float = 0.0
    reference: np.ndarray | None = None


DEFAULT = Settings()


def objectives(given: Iterable[str]) -> tuple[Objective, ...]:
    """The objectives, with what `NAME=LOW,HIGH` says of their epsilons; one number is both, cispo's the upper one.
    XdError 2 for what is none."""
    found = {each.name: each for each in OBJECTIVES}
    for text in given:
        name, numbers = _parsed(text, found, "--epsilon")
        low = numbers[0] if len(numbers) == 2 or not found[name].clips_weight else None
        found[name] = _made("--epsilon", found[name].with_epsilons, low, numbers[-1])
    return tuple(found.values())


def corrections(given: Iterable[str]) -> tuple[Correction, ...]:
    """The corrections, with what `NAME=LOW,HIGH` says of their thresholds; one number is the upper one, of a rejection
    its inverse the lower one. XdError 2 for what is none."""
    found = {each.name: each for each in CORRECTIONS}
    for text in given:
        name, numbers = _parsed(text, found, "--threshold")
        low = numbers[0] if len(numbers) == 2 else None
        if low is None and found[name].action == "reject" and numbers[-1] > 0:
            low = 1 / numbers[-1]
        found[name] = _made("--threshold", found[name].with_bounds, low, numbers[-1])
    return tuple(found.values())


def beta(given: float | None) -> float:
    """The weight of the penalty, 0 for none given. XdError 2 unless it is finite and 0 or more."""
    if given is not None and not 0 <= given < math.inf:
        raise XdError("is no finite number, 0 or more", status=Status.USAGE, code="usage", where="--beta", found=given)
    return given or 0.0


def with_reference(settings: Settings, pair: Pair, path: str | os.PathLike[str]) -> Settings:
    """The settings with the logprobs of a score file, of whichever side. XdError 66 or 65, also for other tokens."""
    file = ScoreFile.alone(path)
    file.require_sound()
    same = file.tokens == pair.tokens and all(
        np.array_equal(file.token_ids[where], pair.rollout.token_ids[where])
        for where in scores.blocks(pair.tokens, file, pair.rollout)
    )
    if not same:
        raise XdError("the reference scored other tokens", code="other-tokens", where=str(path),
                      found=f"{file.tokens} tokens", expected=f"the {pair.tokens} of {pair.rollout.path}")  # fmt: skip
    return replace(settings, reference=file.logprobs)


def _parsed(text: str, known: dict[str, Any], option: str) -> tuple[str, list[float]]:
    name, sign, rest = text.partition("=")
    if name not in known:
        raise XdError("no such name", status=Status.USAGE, code="usage", where=option, found=name,
                      expected=" ".join(known))  # fmt: skip
    try:
        numbers = [float(part) for part in rest.split(",")]
    except ValueError:
        numbers = []
    if not sign or not 1 <= len(numbers) <= 2:
        raise XdError("is not of the form NAME=LOW,HIGH or NAME=HIGH", status=Status.USAGE, code="usage", where=option,
                      found=text)  # fmt: skip
    return name, numbers


def _made(option: str, make: Any, *numbers: float | None) -> Any:
    try:
        return make(*numbers)
    except ValueError as error:
        raise XdError(str(error), status=Status.USAGE, code="usage", where=option) from error
