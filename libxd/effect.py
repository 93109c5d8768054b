"""What a change did to one side: the same side of two attempts, token by token. Printed, never stored in an attempt.

All attempts of an experiment score the same frozen tokens, so the difference of one side's logprobs between two of
them is the effect of what was changed between them, whatever the other side does. The effect of a repeat is the noise
floor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from libxd import scores
from libxd.errors import XdError
from libxd.quantiles import Distribution
from libxd.rundir import SIDES, Attempt
from libxd.scores import ScoreFile

#: the parts of identity.json that must agree for two attempts' tokens to be the same ones
_SAME = ("token_ids", "selected_ids", "cu_seqlens", "active_mask", "num_tokens")
_P99 = Fraction(99, 100)


@dataclass(frozen=True)
class SideEffect:
    """One side of an attempt minus the same side of another, over active tokens, in nats; None where undefined."""

    count: int
    bitwise_equal_share: float | None
    mean_signed: float | None
    mean_absolute: float | None
    p99_absolute: float | None
    max_absolute: float | None


def effect(attempt: Attempt, against: Attempt) -> dict[str, Any]:
    """The line that `xd-compare --against` prints: both sides' effects."""
    return {
        "schema_version": "xd.effect.v1",
        "attempt": str(attempt),
        "against": str(against),
        **{side: vars(side_effect(attempt, against, side)) for side in SIDES},
    }


def side_effect(attempt: Attempt, against: Attempt, side: str) -> SideEffect:
    """One side of `attempt` against the same side of `against`.

    XdError 65 when they scored other tokens or the files' arrays cannot be laid beside one another, 66 when one is
    missing.
    """
    identities = [a.identity()["sequences"] for a in (attempt, against)]
    for name in _SAME:
        if identities[0][name] != identities[1][name]:
            raise XdError("the two attempts scored other tokens and cannot be set side by side", code="other-tokens",
                          where=str(attempt), path=f"/identity.json/sequences/{name}", found=identities[0][name],
                          expected=f"{identities[1][name]} as in {against}")  # fmt: skip
    ours, theirs = (_scores(a, side, identities[0]["num_tokens"]) for a in (attempt, against))
    if ours.tokens != theirs.tokens:
        raise XdError("the two attempts hold other numbers of tokens", code="other-tokens", where=str(ours.path),
                      found=ours.tokens, expected=theirs.tokens)  # fmt: skip
    return _measure(ours, theirs)


def _scores(attempt: Attempt, side: str, tokens: int | None) -> ScoreFile:
    file = ScoreFile(attempt, side, attempt.materialized(), tokens)
    if file.problems:
        raise XdError(f"scores of another form than the format's: {file.problems[0]['detail']}", code="bad-tensor",
                      where=str(file.path))  # fmt: skip
    return file


def _measure(ours: ScoreFile, theirs: ScoreFile) -> SideEffect:
    distribution = Distribution()
    equal = 0
    for a, b in _active_blocks(ours, theirs):
        equal += int(np.count_nonzero(a.view(np.uint32) == b.view(np.uint32)))
        distribution.add(_difference(a, b))
    selection = distribution.select([_P99])
    if distribution.finite:
        for a, b in _active_blocks(ours, theirs):
            selection.add(_difference(a, b))
    count = distribution.count
    return SideEffect(
        count=count,
        bitwise_equal_share=equal / count if count else None,
        mean_signed=distribution.mean_signed(),
        mean_absolute=distribution.mean_absolute(),
        p99_absolute=selection.result()[0],
        max_absolute=distribution.maximum_absolute(),
    )


def _active_blocks(ours: ScoreFile, theirs: ScoreFile) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for where in scores.blocks(ours.tokens, ours, theirs):
        active = ours.active_mask[where] & theirs.active_mask[where]
        yield ours.logprobs[where][active], theirs.logprobs[where][active]


def _difference(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        return ours - theirs


def floor(repeats: list[SideEffect]) -> tuple[float, float] | None:
    """The noise floor from the repeats' effects on one side: the largest mean and the largest maximum of |difference|.

    None when there is no repeat, or none whose effect is defined.
    """
    measured = [r for r in repeats if r.mean_absolute is not None and r.max_absolute is not None]
    if not measured:
        return None
    return max(r.mean_absolute for r in measured), max(r.max_absolute for r in measured)


def standing(seen: SideEffect, noise: tuple[float, float] | None) -> str:
    """An effect beside the noise floor: "0" (no bit moved), "within" it, "above" it, "?" when it was not measured.

    Above: the mean or the maximum of |difference| is larger than any repeat's.
    """
    if seen.mean_absolute is None or seen.max_absolute is None:
        return "?"
    if seen.bitwise_equal_share == 1.0:
        return "0"
    if noise is None:
        return "?"
    return "above" if seen.mean_absolute > noise[0] or seen.max_absolute > noise[1] else "within"
