"""xd-report of a run against judging its attempts once more, which reads the same tokens.

Run as a program with a directory it makes the run there and prints its path.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench_timing import ROOT, Result, output, ratio, run, tool

CASES, TOKENS, LIMIT, TURNS = 8, 1_000_000, 10.0, 5


def measure(place: Path) -> Result:
    """A page of all cases, effects, causes and impacts among it."""
    made = Path(output([sys.executable, __file__, str(place / "report"), str(CASES), str(TOKENS)]).decode().strip())
    attempts = sorted(made.glob("cases/*/*"))
    page = place / "report.html"

    def ours() -> float:
        page.unlink(missing_ok=True)
        return run(tool("xd-report", "-q", "--out", page, made))[0]

    found, ours_s, theirs_s = ratio(TURNS, ours, lambda: run(tool("xd-compare", "-q", *attempts))[0])
    detail = f"{ours_s:.2f} s, {page.stat().st_size / 1e6:.1f} MB; judging them {theirs_s:.2f} s"
    return Result(f"xd-report of {CASES} cases of {TOKENS / 1e6:g} M tokens", found, LIMIT, detail)


if __name__ == "__main__":
    sys.path.append(str(ROOT / "tests"))
    import report_size

    print(report_size.make(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
