"""`make run` of s0 with many others at work, or ended by a signal; for dev/torture/races.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from conftest import ROOT, Tools
from races_fixtures import PATIENCE_S, Place, attempts, flaws, kill, results, undisturbed, until

SMOKE = ["--runtime", "cpu-smoke", "--allow-smoke-operators"]
#: settings that each take an engine of their own, on one side or both
ENGINES = {
    "rollout.tensor_parallel_size": [2], "rollout.context_parallel_size": [2], "rollout.dtype": ["bfloat16", "float16"],
    "rollout.enable_prefix_caching": [False], "training.attention_backend": ["eager"],
    "training.compute_dtype": ["bfloat16", "float16"], "training.sharding": ["fsdp"],
    "logp.backend": ["xd.reference_logp", "xd.triton_logp", "xd.fused_linear_logp", "smoke_only.logp_reference",
                     "smoke_only.logp_offset"],
}  # fmt: skip


def smoke_experiment(directory: Path, name: str, batch_sizes: int, knobs: list[str]) -> Path:
    """s0's baseline, and so many batch sizes with each setting of these knobs."""
    config = json.loads((ROOT / "experiments" / "s0.json").read_text())
    config |= {"experiment_id": name, "strategy": "pairwise", "pairs": [["batch.size", knob] for knob in knobs]}
    config["identity"]["sequences"]["path"] = str(ROOT / "experiments" / "sequences" / "s0.safetensors")
    config["baseline"]["batch"]["size"] = batch_sizes + 1
    config["interventions"] = [{"path": "batch.size", "values": list(range(1, 1 + batch_sizes))},
                               *({"path": knob, "values": ENGINES[knob]} for knob in knobs)]  # fmt: skip
    path = directory / f"{name}.json"
    path.write_text(json.dumps(config))
    return path


def makes_at_once(directory: Path, config: Path, makes: int, jobs: int, repeats: int) -> tuple[list[str], Counter[str]]:
    """So many `make -jN run` on one run directory at the same time; flaws, and what stands there then."""
    arguments = ["make", "-C", str(ROOT), f"EXP={config.stem}", f"CONFIG={config}", f"RUNS={directory / 'runs'}",
                 f"VENV={Path(sys.prefix)}", f"POLICY={' '.join(SMOKE)}", f"REPEATS={repeats}"]  # fmt: skip
    logs = [directory / f"make-{number}" for number in range(makes)]
    processes = []
    for log in logs:
        with open(log, "wb") as file:
            processes.append(subprocess.Popen([*arguments, f"-j{jobs}", "run"], stdout=file, stderr=subprocess.STDOUT,
                                              env={**os.environ, "XD_PYTHON": sys.executable}))  # fmt: skip
    statuses = [process.wait() for process in processes]
    found = [f"make: status {status}: {log.read_text()[-2000:]}" for status, log in zip(statuses, logs, strict=True)
             if status]  # fmt: skip
    once_more = subprocess.run([*arguments, "run"], capture_output=True, text=True, check=False,
                               env={**os.environ, "XD_PYTHON": sys.executable})  # fmt: skip
    if once_more.returncode or "nothing to score" not in once_more.stderr:
        found.append(f"once more: {once_more.stderr[-2000:]}")
    runs = directory / "runs"
    found += [f"{path}" for path in runs.glob(f"{config.stem}/.make*")]
    said = results(runs)
    found += [f"{case}: its attempts disagree" for case, answers in said.items() if len(answers) > 1]
    counts = Counter({"rows answered": len(said)})
    for attempt in attempts(runs):
        counts["sealed" if attempt.sealed else "not sealed"] += 1
    return found + flaws(runs), counts


def one_pipe(directory: Path, config: Path, repeats: int) -> tuple[int, Any]:
    """How many rows the experiment has, and their `results` by one pipe that nobody disturbs."""
    tools = Tools(directory)
    rows = tools("xd-plan", config, "--repeats", repeats).out
    paths = tools("xd-materialize", "--runs", "control", *SMOKE, stdin=rows).out
    for stage in (["xd-score", "--side", "rollout"], ["xd-score", "--side", "training"], ["xd-compare"], ["xd-seal"]):
        paths = tools(*stage, stdin=paths).out
    assert len(paths.splitlines()) == len(rows.splitlines())
    return len(rows.splitlines()), results(directory / "control")


def make_ended(place: Place, config: Path, signum: int, files: int, everybody: bool) -> list[str]:
    """`make -j4 run` is sent a signal when so many files stand in its attempts, and run once more."""
    directory = place.path / f"ended-{signum}-{int(everybody)}"
    directory.mkdir()
    runs = directory / "runs"
    arguments = ["make", "-C", str(ROOT), f"EXP={config.stem}", f"CONFIG={config}", f"RUNS={runs}", "REPEATS=0",
                 f"VENV={Path(sys.prefix)}", f"POLICY={' '.join(SMOKE)}", "-j4", "run"]  # fmt: skip
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log, env=place.environment, process_group=0,
                                   preexec_fn=undisturbed)  # fmt: skip
        until(lambda: sum(1 for _ in runs.glob("*/cases/*/*/*")) >= files or process.poll() is not None)
        for pid in place.alive() if everybody else ():
            kill(os.kill, pid, signum)
        kill(os.killpg, process.pid, signum)
        status = process.wait(PATIENCE_S)
    said = (directory / "log").read_text()
    found = [] if status else ["it ended well"]
    found += [f"said: {said}"] if "Traceback" in said else []
    until(lambda: not place.alive(), f"somebody is left alive: {place.alive()}")
    found += flaws(runs, temporary=signum == signal.SIGKILL)
    found += [f"left: {path}" for path in runs.glob("*/.make*") if signum != signal.SIGKILL]
    again = subprocess.run(arguments, capture_output=True, text=True, check=False, env=place.environment)
    if again.returncode:
        found.append(f"once more: {again.stderr[-2000:]}")
    return found + flaws(runs, temporary=signum == signal.SIGKILL)
