"""A plan row and a runtime of the tests, to materialise without any engine."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from libxd import canon, contract, knobs, planner, sequences, topology
from libxd.errors import Status, XdError
from libxd.policy import Policy
from libxd.runtimes.protocol import KnobRecord, SidePlan
from libxd.sequences import Sequences

BASELINE = {
    "batch.size": 4,
    "rollout.tensor_parallel_size": 1,
    "rollout.context_parallel_size": 1,
    "rollout.dtype": "float32",
    "rollout.enable_prefix_caching": False,
    "rollout.enforce_eager": True,
    "training.attention_backend": "eager",
    "training.compute_dtype": "float32",
    "logp.backend": "native",
    "training.sharding": "unsharded",
}
MODEL = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
SYNTHETIC = {"name": "xd-test", "seed": 7}
#: two sequences of four tokens, of which the last two are active; rows say that they lie in sequences.safetensors
SEQUENCES = Sequences(
    token_ids=np.arange(8, dtype=np.int32), cu_seqlens=np.array([0, 4, 8]),
    active_mask=np.tile([False, False, True, True], 2),
    attention_mask=np.ones(8, bool), positions=np.tile(np.arange(4, dtype=np.int32), 2),
    prompt_lens=np.full(2, 2, np.int32), prompt_index=np.arange(2, dtype=np.int32), logprobs=np.full(8, -1, np.float32),
)  # fmt: skip
ENVIRONMENT = {
    "schema_version": "xd.environment.v1",
    "python": "3.12.1",
    "system": "Linux",
    "machine": "x86_64",
    "cpu": {"model": "A CPU", "flags": ["avx2"]},
    "cuda": {"driver": None, "devices": []},
    "compiler": None,
    "packages": {"torch": "2.9.0"},
    "threads": {"cpus": 2},
    "variables": {},
    "xd": {"version": "0.1.0", "scorers": {"test": "a" * 64, "other": "b" * 64}},
}


def row(
    change: tuple[str, Any] | None = None,
    *,
    allow_fallback: bool = False,
    operators: dict[str, str] | None = None,
    strict: bool = True,
    missing: tuple[str, ...] = (),
    repeat: int = 0,
    seed: int = 7,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A row as xd-plan would write it; `operators`: side -> backend, for an explicit mapping."""
    values = {**BASELINE, **(dict([change]) if change else {})}
    backends = operators or dict.fromkeys(knobs.SIDES, values["logp.backend"])
    found = contract.lookup("ws1", "current")
    synthetic = {**SYNTHETIC, "seed": seed}
    made = {
        "schema_version": "xd.plan_row.v1",
        "experiment_id": "test",
        "scenario_id": "test",
        "scenario": {"level": "S0", "device": "cpu"},
        "case_id": "",
        "case_digest": "",
        "repeat": repeat,
        "submission": "canonical",
        "strategy": "one_at_a_time",
        "baseline": BASELINE,
        "intervention": [{"path": change[0], "value": change[1], "allow_fallback": allow_fallback}] if change else [],
        "values": values,
        "operators": {
            "selected_logprob": {
                side: {"backend": backend, "options": options or {}} for side, backend in backends.items()
            }
        },
        "contract": {"source": found.source, "version": found.version, "digest": found.digest, "dtype": "float32"},
        "derived": topology.derived(values, MODEL),
        "identity": {
            "checkpoint": {"digest": canon.digest(synthetic), "files": {}, "synthetic": synthetic},
            "tokenizer": {"id": "none", "policy": "token_ids", "digest": None, "files": {}},
            "sequences": sequences.identity_of(SEQUENCES),
            "semantics": {
                "logprobs": "raw", "temperature": 1.0, "top_p": 1.0, "top_k": 0,
                "penalties": {"repetition": 1.0, "presence": 0.0, "frequency": 0.0},
            },
            "rollout_mode": "decode",
            "cache_policy": {"rollout": "kv_cache", "training": "forbidden"},
            "model_state": "pre_update",
            "model": MODEL,
        },
        "locations": {"checkpoint": None, "tokenizer": None, "sequences": "sequences.safetensors"},
        "strict_fallback": strict,
        "executable": not missing,
        "missing": list(missing),
    }  # fmt: skip
    if any("sequences" in reason for reason in missing):
        made["identity"]["sequences"] |= dict.fromkeys(set(made["identity"]["sequences"]) - {"digest", "packing"})
        made["locations"]["sequences"] = None
    return signed(made)


def signed(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the digests that its content gives."""
    row["case_digest"] = planner.case_digest(row)
    row["case_id"] = f"c-{row['case_digest'][:16]}"
    row["request_digest"] = planner.request_digest(row)
    return row


class FakeRuntime:
    """A runtime that applies everything, unless told what to answer: knob -> changed fields of its record."""

    version = "1"

    def __init__(
        self,
        name: str = "test",
        *,
        sides: frozenset[str] = frozenset(knobs.SIDES),
        smoke: bool = False,
        answers: dict[str, dict[str, Any]] | None = None,
        omit: tuple[str, ...] = (),
        refusals: tuple[str, ...] = (),
        device: str = "cpu",
        inputs: frozenset[str] = frozenset({"logits", "hidden"}),
        error: Exception | None = None,
    ) -> None:
        self.name = name
        self.sides = sides
        self.registers_smoke_operators = smoke
        self.operator_inputs = inputs
        self.answers = answers or {}
        self.omit = omit
        self.refusals = list(refusals)
        self.device = device
        self.error = error
        self.asked: list[tuple[str, frozenset[str]]] = []

    def estimate_bytes(self, side, engine, locations):
        return 0

    def open(self, side, plan, context):
        raise AssertionError("this runtime plans alone")

    def materialize(self, side, row, environment, allow_fallback):
        """What the protocol asks for."""
        assert "xd" not in environment
        self.asked.append((side, allow_fallback))
        if self.error:
            raise self.error
        values = {knob.path: planner.requested(row, side, knob.path) for knob in knobs.of_side(side)}
        records = [
            KnobRecord(**{
                "knob": knob.path, "requested": values[knob.path], "materialized": values[knob.path],
                "status": "applied", "lifecycle": knob.lifecycle, "evidence": f"{self.name} applies it",
                **self.answers.get(knob.path, {}),
            })
            for knob in knobs.of_side(side) if knob.path not in self.omit
        ]  # fmt: skip
        kept = {path: value for path, value in values.items() if path not in ("batch.size", "logp.backend")}
        world = ("rollout.tensor_parallel_size", "rollout.context_parallel_size", "training.sharding")
        return SidePlan(
            records,
            {"device": self.device, **kept},
            {path: value for path, value in kept.items() if path not in world},
            {path: value for path, value in kept.items() if path in world},
            {"device": self.device},
            self.refusals,
        )

    def synthetic_parameters(self, synthetic, dtype):
        """Two parameters that depend on seed and dtype."""
        return {name: canon.digest([synthetic, dtype, name]) for name in ("head", "embedding")}


def refusing(message: str) -> FakeRuntime:
    """A runtime that cannot serve this machine at all."""
    return FakeRuntime(error=XdError(message, status=Status.REFUSED))


def policy(runtime: FakeRuntime | None = None, training: FakeRuntime | None = None, **options: Any) -> Policy:
    """Both sides on one runtime, or one each."""
    runtime = runtime or FakeRuntime()
    return Policy(
        {"rollout": runtime, "training": training or runtime}, dict.fromkeys(knobs.SIDES, "/usr/bin/python3"), **options
    )


def environments(**rollout: Any) -> dict[str, Any]:
    """Both sides' environments, the rollout side's changed."""
    return {"rollout": {**copy.deepcopy(ENVIRONMENT), **rollout}, "training": copy.deepcopy(ENVIRONMENT)}
