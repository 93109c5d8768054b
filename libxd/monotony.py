"""What outcomes say of other settings, as long as more bad changes never make one good; and where they do. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

Setting = frozenset[str]  # the changes that are bad in it
_MOST = 8  # contradictions that are told


@dataclass(frozen=True)
class Contradiction:
    """Two settings that are not monotone: `bad` is a part of `good`, which has more bad changes and is good."""

    bad: Setting
    good: Setting


def implied(setting: Setting, known: Mapping[Setting, bool | None]) -> bool | None:
    """The outcome that known ones give a setting, where more bad changes never make it good."""
    if (outcome := known.get(setting)) is not None:
        return outcome
    for other, outcome in known.items():
        if outcome is not None and (other <= setting if outcome else setting <= other):
            return outcome
    return None


def contradictions(known: Mapping[Setting, bool | None]) -> tuple[Contradiction, ...]:
    """Settings that are bad beside good ones with more bad changes; the nearest pairs first."""

    def nearness(pair: Contradiction) -> tuple[int, list[str], list[str]]:
        return len(pair.good - pair.bad), sorted(pair.bad), sorted(pair.good)

    return tuple(sorted(_pairs(known), key=nearness)[:_MOST])


def _pairs(known: Mapping[Setting, bool | None]) -> Iterator[Contradiction]:
    told = [(setting, outcome) for setting, outcome in known.items() if outcome is not None]
    for (one, first), (other, second) in combinations(told, 2):
        if first != second:
            bad, good = (one, other) if first else (other, one)
            if bad < good:
                yield Contradiction(bad, good)
