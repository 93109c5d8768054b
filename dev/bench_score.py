"""Eight request-level cases in one xd-score against one engine start and eight scorings, nothing else around them.

Run as a program with attempts as operands it is the latter: it opens the rollout engine of the first attempt and scores
all of them with it, without supervision, read-back, digests or files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench_timing import Result, output, ratio, run, tool

from libxd import sequences as frozen
from libxd.operators import catalog
from libxd.operators.session import OperatorSession
from libxd.runtimes import registry
from libxd.runtimes.protocol import EngineContext
from libxd.scoring.task import Task

SIDE, CASES, LIMIT, TURNS = "rollout", 8, 1.2, 3
PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 4, 16, 40


def measure(place: Path) -> Result:
    """Runtime hf, a random Llama of two layers, decode; the cases are eight batch sizes."""
    rows = _plan(place)

    def ours() -> float:
        return run(tool("xd-score", "-q", "--side", SIDE, *_materialize(place, rows)))[0]

    def theirs() -> float:
        return run([sys.executable, __file__, *_materialize(place, rows)])[0]

    found, ours_s, theirs_s = ratio(TURNS, ours, theirs)
    detail = f"{ours_s:.2f} s; one engine start and {CASES} scorings {theirs_s:.2f} s"
    return Result(f"xd-score of {CASES} batch sizes", found, LIMIT, detail)


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


def _plan(place: Path) -> bytes:
    import hf_fixtures
    import transformers
    from planning_fixtures import experiment_config

    transformers.utils.logging.disable_progress_bar()
    hf_fixtures.save_model(place / "model")
    lens = (PROMPT_TOKENS,) * PROMPTS, ((RESPONSE_TOKENS,) * SAMPLES,) * PROMPTS
    frozen.write(place / "sequences.safetensors", hf_fixtures.frozen(*lens))
    config = experiment_config(
        experiment_id="bench-score",
        interventions=[{"path": "batch.size", "values": [size for size in range(1, CASES + 1) if size != CASES]}],
    )
    config["identity"]["checkpoint"] = {"path": "model", "digest": None}
    config["identity"]["sequences"] = {"path": "sequences.safetensors", "digest": None}
    config["identity"].pop("model")
    config["baseline"]["batch"]["size"] = CASES
    (place / "bench-score.json").write_text(json.dumps(config))
    return output(tool("xd-plan", "-q", place / "bench-score.json"))


def _materialize(place: Path, rows: bytes) -> list[str]:
    """Fresh attempts: what was scored is not scored again."""
    paths = output(tool("xd-materialize", "--runs", place / "runs", "--runtime", "hf"), rows).decode().split()
    assert len(paths) == CASES
    return paths


if __name__ == "__main__":
    score_alone(sys.argv[1:])
