"""A bisection between two settings of the knobs, from sealed attempts: what they say so far, and the next rows.

The two ends are one plan (strategy "bisect"): the baseline, and the case that changes all that is declared. Which of
them is bad, the question decides, by the ends' own figures. `bisect` holds the search; here its tests are attempts,
taken as `resume` takes them, and the next ones are plan rows. There is no state but the run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from libxd import bisect, planner
from libxd.bisect import Direction, Search, Setting
from libxd.config import MAX_CASES
from libxd.errors import XdError
from libxd.resume import Outcome
from libxd.rundir import SEAL, SIDES, Attempt
from libxd.trial import Measurement, Question, Trial, decide, noise_floor

SCHEMA_VERSION = "xd.bisection.v1"
#: the attempt that a row has, if it has one
Look = Callable[[dict[str, Any]], Outcome]


@dataclass
class Bisection:
    """How far it is. rows: those to be scored next; none when it is done, or was stopped.

    bad_end: "baseline" or "other"; None while it is not known, or where not just one end is bad (`why` says so). noise:
    by how much the figure may move at the limit; None where no end was repeated.
    """

    far: dict[str, Any]
    question: Question
    directions: tuple[Direction, ...]
    limit: float
    bad_end: Literal["baseline", "other"] | None = None
    noise: float | None = None
    tests: list[Trial] = field(default_factory=list)
    search: Search | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""

    @property
    def changes(self) -> tuple[str, ...]:
        """The knobs that differ, in the plan's order."""
        return tuple(change["path"] for change in self.far["intervention"])

    @property
    def state(self) -> Literal["searching", "done", "no_contrast", "stopped"]:
        if self.rows:
            return "searching"
        if self.search is None or not self.search.contrast:
            return "no_contrast"
        return "stopped" if self.why else "done"

    @property
    def found(self) -> bool:
        """Whether every direction has its set."""
        return self.state == "done"

    def changed(self, bad: Setting) -> tuple[str, ...]:
        """What a setting changes against the baseline."""
        return tuple(path for path in self.changes if (path in bad) == (self.bad_end == "other"))

    def bad(self, changed: Collection[str]) -> Setting:
        """The knobs at their bad value where these are changed."""
        return frozenset(path for path in self.changes if (path in changed) == (self.bad_end == "other"))

    def value(self, path: str, bad: bool) -> Any:
        """The bad or the good value of a knob."""
        other = next(change["value"] for change in self.far["intervention"] if change["path"] == path)
        return other if bad == (self.bad_end == "other") else self.far["baseline"][path]

    def as_json(self) -> dict[str, Any]:
        """The line of `xd-bisect --json`."""
        search = self.search
        return {
            "schema_version": SCHEMA_VERSION,
            "experiment_id": self.far["experiment_id"],
            "by": self.question.by,
            "above": self.limit,
            "changes": [
                {"path": change["path"], "baseline": self.far["baseline"][change["path"]], "other": change["value"]}
                for change in self.far["intervention"]
            ],
            "bad_end": self.bad_end,
            "noise": self.noise,
            "state": self.state,
            "why": self.why,
            "answers": [self._answer(answer) for answer in search.answers] if search else [],
            "contradictions": [
                {"bad": list(self.changed(pair.bad)), "good": list(self.changed(pair.good))}
                for pair in (search.contradictions if search else ())
            ],
            "tests": [each.as_json() for each in self.tests],
            "next": [row["case_id"] for row in self.rows],
        }

    def _answer(self, answer: bisect.Answer) -> dict[str, Any]:
        breaks = answer.direction == "break"
        return {
            "direction": answer.direction,
            "changes": [
                {"path": path, "from": self.value(path, not breaks), "to": self.value(path, breaks)}
                for path in answer.changes
            ],
            "unproven": list(answer.unproven),
            "smallest": answer.smallest,
            "why": answer.why,
            "needed": None if answer.needed is None else list(answer.needed),
        }


def far_end(rows: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The row that makes all changes. rows: a plan's, with their places. XdError 65 unless it is one bisection's."""
    given = list(rows)
    for where, row in given:
        if row["strategy"] != "bisect":
            raise XdError("is no row of a bisection", code="no-bisection", where=where, path="/strategy",
                          found=row["strategy"], expected="bisect",
                          hint="plan its two ends: strategy bisect, or xd-plan --toward")  # fmt: skip
    if not given:
        raise XdError("no plan rows, no bisection", code="no-rows", hint="give the plan of a bisection")
    far = max((row for _, row in given), key=lambda row: len(row["intervention"]))
    for where, row in given:
        paths = [change["path"] for change in row["intervention"]]
        wanted = planner.subset(far, paths, row["repeat"])["request_digest"]
        if row["submission"] == "canonical" and row["request_digest"] != wanted:
            raise XdError("the rows are not those of one bisection", code="other-bisection", where=where,
                          path="/request_digest", found=row["request_digest"], expected=wanted,
                          hint="give the rows of one plan")  # fmt: skip
    if not far["intervention"]:
        raise XdError("the row of the other end is missing", code="one-end", where=given[0][0],
                      hint="give the whole plan")  # fmt: skip
    return far


def examine(
    far: dict[str, Any],
    question: Question,
    look: Look,
    directions: Collection[Direction] = bisect.DIRECTIONS,
    repeats: int = 0,
    most: int | None = None,
) -> Bisection:
    """The bisection between the baseline and `far`, as far as attempts answer it.

    look: finds a row's attempt. repeats: how many times more the ends are scored, and a test that its figure leaves
    undecided. most: how many rows are wanted next, ones among them that are needed only after some outcomes; None:
    those that are needed in any case.
    """
    chosen = tuple(each for each in bisect.DIRECTIONS if each in directions)
    state = Bisection(far, question, chosen, question.limit(far))
    bench = _Bench(far, question, look)
    state.tests = ends = [bench.test((), range(repeats + 1)), bench.test(state.changes, range(repeats + 1))]
    if pending := [row for end in ends for row in end.pending]:
        state.rows = pending[:most]
        return state
    for end in ends:
        decide(end, state.limit, None)
    outcomes = [end.outcome for end in ends]
    if outcomes not in ([False, True], [True, False]):
        state.why = _no_contrast(ends)
        return state
    state.bad_end = "other" if outcomes[1] else "baseline"
    good, bad = ends if outcomes[1] else reversed(ends)
    state.noise = noise_floor(good, bad, state.limit)
    known: dict[Setting, bool | None] = {frozenset(): False, frozenset(state.changes): True}
    while True:
        state.search = bisect.search(state.changes, known, chosen)
        wanted = [setting for setting in state.search.needed if setting not in known]
        tests = {each.changed: each for each in state.tests}
        state.rows = []
        for setting in wanted:
            changed = state.changed(setting)
            if changed not in tests and len(state.tests) >= MAX_CASES:
                state.why = f"{MAX_CASES} cases were tested, which is the most of one plan"
                continue
            test = tests.get(changed) or bench.decided(changed, state.limit, state.noise, repeats)
            if changed not in tests:
                state.tests.append(test)
            if test.pending:
                state.rows += test.pending
            else:
                known[setting] = test.outcome
        if not any(setting in known for setting in wanted):
            break
    if most is not None and state.rows:
        for setting in bisect.ahead(state.changes, known, chosen, most):
            state.rows += [row for row in bench.test(state.changed(setting), range(1)).pending if row not in state.rows]
        state.rows = state.rows[:most]
    return state


class _Bench:
    """Makes rows of what is changed, and looks up what came of them."""

    def __init__(self, far: dict[str, Any], question: Question, look: Look) -> None:
        self._far, self._question, self._look = far, question, look
        self._first: Attempt | None = None

    def test(self, changed: tuple[str, ...], repeats: Iterable[int]) -> Trial:
        return Trial(changed, list(self._measured(changed, repeats)))

    def decided(self, changed: tuple[str, ...], limit: float, noise: float | None, repeats: int) -> Trial:
        """A test with its outcome; repeated, where one figure leaves it undecided."""
        test = self.test(changed, range(1))
        decide(test, limit, noise)
        if test.state == "undecided" and repeats:
            test.measurements += self._measured(changed, range(1, repeats + 1))
            decide(test, limit, noise)
        return test

    def _measured(self, changed: tuple[str, ...], repeats: Iterable[int]) -> Iterator[Measurement]:
        for repeat in repeats:
            row = planner.subset(self._far, changed, repeat)
            yield self._measurement(row, self._look(row))

    def _measurement(self, row: dict[str, Any], found: Outcome) -> Measurement:
        attempt = found.attempt
        if found.state == "refused" and attempt and (refusal := attempt.refusal()):
            return Measurement(row, attempt, reason=refusal.text())
        if attempt and attempt.has(SEAL):
            comparison = attempt.comparison()
            if found.state == "pending":  # sealed, and no answer: scored again, it would hardly come out otherwise
                return Measurement(row, attempt, reason=comparison["status"])
            if other := self._other_conditions(attempt):
                return Measurement(row, attempt, reason=other)
            figure = self._question.figure(comparison)
            return Measurement(row, attempt, figure, "" if figure is not None else comparison["status"])
        return Measurement(row)

    def _other_conditions(self, attempt: Attempt) -> str:
        """How it was scored otherwise than the first attempt; "": it was not. Those of one policy never are."""
        from libxd import effect

        self._first = self._first or attempt
        plans = [each.materialized() for each in (attempt, self._first)]
        found = (effect.difference_of_conditions(*plans, side) for side in SIDES)
        return "; ".join(f"{side}: {how}" for side, how in zip(SIDES, found, strict=True) if how)


def _no_contrast(ends: list[Trial]) -> str:
    names = ("the baseline", "the other end")
    unclear = [f"{name} cannot be told: {end.reason}" for name, end in zip(names, ends, strict=True) if end.reason]
    return "; ".join(unclear) or f"both ends are {ends[0].state}"
