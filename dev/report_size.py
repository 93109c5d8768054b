"""How large a report of many long cases is, how long it takes, and how soon a browser shows it; docs/report.md's table.

    python -P dev/report_size.py --cases 256 --tokens 1000000 DIR

Makes attempts of drawn logprobs under DIR (some 29 bytes a token and case), or takes those that it made before, and
prints a row. The browser's part is left out where playwright or Chromium (--chromium) is not.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from comparison_fixtures import scored  # noqa: E402

from libxd import comparison, seal  # noqa: E402

_LENGTH = 1000  # tokens a sequence, the last three quarters of which are active


def make(directory: Path, cases: int, tokens: int) -> Path:
    """Sealed attempts: a baseline, a repeat, and as many batch sizes as it takes, after those that are there."""
    lengths = (_LENGTH,) * (tokens // _LENGTH)
    active = np.tile(np.arange(_LENGTH) >= _LENGTH // 4, len(lengths))
    draw = np.random.default_rng(0)
    rollout = -draw.exponential(1.5, active.size).astype(np.float32)
    done = len(list(directory.glob("test/cases/*/*/COMPLETE")))
    for number in range(done, cases):
        noise = np.float32(0.02) * np.random.default_rng(number).standard_t(4, active.size).astype(np.float32)
        given = {"change": ("batch.size", number + 10)} if number > 1 else {"repeat": number}
        attempt = scored(directory, rollout, rollout + noise, active=active, lengths=lengths, **given)
        comparison.compare(attempt)
        seal.seal(attempt)
    return directory / "test"


def opened(page: Path, chromium: str) -> str:
    """Seconds until a headless Chromium has loaded and painted the page; "-" where there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return "-"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        tab.goto(page.resolve().as_uri(), timeout=120_000)
        took = tab.evaluate(
            "() => new Promise(done => requestAnimationFrame(() => setTimeout(() => done(["
            "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0, performance.now()]))))"
        )
        browser.close()
    return f"{took[0] / 1000:.2f} s to the first paint, {took[1] / 1000:.2f} s to the last"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cases", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    given = parser.parse_args()
    run = make(given.directory, given.cases, given.tokens)
    page = given.directory / f"report-{time.time_ns()}.html"
    began = time.perf_counter()
    tool = [ROOT / "tools" / "xd-report", "-q", run, "--out", page]
    subprocess.run(tool, check=True, env={**os.environ, "XD_PYTHON": sys.executable}, stdout=subprocess.DEVNULL)
    took = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    size = page.stat().st_size / 1e6
    print(f"| {given.cases} | {given.tokens} | {size:.1f} MB | {took:.0f} s | {memory:.0f} MB | "
          f"{opened(page, given.chromium)} |")  # fmt: skip


if __name__ == "__main__":
    main()
