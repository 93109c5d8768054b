"""xd-plan of 256 cases against importing click and json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench_timing import ROOT, Result, ratio, run, tool

CASES, LIMIT, TURNS = 256, 3.0, 11


def measure(place: Path) -> Result:
    """The baseline of s0 and as many batch sizes as the cap allows."""
    config = json.loads((ROOT / "experiments" / "s0.json").read_bytes())
    baseline = config["baseline"]["batch"]["size"]
    sizes = [size for size in range(1, CASES + 1) if size != baseline][: CASES - 1]
    config["experiment_id"] = "bench-plan"
    config["interventions"] = [{"path": "batch.size", "values": sizes}]
    config["identity"]["sequences"]["path"] = str(ROOT / "experiments" / config["identity"]["sequences"]["path"])
    path = place / "bench-plan.json"
    path.write_text(json.dumps(config))
    found, ours, theirs = ratio(
        TURNS,
        lambda: run(tool("xd-plan", "-q", path))[0],
        lambda: run([sys.executable, "-c", "import click, json"])[0],
    )
    detail = f"{ours * 1e3:.0f} ms; python -c 'import click, json' {theirs * 1e3:.0f} ms"
    return Result(f"xd-plan of {CASES} cases", found, LIMIT, detail)
