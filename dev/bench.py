"""make bench: speed and memory of the tools as ratios within one run, each met or not met.

Every ratio is a median over several turns in which the tool and what it is held against run one after the other. The
files are synthetic and lie in a temporary directory ($TMPDIR; some 3 GB).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]  # the tests' fixtures make the scored attempts

import bench_compare  # noqa: E402
import bench_engine  # noqa: E402
import bench_hook  # noqa: E402
import bench_plan  # noqa: E402
import bench_report  # noqa: E402
import bench_score  # noqa: E402
import bench_seal  # noqa: E402
from bench_timing import Result  # noqa: E402

MODEL = HERE.parent / "models/smollm2-135m-instruct"


def main() -> int:
    """Print the table; 1 when something is not met."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="xd-bench-") as name:
        place = Path(name)
        say("planning")
        results.append(bench_plan.measure(place))
        say(f"comparing {bench_compare.TOKENS // 10**6} M tokens")
        large = bench_compare.attempt(place, bench_compare.TOKENS)
        results += bench_compare.measure(place, large)
        say("sealing")
        results.append(bench_seal.measure(large))
        say("writing a trainer's step")
        results.append(bench_hook.beside_writing(place))
        say("reporting")
        results.append(bench_report.measure(place))
        say("scoring")  # last: it loads torch here, and what this process held counts towards its children's peak
        results += bench_score.measure(place)
    say("teacher forcing")
    throughput, _ = bench_engine.measure(MODEL)  # what reading back costs is asked of an 8B model on a GPU
    results.append(throughput)
    for line in table(results):
        print(line)
    return 1 if any(result.failed for result in results) else 0


def table(results: list[Result]) -> list[str]:
    """The results as aligned text."""
    width = max(len(result.what) for result in results)
    head = f"{'':{width}}  ratio  limit           median times"
    return [head] + [
        f"{r.what:{width}}  {'' if r.ratio is None else f'{r.ratio:.2f}':>5}  {r.limit:5.2f}  {r.verdict:7}  {r.detail}"
        for r in results
    ]


def say(what: str) -> None:
    print(f"bench: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
