"""A bisection as text of at most 120 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from libxd.bisect import Answer
from libxd.bisection import Bisection
from libxd.plain import Footnotes, number, plain, value, wrapped
from libxd.trial import Trial

_FIGURES = {
    "verdict": "the largest |training - rollout|",
    "max": "the largest |training - rollout|",
    "mean": "the mean |training - rollout|",
    "p99": "the 99th percentile of |training - rollout|",
    "count": "the number of mismatches",
}
_DOES = {"break": ("Breaking the good setting", "makes it bad", "make it bad"),
         "repair": ("Repairing the bad setting", "makes it good", "make it good")}  # fmt: skip
Style = Callable[[str, str], str]


def lines(found: Bisection, style: Style = lambda text, what: text) -> list[str]:
    """The knobs, the tests, the answers. style(text, what) may colour an outcome."""
    notes = Footnotes()
    out = [*wrapped(_title(found)), "", *_knobs(found), "", *_tests(found, notes, style), "", *wrapped(_noise(found))]
    for answer in found.search.answers if found.search else ():
        out += ["", *_answer(found, answer)]
    out += _rest(found)
    return [line.rstrip() for line in (*out, *notes.lines())]


def _title(found: Bisection) -> str:
    count = len(found.changes)
    between = "1 knob differs" if count == 1 else f"{count} knobs differ"
    unit = "" if found.question.by == "count" else " nats"
    verdict = " (a MISMATCH by the contract)" if found.question.by == "verdict" else ""
    bad = f"{_FIGURES[found.question.by]} is above {found.limit:.6g}{unit}{verdict}"
    return f"{found.far['experiment_id']}: {between} between the two ends. Bad: {bad}."


def _knobs(found: Bisection) -> Iterator[str]:
    """A line a knob, numbered as the columns of the tests are."""
    if found.bad_end is None:
        heads = ("baseline", "other end")
        values = [(found.far["baseline"][each["path"]], each["value"]) for each in found.far["intervention"]]
    else:
        heads = tuple(f"{name} ({end})" for name, end in zip(("good", "bad"), _ends(found), strict=True))
        values = [(found.value(path, False), found.value(path, True)) for path in found.changes]
    rows = [("", "knob", *heads)]
    rows += [
        (str(place), path, *map(value, pair))
        for place, (path, pair) in enumerate(zip(found.changes, values, strict=True), 1)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        words = (cell.ljust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join((row[0].rjust(widths[0]), *words))


def _ends(found: Bisection) -> tuple[str, str]:
    return ("baseline", "other end") if found.bad_end == "other" else ("other end", "baseline")


def _tests(found: Bisection, notes: Footnotes, style: Style) -> Iterator[str]:
    """A line a case: x where a knob is at its bad value, . where it is at its good one."""
    numbers = [str(place) for place in range(1, len(found.changes) + 1)]
    figure = "max" if found.question.by == "verdict" else found.question.by
    head = (*numbers, "outcome", figure, "spread", "attempt")
    body = [
        (*_marks(found, each), _outcome(each, notes), number(each.mean), number(each.spread), _attempts(each))
        for each in found.tests
    ]
    widths = [max(len(row[column]) for row in (head, *body)) for column in range(len(head))]
    knobs = len(numbers)

    def line(cells: tuple[str, ...], what: str = "") -> str:
        padded = [
            cell.ljust(width) if column in (knobs, knobs + 3) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        padded[knobs] = style(padded[knobs], what)
        return "  ".join((" ".join(padded[:knobs]), *padded[knobs:]))

    yield line(head).rstrip()
    yield "-" * (sum(widths) + knobs - 1 + 2 * 4)
    for trial, cells in zip(found.tests, body, strict=True):
        yield line(cells, trial.state).rstrip()


def _marks(found: Bisection, trial: Trial) -> Iterator[str]:
    bad = found.bad(trial.changed) if found.bad_end else frozenset(trial.changed)
    return ("x" if path in bad else "." for path in found.changes)


def _outcome(trial: Trial, notes: Footnotes) -> str:
    return trial.state + notes.mark(plain(trial.reason))


def _attempts(trial: Trial) -> str:
    """Case and attempts: enough to find them under the run directory."""
    names = [each.attempt.attempt_id for each in trial.measurements if each.attempt]
    return f"{trial.row['case_id']}/{','.join(names)}" if names else trial.row["case_id"]


def _noise(found: Bisection) -> str:
    if found.bad_end is None:
        return "x: changed against the baseline."
    marks = "x: at its bad value."
    if found.noise is None:
        return f"{marks} Noise floor: not measured (no repeat of both ends; --repeats 1)."
    return f"{marks} Noise floor at the limit, from repeats of both ends: {number(found.noise)}."


def _answer(found: Bisection, answer: Answer) -> Iterator[str]:
    what, does, do = _DOES[answer.direction]
    count = len(answer.changes)
    said = f"1 knob {does}" if count == 1 else f"{count} knobs together {do}"
    yield f"{what}: {said}."
    breaks = answer.direction == "break"
    for path in answer.changes:
        yield f"  {path}: {value(found.value(path, not breaks))} -> {value(found.value(path, breaks))}"
    yield from wrapped(" ".join(_proof(found, answer)), "  ")


def _proof(found: Bisection, answer: Answer) -> Iterator[str]:
    """What is known of the set: that it is minimal, that it is a smallest one, and which others as small were seen."""
    count = len(answer.changes)
    if answer.unproven:
        yield f"Whether it would do without {', '.join(answer.unproven)} could not be told."
    elif count > 1:
        yield "Without any one of them the others do not (tested)."
    if answer.smallest == "proven":
        yield "It does so alone."
    elif answer.smallest == "open":
        yield f"Whether it is a smallest set is open: {answer.why}."
    else:
        whole = answer.needed is not None and len(answer.needed) == count
        least = "Every set that does has all of them" if whole else f"No set of fewer than {count} does"
        yield f"{least}, if outcomes are monotone; no test says otherwise."
    if others := list(_others(found, answer)):
        yield f"So {'does' if len(others) == 1 else 'do'} {'; '.join(others)} (tested; not all were)."


def _others(found: Bisection, answer: Answer) -> Iterator[str]:
    """Other sets of as many knobs that were seen to do the same."""
    breaks = answer.direction == "break"
    for trial in found.tests:
        bad = found.bad(trial.changed)
        toggled = [path for path in found.changes if (path in bad) == breaks]
        if trial.outcome is breaks and len(toggled) == len(answer.changes) and set(toggled) != set(answer.changes):
            yield " with ".join(toggled)


def _rest(found: Bisection) -> Iterator[str]:
    if found.search and found.search.contradictions:
        yield ""
        yield "Not monotone: more bad values made it good again."
        for pair in found.search.contradictions:
            more = ", ".join(path for path in found.changes if path in pair.good - pair.bad)
            beside = ", ".join(path for path in found.changes if path in pair.bad) or "nothing"
            yield from wrapped(f"with {beside} bad it is bad; with {more} bad, too, it is good", "  ", "    ")
    if found.state == "searching":
        yield from ("", f"Not done: {len(found.rows)} more to score (--next prints them).")
    elif found.state != "done":
        name = {"stopped": "Stopped", "no_contrast": "Nothing to search"}[found.state]
        yield from ("", *wrapped(f"{name}: {found.why}."))
