"""What a change did to one side: the same side of two attempts, token by token. Printed, never stored in an attempt.

All attempts of an experiment score the same frozen tokens, so the difference of one side's logprobs between two of
them is the effect of what was changed between them, whatever the other side does: of the intervention alone, where
both were scored under the same conditions. The effect of a repeat is the noise floor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from libxd import identity, scores
from libxd.difference import subtract
from libxd.errors import XdError
from libxd.quantiles import Distribution
from libxd.records import Case
from libxd.rundir import SIDES, Attempt
from libxd.scores import ScoreFile

#: what must agree for two attempts' tokens to be the same ones, where their sequences have no digest
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
    """The line that `xd-compare --against` prints: both sides' effects, and whether they are the intervention's alone.

    case_id, repeat, intervention: those of `attempt`. conditions: side -> how they differ (`difference_of_conditions`),
    null where they are the same. XdError as `side_effect` says, and 69 where one of the two was refused.
    """
    for each in (attempt, against):
        if refusal := each.refusal():
            raise refusal.error(each, "there is nothing to set beside another")
    cases = [Case.read(each) for each in (attempt, against)]
    plans = [case.materialized for case in cases]
    return {
        "schema_version": "xd.effect.v1",
        **{name: cases[0].requested[name] for name in ("case_id", "repeat", "intervention")},
        "attempt": str(attempt),
        "against": str(against),
        **{side: vars(side_effect(attempt, against, side)) for side in SIDES},
        "conditions": {side: difference_of_conditions(*plans, side) for side in SIDES},
    }


def side_effect(attempt: Attempt, against: Attempt, side: str, of: str | None = None) -> SideEffect:
    """One side of `attempt` against the same side of `against`, or against its side `of`.

    XdError 65 when they scored another identity or the files' arrays cannot be laid beside one another, 66 when one is
    missing.
    """
    ours, theirs = attempt.identity(), against.identity()
    _require_same(attempt, against, ours["sequences"], theirs["sequences"], _SAME, "tokens", "/identity.json/sequences")
    pinned = [identity.pinned(found) for found in (ours, theirs)]
    _require_same(attempt, against, *pinned, pinned[0].keys() | pinned[1].keys(), "identity", "/identity.json")
    tokens = ours["sequences"]["num_tokens"]
    files = [_scores(attempt, side, tokens), _scores(against, of or side, tokens)]
    if files[0].tokens != files[1].tokens:
        raise XdError("the two attempts hold other numbers of tokens", code="other-tokens", where=str(files[0].path),
                      found=files[0].tokens, expected=files[1].tokens)  # fmt: skip
    return _measure(*files)


def sequence_sums(attempt: Attempt, against: Attempt, side: str) -> tuple[np.ndarray, np.ndarray]:
    """Of `side_effect`, sequence by sequence: sums of |difference| in nats, float64 [B], and active tokens, int64 [B].

    Sums are formed in float64, inside a block and then block by block. The two are ones that `side_effect` takes; a
    difference that is not finite makes its sequence's sum so.
    """
    tokens = attempt.identity()["sequences"]["num_tokens"]
    ours, theirs = _scores(attempt, side, tokens), _scores(against, side, tokens)
    bounds = ours.cu_seqlens
    sums, counts = np.zeros(bounds.size - 1, np.float64), np.zeros(bounds.size - 1, np.int64)
    for where in scores.blocks(ours.tokens, ours, theirs):
        active = np.flatnonzero(ours.active_mask[where] & theirs.active_mask[where])
        apart = np.abs(subtract(ours.logprobs[where][active], theirs.logprobs[where][active]).astype(np.float64))
        first, last = (int(np.searchsorted(bounds, at, side="right")) - 1 for at in (where.start, where.stop - 1))
        sequence = np.searchsorted(bounds[first : last + 2], where.start + active, side="right") - 1
        sums[first : last + 1] += np.bincount(sequence, weights=apart, minlength=last + 1 - first)
        counts[first : last + 1] += np.bincount(sequence, minlength=last + 1 - first)
    return sums, counts


def _require_same(
    attempt: Attempt, against: Attempt, ours: Mapping[str, Any], theirs: Mapping[str, Any], names: Iterable[str],
    what: str, place: str,
) -> None:  # fmt: skip
    for name in sorted(names):
        if ours.get(name) != theirs.get(name):
            raise XdError(f"the two attempts scored other {what} and cannot be set side by side", code=f"other-{what}",
                          where=str(attempt), path=f"{place}/{name}", found=ours.get(name),
                          expected=f"{theirs.get(name)} as in {against}")  # fmt: skip


def conditions(materialized: Mapping[str, Any], side: str) -> dict[str, Any]:
    """What one side was scored with, beside the knobs: where it differs, an effect is not the intervention's alone.

    The operator belongs to the knobs (logp.backend); only another build of the same one is another condition.
    """
    record = materialized["sides"][side]
    return {
        "strict": materialized["strict"],
        **{name: record[name] for name in ("runtime", "scorer", "environment")},
    }


def difference_of_conditions(ours: Mapping[str, Any], theirs: Mapping[str, Any], side: str) -> str | None:
    """How two materialisations' conditions of a side differ, in a few words; None: they are the same."""
    if any(value["sides"][side]["environment"] is None for value in (ours, theirs)):
        return "conditions that nobody saw (imported)"
    mine, other = (conditions(value, side) for value in (ours, theirs))
    changed = [name for name in mine if mine[name] != other[name]]
    operators = [value["sides"][side]["operator"] for value in (ours, theirs)]
    if operators[0]["backend"] == operators[1]["backend"]:
        builds = [{name: operator[name] for name in ("version", "build")} for operator in operators]
        changed += ["operator's build"] if builds[0] != builds[1] else []
    return f"another {' and '.join(changed)}" if changed else None


def _scores(attempt: Attempt, side: str, tokens: int | None) -> ScoreFile:
    file = ScoreFile.of(attempt, side, attempt.materialized(), tokens)
    file.require_sound()
    return file


def _measure(ours: ScoreFile, theirs: ScoreFile) -> SideEffect:
    distribution = Distribution()
    equal = 0
    for a, b in _active_blocks(ours, theirs):
        equal += int(np.count_nonzero(a.view(np.uint32) == b.view(np.uint32)))
        distribution.add(subtract(a, b))
    selection = distribution.select([_P99])
    if distribution.finite:
        for a, b in _active_blocks(ours, theirs):
            selection.add(subtract(a, b))
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
