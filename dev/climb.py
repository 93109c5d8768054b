"""Climb the precision ladder with pairs that are right and pairs of which one side is wrong; docs/ladder.md's table.

    python -P dev/climb.py SEQUENCES OUT [ARM]...

Every arm goes through the tools: planned, scored by hf on both sides, compared, sealed, read by xd-ladder. Of a wrong
arm the training side is a runtime of tests/engines/xd_mistaken_hf.py. OUT gets a config and a run directory an arm;
arms that are there are read, not scored again.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ROOT / "tests" / "engines"


def _mistaken() -> Any:
    """The runtimes' module, whose folder stays off this process's path."""
    spec = importlib.util.spec_from_file_location("xd_mistaken_hf", ENGINES / "xd_mistaken_hf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mistaken = _mistaken()
DTYPES = ("bfloat16", "float16", "float32")
#: arm -> what is another than experiments/ladder.json says
RIGHT: dict[str, dict[str, Any]] = {
    "decode": {},
    "prefill": {
        "identity": {"rollout_mode": "prefill", "cache_policy": {"rollout": "forbidden", "training": "forbidden"}},
        "rollout": {"enable_prefix_caching": False},
    },
    "eager": {"training": {"attention_backend": "eager"}},
    "batch_1": {"batch": {"size": 1}},
    "no_prefix_caching": {"rollout": {"enable_prefix_caching": False}},
    "fused_head": {"logp": {"backend": "xd.fused_linear_logp"}},
    "other_operator": {"operators": {"selected_logprob": {"rollout": "xd.reference_logp", "training": "native"}}},
}


def main() -> None:
    sequences, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    wanted = sys.argv[3:] or [*RIGHT, *mistaken.HARMLESS, *mistaken.MISTAKES]
    print(f"| arm | {' | '.join(DTYPES)} | slope | left / allowed, mean | left / allowed, max | answer |")
    print("|---" * 8 + "|")
    for arm in wanted:
        print(row(arm, climbed(arm, sequences, out / arm)), flush=True)


def climbed(arm: str, sequences: Path, place: Path) -> dict[str, Any]:
    """The line of xd-ladder --json for an arm; rungs with two dtypes are left out."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "ladder.json").write_text(json.dumps(config(RIGHT.get(arm, {}), sequences), indent=2))
    policy = ("--runs", place / "runs", "--runtime-rollout", "hf", "--runtime-training",
              "hf" if arm in RIGHT else mistaken.runtime_name(arm))  # fmt: skip
    plan = [json.loads(line) for line in tool("xd-plan", place / "ladder.json").splitlines()]
    same = [row for row in plan if row["values"]["rollout.dtype"] == row["values"]["training.compute_dtype"]]
    rows = "".join(json.dumps(row) + "\n" for row in same)
    attempts = tool("xd-materialize", *policy, stdin=tool("xd-resume", *policy, stdin=rows))
    for each in (("xd-score", "--side", "rollout"), ("xd-score", "--side", "training"), ("xd-compare",), ("xd-seal",)):
        attempts = tool(*each, stdin=attempts) if attempts else ""
    return json.loads(tool("xd-ladder", "--json", stdin=tool("xd-resume", *policy, "--answers", stdin=rows)))


def config(changes: dict[str, Any], sequences: Path) -> dict[str, Any]:
    made = json.loads((ROOT / "experiments" / "ladder.json").read_text())
    for part in ("checkpoint", "tokenizer"):
        made["identity"][part]["path"] = str(ROOT / "models" / "smollm2-135m-instruct")
    made["identity"]["sequences"]["path"] = str(sequences)
    for name, change in changes.items():
        if name == "operators":
            made[name] = change
        else:
            (made if name == "identity" else made["baseline"])[name].update(change)
    return made


def row(arm: str, ladder: dict[str, Any]) -> str:
    rungs = {rung["dtypes"]["training"]: rung for rung in ladder["rungs"]}
    means = [_figures(rungs[dtype]) for dtype in DTYPES]
    slope = ladder["slope"]
    fit = f"{slope['value']:.2f} [{slope['low']:.2f}, {slope['high']:.2f}]" if slope else "no difference"
    left = [f"{ladder[which]['left'] / ladder[which]['allowed']:.3g}" for which in ("mean", "max")]
    return " | ".join((f"| {arm}", *means, fit, *left, f"{ladder['answer']} |"))


def _figures(rung: dict[str, Any]) -> str:
    if rung["mean_absolute"] is None:
        return rung["status"]
    return f"{rung['mean_absolute']:.1e}, {rung['max_absolute']:.1e}"


def tool(name: str, *arguments: object, stdin: str = "") -> str:
    """The stdout of a tool that succeeds."""
    env = {**os.environ, "PYTHONPATH": str(ENGINES), "XD_PYTHON": sys.executable}
    done = subprocess.run([ROOT / "tools" / name, "-q", *map(str, arguments)], input=stdin, env=env, text=True,
                          stdout=subprocess.PIPE, check=True)  # fmt: skip
    return done.stdout


if __name__ == "__main__":
    main()
