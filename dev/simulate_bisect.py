"""How many tests a bisection takes, on simulated outcomes: the figures of docs/bisect.md.

    python -P dev/simulate_bisect.py [DRAWS]

First the most tests of one direction, n = 100, where k changes break a setting only together; then both directions over
random monotone functions of ten changes, with brute force over whether a set is a smallest one.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from itertools import combinations

from libxd import bisect
from libxd.bisect import Search, Setting


def searched(names: list[str], bad: Callable[[Setting], bool], directions: tuple[str, ...]) -> tuple[Search, int]:
    """The search to its end, and how many tests it took."""
    known: dict[Setting, bool | None] = {}
    while (found := bisect.search(names, known, directions)).needed:
        known |= {setting: bad(setting) for setting in found.needed}
    return found, len(known)


def together(n: int, k: int, draws: int) -> int:
    """The most tests of `draws` sets of k changes that break it together."""
    names = [f"{i:03}" for i in range(n)]
    most = 0
    for seed in range(draws):
        culprits = frozenset(random.Random(f"{k} {seed}").sample(names, k))
        found, tests = searched(names, lambda bad, culprits=culprits: culprits <= bad, ("break",))
        assert set(found.answers[0].changes) == culprits
        most = max(most, tests)
    return most


def monotone(n: int, draws: int) -> tuple[list[int], Counter[str]]:
    """Tests of each draw, and what was claimed of the answers: "smallest", "open" for ones that are and are not."""
    names = [f"{i:03}" for i in range(n)]
    whole = frozenset(names)
    tests, claims = [], Counter()
    for seed in range(draws):
        draw = random.Random(seed)
        terms = [frozenset(draw.sample(names, draw.randint(1, 4))) for _ in range(draw.randint(1, 4))]

        def bad(setting: Setting, terms: list[frozenset[str]] = terms) -> bool:
            return any(term <= setting for term in terms)

        found, taken = searched(names, bad, bisect.DIRECTIONS)
        tests.append(taken)
        for answer in found.answers:
            breaks = answer.direction == "break"
            sizes = (k for k in range(n + 1) for each in combinations(names, k)
                     if (bad(frozenset(each)) if breaks else not bad(whole - frozenset(each))))  # fmt: skip
            least = len(answer.changes) == next(sizes)
            assert least or answer.smallest == "open"
            claims["open, and is one" if answer.smallest == "open" and least else
                   "open, and is none" if answer.smallest == "open" else "said to be one, and is"] += 1  # fmt: skip
    return tests, claims


def main(draws: int = 3000) -> None:
    """Print both."""
    for k in range(1, 9):
        bound = 2 + k * (math.ceil(math.log2(100)) + 3)
        print(f"n = 100, k = {k}: {together(100, k, draws // 50)} tests at most (2 + k (ceil(log2 n) + 3) = {bound})")
    tests, claims = monotone(10, draws)
    average = sum(tests) / draws
    print(f"n = 10, {draws} monotone functions: {average:.1f} tests on average, {max(tests)} at most, of 1024 subsets")
    print("a smallest set: " + ", ".join(f"{claim}: {count}" for claim, count in sorted(claims.items())))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
