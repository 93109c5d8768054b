"""Which few of many changes make the difference: a search over subsets, by tests whose outcomes are given. Pure.

A setting is the set of changes that are *bad* in it: none of them in the good setting, all of them in the bad one.
Breaking starts from the good setting and looks for a smallest set of changes that makes it bad; repairing starts from
the bad one and looks for a smallest set that, taken back, makes it good. Both ask about the same settings.

A search is a function of the outcomes that are known: it is run anew with more of them until it needs none. An outcome
is True (bad), False (good), or None for a setting of which neither can be said.

A set is found by its members, the last first: of the changes in their order the shortest prefix that does is found by
halving, its last member is kept, and what comes before it is gone through again, with that member in place. (Dichotomic
search for a minimal unsatisfiable subset: F. Hemery, C. Lecoutre, L. Sais, F. Boussemart, "Extracting MUCs from
constraint networks", ECAI 2006.) That takes ceil(log2 n) + 1 tests a member, whatever the outcomes are like. Then every
set with one member less is tested, so that it is minimal by measurement, monotone or not. That it is a smallest one
follows from sets of the other direction, which it must meet (the duality of R. Reiter, "A theory of diagnosis from
first principles", 1987), as long as outcomes are monotone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from libxd import monotony
from libxd.monotony import Contradiction, Setting

Direction = Literal["break", "repair"]
DIRECTIONS: tuple[Direction, ...] = ("break", "repair")
_UNTOLD = "some of the sets inside it cannot be told"


@dataclass(frozen=True)
class Answer:
    """What was found in one direction.

    changes: the set, in the order of the changes; no smaller set inside it does, as far as `unproven` says.
    unproven: the members without which it is not known whether the rest would do.
    smallest: "proven" (nothing but the start itself is smaller), "if_monotone" (no set with fewer members does, if
    outcomes are monotone, which no test contradicts), or "open", with the reason in `why`.
    needed: the members that every set which does must have, if outcomes are monotone; None where that was not asked.
    """

    direction: Direction
    changes: tuple[str, ...]
    unproven: tuple[str, ...]
    smallest: Literal["proven", "if_monotone", "open"]
    why: str
    needed: tuple[str, ...] | None


@dataclass(frozen=True)
class Search:
    """How far a search is. needed: the settings to test next, each of them in any case; empty when it is done.

    asked: every setting whose outcome it used, in the order in which it did. contrast: whether the two ends are good
    and bad; None while that is not known. answers: of the directions that are done.
    """

    needed: tuple[Setting, ...]
    asked: tuple[Setting, ...]
    contrast: bool | None
    answers: tuple[Answer, ...]
    contradictions: tuple[Contradiction, ...]


def search(
    changes: Sequence[str],
    known: Mapping[Setting, bool | None],
    directions: Collection[Direction] = DIRECTIONS,
) -> Search:
    """The search, as far as the known outcomes take it. changes: n different names, in the order of prefixes."""
    asked: dict[Setting, None] = {}
    ends = (frozenset[str](), frozenset(changes))
    asked.update(dict.fromkeys(ends))
    if missing := tuple(end for end in ends if end not in known):
        return Search(missing, tuple(asked), None, (), ())
    if known[ends[0]] is not False or known[ends[1]] is not True:
        return Search((), tuple(asked), False, (), ())
    contradictions = monotony.contradictions(known)
    needed: dict[Setting, None] = {}
    answers = []
    for direction in (each for each in DIRECTIONS if each in directions):
        try:
            answers.append(_Direction(direction, changes, known, asked, bool(contradictions)).answer())
        except _Needed as more:
            needed.update(dict.fromkeys(more.settings))
    return Search(tuple(needed), tuple(asked), True, tuple(answers), contradictions)


def ahead(
    changes: Sequence[str],
    known: Mapping[Setting, bool | None],
    directions: Collection[Direction],
    most: int,
) -> list[Setting]:
    """Up to `most` settings that a search needs next: those that it needs in any case, then those that it needs after
    one outcome or another of them, nearest first."""
    out: dict[Setting, None] = {}
    supposed = deque([dict(known)])
    for _ in range(4 * most):  # what is left may be less than was asked for, in however many orders
        if not supposed or len(out) >= most:
            break
        outcomes = supposed.popleft()
        found = search(changes, outcomes, directions)
        out.update(dict.fromkeys(found.needed))
        if found.needed:
            supposed += [{**outcomes, found.needed[0]: outcome} for outcome in (True, False)]
    return list(out)[:most]


class _Needed(Exception):
    """Outcomes are needed that are not known."""

    def __init__(self, settings: list[Setting]) -> None:
        super().__init__()
        self.settings = settings


class _Direction:
    """The search in one direction, in terms of what is toggled: changes made bad, or taken back."""

    def __init__(
        self,
        direction: Direction,
        changes: Sequence[str],
        known: Mapping[Setting, bool | None],
        asked: dict[Setting, None],
        contradicted: bool,
    ) -> None:
        self._direction: Direction = direction
        self._changes = changes
        self._all = frozenset(changes)
        # Prefixes of one order are, taken back, suffixes of the other: both directions test the same first settings.
        self._order = tuple(changes if direction == "break" else reversed(changes))
        self._known = known
        self._asked = asked
        self._own: set[Setting] = set()
        self._contradicted = contradicted

    # -- outcomes

    def does(self, toggled: Collection[str], dual: bool = False, infer: bool = False) -> bool | None:
        """Whether toggling these does what is looked for; None: it cannot be said."""
        return self.do([toggled], dual, infer)[0]

    def do(self, sets: Sequence[Collection[str]], dual: bool = False, infer: bool = False) -> list[bool | None]:
        """The same of several sets at once. dual: in the other direction, from the other end. infer: what follows from
        other outcomes, where they are monotone, need not be tested."""
        bad = (self._direction == "break") != dual
        settings = [frozenset(toggled) if bad else self._all - frozenset(toggled) for toggled in sets]
        outcomes = {each: monotony.implied(each, self._known) if infer else self._known.get(each) for each in settings}
        tested = [each for each in settings if not infer or outcomes[each] is None]
        self._asked.update(dict.fromkeys(tested))
        self._own.update(tested)
        if missing := [each for each in tested if each not in self._known]:
            raise _Needed(missing)
        return [None if (outcome := outcomes[each]) is None else outcome == bad for each in settings]

    # -- the search

    def answer(self) -> Answer:
        found, unproven = self._minimal(self._grown(self._order))
        why, needed = self._unasked(found, unproven), None
        if not why and len(found) > 1:
            found, unproven, why, needed = self._smallest(found)
        return Answer(
            direction=self._direction,
            changes=self._sorted(found),
            unproven=self._sorted(unproven),
            smallest="open" if why else "if_monotone" if len(found) > 1 else "proven",
            why=why,
            needed=None if needed is None else self._sorted(needed),
        )

    def _grown(self, order: Sequence[str], dual: bool = False) -> frozenset[str]:
        """A set within `order` that does, member by member; all of `order` is known to. A dual one is inferred, too."""
        fixed: list[str] = []
        rest = list(order)
        while rest and self.does(fixed, dual, infer=dual) is not True:
            low, high = self._flip(fixed, rest, dual)
            fixed += rest[low:high]
            rest = rest[:low]
        return frozenset(fixed)

    def _flip(self, fixed: Sequence[str], rest: Sequence[str], dual: bool) -> tuple[int, int]:
        """Lengths low < high of prefixes of `rest`: with the longer one it does, with the shorter one it is not known
        to. They differ by one, unless nothing can be said of all between."""
        low, high = 0, len(rest)
        silent: set[int] = set()
        while between := [length for length in range(low + 1, high) if length not in silent]:
            middle = (low + high) // 2
            length = min(between, key=lambda each: (abs(each - middle), each))
            outcome = self.does([*fixed, *rest[:length]], dual, infer=dual)
            if outcome is None:
                silent.add(length)
            elif outcome:
                high = length
            else:
                low = length
        return low, high

    def _minimal(self, found: frozenset[str]) -> tuple[frozenset[str], tuple[str, ...]]:
        """A part of `found` that does, while no set with one member less does; and of which members that is not known.

        Where outcomes are monotone and all can be told, it is `found` itself.
        """
        while True:
            members = self._sorted(found)
            outcomes = self.do([found - {member} for member in members])
            if True not in outcomes:
                return found, tuple(each for each, outcome in zip(members, outcomes, strict=True) if outcome is None)
            without = found - {members[outcomes.index(True)]}
            found = self._grown([change for change in self._order if change in without])

    def _unasked(self, found: frozenset[str], unproven: Collection[str]) -> str:
        """Why it is not asked whether a set is a smallest one; "": it is."""
        if unproven:
            return _UNTOLD
        return "outcomes are not monotone" if self._contradicted and len(found) > 1 else ""

    def _smallest(
        self, found: frozenset[str]
    ) -> tuple[frozenset[str], tuple[str, ...], str, frozenset[str]]:
        """A set that does, as small as `found` or smaller; its `unproven`; why it is not known to be a smallest one,
        else ""; the members that each set needs.

        A set that does must meet every set that does in the other direction. Where the fewest changes that meet those
        found so far do, they are a smallest set; where they do not, what is left gives another set to be met. It is
        given up after as many tests as were made before.
        """
        limit = 2 * len(self._own)
        members = self._sorted(found)
        outcomes = self.do([self._all - {member} for member in members], infer=True)
        needed = frozenset(each for each, outcome in zip(members, outcomes, strict=True) if outcome is False)
        to_meet = [frozenset({member}) for member in members if member in needed]
        while len(meeting := _fewest(to_meet, self._order)) < len(found):
            if len(self._own) >= limit:
                return found, (), "to know takes more tests than were made to find it", needed
            outcome = self.does(meeting, infer=True)
            if outcome is None:
                return found, (), "a set with fewer members cannot be told", needed
            if outcome:
                smaller, unproven = self._minimal(meeting)
                return smaller, unproven, _UNTOLD if unproven else "", needed
            to_meet.append(self._grown([change for change in self._order if change not in meeting], dual=True))
        return found, (), "", needed

    def _sorted(self, members: Collection[str]) -> tuple[str, ...]:
        return tuple(change for change in self._changes if change in members)


def _fewest(sets: Sequence[frozenset[str]], order: Sequence[str]) -> frozenset[str]:
    """The fewest changes that meet each of the sets; of several such, one whose members come first in `order`."""
    place = {change: index for index, change in enumerate(order)}
    best: list[frozenset[str]] = [frozenset().union(*sets)]

    def go(chosen: frozenset[str]) -> None:
        unmet = [each for each in sets if not each & chosen]
        if len(chosen) + _apart(unmet) >= len(best[0]):
            return
        if not unmet:
            best[0] = chosen
            return
        for member in sorted(min(unmet, key=len), key=place.__getitem__):
            go(chosen | {member})

    go(frozenset())
    return best[0]


def _apart(sets: Sequence[frozenset[str]]) -> int:
    """How many of the sets have no member in common: so many members are needed at least."""
    seen: frozenset[str] = frozenset()
    count = 0
    for each in sorted(sets, key=len):
        if not each & seen:
            seen |= each
            count += 1
    return count
