"""Eight request-level cases in one xd-score against one engine start and eight scorings, nothing else around them.

Run as a program with attempts as operands it is the latter: it opens the rollout engine of the first attempt and scores
all of them with it, without supervision, read-back, digests or files.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from bench_timing import ROOT, Result, output, ratio, run, tool

from libxd import sequences as frozen
from libxd.operators import catalog
from libxd.operators.session import OperatorSession
from libxd.runtimes import registry
from libxd.runtimes.protocol import EngineContext
from libxd.scoring.task import Task

SIDE, CASES, TURNS = "rollout", 8, 3
PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 4, 16, 40
#: what vLLM scores, which takes minutes: the real model and its frozen sequences
MODEL, SEQUENCES = ROOT / "models" / "smollm2-135m-instruct", ROOT / "sequences" / "smollm2.safetensors"


def measure(place: Path) -> list[Result]:
    """Decoding, the cases are eight batch sizes: runtime hf on a random Llama of two layers; vllm, where it is."""
    found = [_measure(_plan_tiny(place), place, "hf", sys.executable, limit=1.2, turns=TURNS)]
    python, what = os.environ.get("XD_PYTHON_VLLM"), _what("vllm")
    if not python:
        return [*found, Result(what, None, 1.15, "XD_PYTHON_VLLM names no interpreter (make setup-vllm)")]
    if not MODEL.exists() or not SEQUENCES.exists():
        return [*found, Result(what, None, 1.15, f"no {MODEL.name} and its sequences here (make run EXP=smollm2)")]
    return [*found, _measure(_plan(place, "bench-vllm", MODEL, SEQUENCES), place, "vllm", python, limit=1.15, turns=1)]


def _measure(rows: bytes, place: Path, runtime: str, python: str, *, limit: float, turns: int) -> Result:
    def ours() -> float:
        return run(tool("xd-score", "-q", "--side", SIDE, *_materialize(place, rows, runtime)))[0]

    def theirs() -> float:
        return run([python, __file__, *_materialize(place, rows, runtime)])[0]

    found, ours_s, theirs_s = ratio(turns, ours, theirs)
    detail = f"{ours_s:.2f} s; one engine start and {CASES} scorings {theirs_s:.2f} s"
    return Result(_what(runtime), found, limit, detail)


def _what(runtime: str) -> str:
    return f"xd-score of {CASES} batch sizes, {runtime}"


def score_alone(paths: list[str]) -> None:
    """One engine, all attempts' requests."""
    engine = None
    for task in (Task.read(path, SIDE) for path in paths):
        with OperatorSession(catalog.load(task.materialized["smoke_operators"])) as session:
            session.resolve(SIDE, task.plan["operator"])
            if engine is None:
                context = EngineContext(task.identity, task.requested["locations"])
                engine = registry.load(task.plan["runtime"]).open(SIDE, task.plan, context)
            engine.bind(session.instance(SIDE))
            engine.score(frozen.read(task.requested["locations"]["sequences"]), task.request)
    if engine is not None:
        engine.close()


def _plan_tiny(place: Path) -> bytes:
    import hf_fixtures
    import transformers

    transformers.utils.logging.disable_progress_bar()
    hf_fixtures.save_model(place / "model")
    lens = (PROMPT_TOKENS,) * PROMPTS, ((RESPONSE_TOKENS,) * SAMPLES,) * PROMPTS
    frozen.write(place / "sequences.safetensors", hf_fixtures.frozen(*lens))
    return _plan(place, "bench-score", place / "model", place / "sequences.safetensors")


def _plan(place: Path, name: str, model: Path, sequences: Path) -> bytes:
    from planning_fixtures import experiment_config

    config = experiment_config(
        experiment_id=name,
        interventions=[{"path": "batch.size", "values": [size for size in range(1, CASES + 1) if size != CASES]}],
    )
    config["identity"]["checkpoint"] = {"path": str(model), "digest": None}
    config["identity"]["sequences"] = {"path": str(sequences), "digest": None}
    config["identity"].pop("model")
    config["baseline"]["batch"]["size"] = CASES
    (place / f"{name}.json").write_text(json.dumps(config))
    return output(tool("xd-plan", "-q", place / f"{name}.json"))


def _materialize(place: Path, rows: bytes, runtime: str) -> list[str]:
    """Fresh attempts: what was scored is not scored again."""
    chosen = ("--runtime-rollout", runtime, "--runtime-training", "hf")
    paths = output(tool("xd-materialize", "--runs", place / "runs", *chosen), rows).decode().split()
    assert len(paths) == CASES
    return paths


if __name__ == "__main__":
    score_alone(sys.argv[1:])
