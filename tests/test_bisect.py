"""The search of a bisection against simulated outcomes: what it finds and claims, and how many tests that takes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libxd import bisect
from libxd.bisect import Answer, Search, Setting

Oracle = Callable[[Setting], bool | None]
BREAK, REPAIR = bisect.DIRECTIONS


def names(n: int) -> list[str]:
    return [f"knob-{i:02}" for i in range(n)]


def searched(n: int, oracle: Oracle, *directions: str, ahead: int = 0) -> tuple[Search, dict[Setting, bool | None]]:
    """The search to its end, and all that was tested for it. ahead: so many tests a round, needed or not."""
    known: dict[Setting, bool | None] = {}
    while True:
        found = bisect.search(names(n), known, directions or bisect.DIRECTIONS)
        if not found.needed:
            return found, known
        assert not set(found.needed) & set(known)
        wanted = bisect.ahead(names(n), known, directions or bisect.DIRECTIONS, ahead) if ahead else found.needed
        assert set(wanted) >= set(found.needed[: len(wanted)])
        known |= {setting: oracle(setting) for setting in wanted}


def answers(found: Search) -> dict[str, Answer]:
    return {answer.direction: answer for answer in found.answers}


def together(*culprits: int) -> Oracle:
    wanted = {names(100)[i] for i in culprits}
    return lambda bad: wanted <= bad


def any_of(*culprits: int) -> Oracle:
    wanted = {names(100)[i] for i in culprits}
    return lambda bad: bool(wanted & bad)


# -- how many tests, n = 100


def bound(n: int, k: int) -> int:
    """Both ends; a halving and a look a member; without each member; all but each member."""
    return 2 + k * (math.ceil(math.log2(n)) + 1) + (2 * k if k > 1 else 0)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize(("direction", "oracle"), [(BREAK, together), (REPAIR, any_of)])
def test_k_culprits_of_a_hundred_take_k_log_n_tests(k, direction, oracle):
    """Breaking, where all k must be bad; repairing, where each of them alone keeps it bad."""
    for seed in range(8 // k + 1):
        culprits = sorted(random.Random(seed).sample(range(100), k))
        found, known = searched(100, oracle(*culprits), direction)
        (answer,) = found.answers
        assert answer.changes == tuple(names(100)[i] for i in culprits)
        assert (answer.unproven, answer.smallest) == ((), "proven" if k == 1 else "if_monotone")
        assert answer.needed == (None if k == 1 else answer.changes)
        assert len(known) <= bound(100, k)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_both_directions_share_their_tests(k):
    culprits = random.Random(k).sample(range(100), k)
    found, known = searched(100, any_of(*culprits))
    assert len(answers(found)[BREAK].changes) == 1
    assert len(answers(found)[REPAIR].changes) == k
    assert len(known) <= bound(100, k) + bound(100, 1)


def test_one_at_a_time_would_take_more_and_may_show_nothing():
    """The control of the bounds above: of two knobs that only together break it, no single one shows a thing."""
    oracle = together(17, 60)
    assert not any(oracle(frozenset({name})) for name in names(100))
    found, known = searched(100, oracle, BREAK)
    assert answers(found)[BREAK].changes == ("knob-17", "knob-60")
    assert len(known) <= bound(100, 2) < 100


# -- what is found


def test_repairing_needs_both_where_breaking_needs_one():
    """The ablation: any one of two brings the difference back, so only both repaired take it away."""
    found, _ = searched(10, any_of(2, 7))
    both = answers(found)
    assert both[BREAK].changes in (("knob-02",), ("knob-07",))
    assert (both[REPAIR].changes, both[REPAIR].needed) == (("knob-02", "knob-07"), ("knob-02", "knob-07"))
    assert (both[BREAK].smallest, both[REPAIR].smallest) == ("proven", "if_monotone")


def test_a_smaller_set_than_the_first_one_is_found():
    """{8, 9} or {3}: by prefixes repairing meets 8 and 9 first."""

    def oracle(bad: Setting) -> bool:
        good = set(names(10)) - bad
        return not ({"knob-08", "knob-09"} <= good or {"knob-03"} <= good or {"knob-01", "knob-02"} <= good)

    found, _ = searched(10, oracle, REPAIR)
    assert (found.answers[0].changes, found.answers[0].smallest) == (("knob-03",), "proven")


def test_of_one_knob_it_is_that_one():
    found, known = searched(1, any_of(0))
    assert [answer.changes for answer in found.answers] == [("knob-00",), ("knob-00",)]
    assert len(known) == 2


@pytest.mark.parametrize("same", [True, False, None])
def test_without_a_contrast_nothing_is_searched(same):
    found, known = searched(10, lambda bad: same)
    assert (found.contrast, found.answers, len(known)) == (False, (), 2)
    turned, _ = searched(10, lambda bad: not bad)  # the good end bad, the bad one good
    assert turned.contrast is False


def subsets(members: list[str]) -> list[Setting]:
    return [frozenset(each) for each in chain.from_iterable(combinations(members, k) for k in range(len(members) + 1))]


def fewest(n: int, does: Callable[[Setting], bool]) -> int:
    return min(len(each) for each in subsets(names(n)) if does(each))


terms = st.lists(st.frozensets(st.sampled_from(names(7)), min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(terms)
def test_of_any_monotone_outcomes_claims_are_true(wanted):
    """Bad where all of one of the terms is: every monotone function is such a one."""

    def oracle(bad: Setting) -> bool:
        return any(term <= bad for term in wanted)

    found, _ = searched(7, oracle)
    assert found.contrast and not found.contradictions
    whole = frozenset(names(7))
    for answer in found.answers:
        does = oracle if answer.direction == BREAK else lambda back: not oracle(whole - back)
        chosen = frozenset(answer.changes)
        assert does(chosen) and not any(does(chosen - {member}) for member in chosen)
        assert answer.unproven == ()
        if answer.smallest != "open":
            assert len(chosen) == fewest(7, does)
        for member in answer.needed or ():
            assert not does(whole - {member})


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.frozensets(st.sampled_from(names(5))), st.sampled_from([True, False, None])))
def test_of_any_outcomes_at_all_it_ends_and_says_what_was_tested(table):
    """Not monotone, and untold in places."""
    table |= {frozenset(): False, frozenset(names(5)): True}
    found, known = searched(5, lambda bad: table.get(bad, False))
    assert found.contrast and {answer.direction for answer in found.answers} == set(bisect.DIRECTIONS)
    whole = frozenset(names(5))
    for answer in found.answers:
        chosen = frozenset(answer.changes)
        outcomes = {each: known.get(each if answer.direction == BREAK else whole - each) for each in subsets(names(5))}
        did = answer.direction == BREAK
        assert outcomes[chosen] is did
        for member in chosen:
            assert outcomes[chosen - {member}] is (None if member in answer.unproven else not did)
    for pair in found.contradictions:
        assert pair.bad < pair.good and known[pair.bad] is True and known[pair.good] is False


@settings(max_examples=60, deadline=None)
@given(terms, st.integers(1, 9))
def test_tests_made_ahead_change_no_answer(wanted, width):
    def oracle(bad: Setting) -> bool:
        return any(term <= bad for term in wanted)

    one, few = searched(7, oracle)
    other, more = searched(7, oracle, ahead=width)
    assert [answer.changes for answer in one.answers] == [answer.changes for answer in other.answers]
    assert len(more) <= 2**7 and len(few) <= 2**7


def test_tests_ahead_are_those_that_may_be_needed():
    known = {frozenset(): False, frozenset(names(8)): True}
    wanted = bisect.ahead(names(8), known, (BREAK,), 3)
    assert [len(setting) for setting in wanted] == [4, 2, 6]
    assert bisect.ahead(names(8), known, (BREAK,), 1) == wanted[:1]
    found, known = searched(8, any_of(3), BREAK)
    assert bisect.ahead(names(8), known, (BREAK,), 5) == [] and found.answers


def test_the_same_outcomes_give_the_same_search():
    _, known = searched(10, any_of(2, 7))
    partial = dict(list(known.items())[:6])
    again = dict(reversed(partial.items()))
    assert bisect.search(names(10), partial) == bisect.search(names(10), again)
    assert bisect.search(names(10), partial) != bisect.search(names(10), known)


# -- what is not monotone, and what cannot be told


def test_what_is_not_monotone_is_found_out_and_said():
    """5 breaks it, 3 on top hides that, 9 beside both does not let it. Prefixes meet 9, then 5."""

    def oracle(bad: Setting) -> bool:
        return "knob-05" in bad and ("knob-03" not in bad or "knob-09" in bad)

    found, _ = searched(10, oracle)
    assert found.contradictions
    for pair in found.contradictions:
        assert pair.bad < pair.good and oracle(pair.bad) and not oracle(pair.good)
    assert answers(found)[BREAK].changes == ("knob-05",)  # taken out of {5, 9}, by measurement
    calm, _ = searched(10, any_of(5))
    assert calm.contradictions == ()


def test_what_is_not_monotone_is_no_smallest_set_of_several():
    """4 and 5 together break it, unless 0 is bad, too, and not 9: a pair, of which no more is claimed."""

    def oracle(bad: Setting) -> bool:
        return {"knob-04", "knob-05"} <= bad and ("knob-00" not in bad or "knob-09" in bad)

    found, _ = searched(10, oracle, BREAK)
    (answer,) = found.answers
    assert (answer.changes, answer.unproven) == (("knob-04", "knob-05"), ())
    assert (answer.smallest, answer.why, answer.needed) == ("open", "outcomes are not monotone", None)


def test_growing_alone_does_not_make_a_set_minimal(monkeypatch):
    """The control: without taking it apart, what is not monotone leaves members that nobody needs."""

    def spoilt() -> int:
        count = 0
        for seed in range(40):
            draw = random.Random(seed)
            table = {each: draw.random() < 0.5 for each in subsets(names(5))}
            table |= {frozenset(): False, frozenset(names(5)): True}
            found, _ = searched(5, table.__getitem__, BREAK)
            chosen = frozenset(found.answers[0].changes)
            count += any(table[chosen - {member}] for member in chosen)
        return count

    assert spoilt() == 0
    monkeypatch.setattr(bisect._Direction, "_minimal", lambda self, found: (found, ()))
    assert spoilt() > 0


def test_settings_of_which_nothing_can_be_said_are_gone_round():
    """Of the first half nothing can be told: the tests beside it do as well."""
    half = frozenset(names(10)[:5])
    found, _ = searched(10, lambda bad: None if bad == half else "knob-06" in bad, BREAK)
    assert (found.answers[0].changes, found.answers[0].unproven) == (("knob-06",), ())


def test_members_that_could_not_be_told_apart_are_named():
    """4 and 5 are refused one without the other."""

    def oracle(bad: Setting) -> bool | None:
        one, other = "knob-04" in bad, "knob-05" in bad
        return one if one == other else None

    found, _ = searched(10, oracle, BREAK)
    (answer,) = found.answers
    assert (answer.changes, answer.unproven) == (("knob-04", "knob-05"), ("knob-04", "knob-05"))
    assert answer.smallest == "open" and "cannot be told" in answer.why


@pytest.mark.parametrize("k", [1, 2, 4])
def test_of_a_hundred_one_setting_in_ten_undecided_costs_few_tests_more(k):
    """As noise leaves them: the culprits are found, and what else stays in the set is named as unproven."""
    silent = 0
    for seed in range(6):
        culprits = {names(100)[i] for i in random.Random(seed).sample(range(100), k)}

        def oracle(bad: Setting, seed: int = seed, culprits: set[str] = culprits) -> bool | None:
            undecided = 0 < len(bad) < 100 and random.Random(f"{seed} {sorted(bad)}").random() < 0.1
            return None if undecided else culprits <= bad

        found, known = searched(100, oracle, BREAK)
        (answer,) = found.answers
        assert culprits <= set(answer.changes) <= culprits | set(answer.unproven)
        assert found.contradictions == ()
        assert len(known) <= 1.5 * bound(100, k) + 10
        silent += list(known.values()).count(None)
    assert silent


@pytest.mark.parametrize("hider", [2, 50, 97])
def test_of_a_hundred_a_knob_that_hides_another_is_no_obstacle(hider):
    """40 breaks it, but not beside the hider, unless 99 is bad, too: what is found is minimal all the same."""

    def oracle(bad: Setting) -> bool:
        return "knob-40" in bad and (f"knob-{hider:02}" not in bad or "knob-99" in bad)

    found, known = searched(100, oracle, BREAK)
    assert found.answers[0].changes == ("knob-40",)
    assert bool(found.contradictions) == (hider < 40)  # else no prefix that was tested has both
    assert len(known) <= bound(100, 2)


def test_nothing_but_the_ends_can_be_told():
    ends = (frozenset(), frozenset(names(6)))
    found, known = searched(6, lambda bad: bool(bad) if bad in ends else None)
    assert [answer.changes for answer in found.answers] == [tuple(names(6))] * 2
    assert [answer.unproven for answer in found.answers] == [tuple(names(6))] * 2
    assert len(known) < 2**6
