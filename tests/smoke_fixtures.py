"""cpu-smoke engines as the scorer's child would open them, without the child: one side of one changed s0 row."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from conftest import ROOT

from libxd import config, environment, planner, sequences
from libxd.operators import catalog
from libxd.operators.session import OperatorSession
from libxd.runtimes import registry
from libxd.runtimes.protocol import EngineContext, Request, SidePlan
from libxd.sequences import Sequences

RUNTIME = registry.load("cpu-smoke")
S0 = ROOT / "experiments" / "s0.json"
ROWS = {
    tuple((change["path"], change["value"]) for change in row["intervention"]): row
    for row in planner.rows(config.load(S0), 0, "canonical")
}
BASELINE = ROWS[()]
SEQUENCES = sequences.read(ROOT / "experiments" / "sequences" / "s0.safetensors")
ENVIRONMENT = environment.describe()


def row(**changes: Any) -> dict[str, Any]:
    """s0's baseline with knobs changed; a double underscore stands for the dot."""
    changed = copy.deepcopy(BASELINE)
    for name, value in changes.items():
        changed["values"][name.replace("__", ".")] = value
    backend = changed["values"]["logp.backend"]
    for binding in changed["operators"]["selected_logprob"].values():
        binding["backend"] = backend
    return changed


def plan(side: str, row: dict[str, Any], allow_fallback: frozenset[str] = frozenset()) -> SidePlan:
    return RUNTIME.materialize(side, row, ENVIRONMENT, allow_fallback)


def opened(side: str, row: dict[str, Any]) -> Any:
    """An engine with its operator bound."""
    session = OperatorSession(catalog.load(True))
    session.resolve(side, row["operators"]["selected_logprob"][side])
    context = EngineContext(row["identity"], row["locations"])
    engine = RUNTIME.open(side, {"engine": plan(side, row).engine}, context)
    engine.bind(session.instance(side))
    return engine


def request(side: str, row: dict[str, Any], mode: str = "decode", submission: str = "canonical") -> Request:
    mode = mode if side == "rollout" else "teacher_forced"
    return Request(row["values"]["batch.size"], mode, submission, row["identity"]["semantics"])


def logprobs(side: str, mode: str = "decode", given: Sequences = SEQUENCES, **changes: Any) -> np.ndarray:
    """float32 [A], in nats: the active tokens' logprobs of one side under changed knobs."""
    changed = row(**changes)
    scores = opened(side, changed).score(given, request(side, changed, mode))
    return scores.logprobs[given.active_mask]


def greatest(a: np.ndarray, b: np.ndarray) -> float:
    """max |a - b|."""
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())
