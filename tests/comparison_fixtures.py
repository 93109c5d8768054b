"""Scored attempts made of given logprobs, without any engine, whole enough to be sealed; and ways to spoil one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import materialize_fixtures
import numpy as np

from libxd import canon, contract, identity, knobs, materialize, resolution, shards, tensors
from libxd.rundir import SIDES, Attempt, RunDirectory

PARAMETERS = {name: canon.digest(name) for name in ("embedding", "head")}


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def scored(
    root: Path,
    rollout: np.ndarray,
    training: np.ndarray,
    *,
    active: np.ndarray | None = None,
    lengths: tuple[int, ...] | None = None,
    change: tuple[str, Any] | None = None,
    repeat: int = 0,
    source: str = "ws1",
    dtype: str = "float32",
    strict: bool = True,
    rollout_environment: dict[str, Any] | None = None,
    pinned: dict[str, dict[str, Any]] | None = None,
    shard_tokens: int = shards.SHARD_TOKENS,
) -> Attempt:
    """A new attempt under `root` with both score files. rollout, training: float32 [T]; active: all, by default.

    dtype: whose threshold of contract `source` judges it. lengths: of the sequences; one of all tokens, by default.
    rollout_environment: what of the rollout side's environment is another than the fixtures'; pinned: what of parts of
    the identity is.
    """
    arrays = arrays_of(rollout.size, active, lengths)
    row = request(arrays, change, repeat, source, dtype, strict)
    for part, changed in (pinned or {}).items():
        row["identity"][part] |= changed
    signed = materialize_fixtures.signed(row)
    return scored_row(root, signed, arrays, rollout, training, rollout_environment, shard_tokens)


def arrays_of(
    tokens: int, active: np.ndarray | None = None, lengths: tuple[int, ...] | None = None
) -> dict[str, np.ndarray]:
    """Frozen tokens: all active and of one sequence, by default."""
    return {
        "token_ids": np.arange(tokens, dtype=np.int32) % 97,
        "active_mask": np.ones(tokens, bool) if active is None else active,
        "cu_seqlens": np.cumsum((0, *(lengths or (tokens,))), dtype=np.int64),
    }


def scored_row(
    root: Path,
    row: dict[str, Any],
    arrays: dict[str, np.ndarray],
    rollout: np.ndarray,
    training: np.ndarray,
    rollout_environment: dict[str, Any] | None = None,
    shard_tokens: int = shards.SHARD_TOKENS,
) -> Attempt:
    """A new attempt at `row`, whose identity is of these arrays."""
    environments = materialize_fixtures.environments(**(rollout_environment or {}))
    materialized = materialize.materialized(row, materialize_fixtures.policy(), environments)
    attempt = RunDirectory(root, row["experiment_id"]).new_attempt(row["case_id"])
    attempt.write_json("requested.json", row)
    attempt.write_json("materialized.json", materialized)
    expected = _identity(row)
    attempt.write_json("identity.json", expected)
    for side, logprobs in (("rollout", rollout), ("training", training)):
        score(attempt, side, logprobs, arrays, materialized, expected, shard_tokens)
    return attempt


def refused(root: Path, change: tuple[str, Any], reason: str) -> Attempt:
    """An attempt that was refused when it was materialised."""
    arrays = {"token_ids": np.zeros(2, np.int32), "active_mask": np.ones(2, bool), "cu_seqlens": np.array([0, 2])}
    row = request(arrays, change, 0, "ws1", "float32", True)
    runtime = materialize_fixtures.FakeRuntime(
        answers={change[0]: {"status": "unsupported", "materialized": None, "evidence": reason}}
    )
    attempt = RunDirectory(root, row["experiment_id"]).new_attempt(row["case_id"])
    attempt.write_json("requested.json", row)
    attempt.write_json("materialized.json", materialize.materialized(
        row, materialize_fixtures.policy(runtime), materialize_fixtures.environments()
    ))  # fmt: skip
    attempt.write_json("identity.json", _identity(row))
    return attempt


def score(
    attempt: Attempt,
    side: str,
    logprobs: np.ndarray,
    arrays: dict[str, np.ndarray],
    materialized: dict[str, Any],
    pinned: dict[str, Any],
    shard_tokens: int = shards.SHARD_TOKENS,
) -> None:
    """What a faithful scorer of a side leaves: readback and score file, in shards above so many tokens."""
    stamp = {
        "side": side, "case_id": attempt.case_id, "repeat": materialized["repeat"],
        "execution_key": materialized["execution_key"],
    }  # fmt: skip
    mode = "decode" if side == "rollout" else "teacher_forced"
    weights = pinned["weights"][side]
    observed = {
        **{name: pinned["sequences"][name] for name in resolution.OBSERVED_DIGESTS},
        "weights_before": weights["digest"], "weights_after": weights["digest"], "weights_dtype": weights["dtype"],
        "mode_before": "eval", "mode_after": "eval", "optimizer": False,
        "cache": "kv_cache" if side == "rollout" else "none", "scoring_mode": mode,
        "semantics": identity.UNPROCESSED, "model_state": "pre_update",
    }  # fmt: skip
    operator = materialized["sides"][side]["operator"]
    attempt.write_json(f"readback_{side}.json", {
        "schema_version": "xd.readback.v1", **stamp, "status": "ok", "refusals": [],
        "knobs": [
            {"knob": record["knob"], "actual": record["materialized"], "status": record["status"],
             "stage": "settings", "evidence": {}}
            for record in materialized["sides"][side]["knobs"]
        ],
        "operator": {**{key: operator[key] for key in ("backend", "version", "build")}, "calls": 1,
                     "logprobs": len(logprobs), "instance": "tests:Engine", "evidence": {}},
        "observed": observed, "parameters": weights["parameters"], "changed_parameters": {},
        "buffers": {}, "not_parameters": [],
        "engine": {}, "reuse": {"engine_serial": 1, "case_serial": 1},
    })  # fmt: skip
    metadata = {
        "schema_version": "xd.score.v1", **stamp, "semantics": identity.UNPROCESSED, "mode": mode,
        "dtypes": {"parameters": weights["dtype"], "logits": "float32"}, "observed": observed,
    }  # fmt: skip
    shards.write(attempt, side, {
        "cu_seqlens": arrays["cu_seqlens"], "token_ids": arrays["token_ids"], "logprobs": logprobs,
        "active_mask": arrays["active_mask"],
    }, metadata, shard_tokens)  # fmt: skip


def score_path(attempt: Attempt, side: str) -> Path:
    return attempt.file(f"score_{side}.safetensors")


def rewrite_score(attempt: Attempt, side: str, metadata: dict[str, Any] | None = None, **changed: Any) -> None:
    """Write a side's score file anew with other tensors (None: without it) or other metadata fields."""
    path = score_path(attempt, side)
    with tensors.TensorFile(path) as file:
        arrays = {name: np.array(file.array(name)) for name in file.names}
        about = {**file.metadata, **(metadata or {})}
    path.unlink()
    arrays = {name: array for name, array in {**arrays, **changed}.items() if array is not None}
    tensors.write(path, arrays, about)


def rewrite_json(attempt: Attempt, name: str, **changed: Any) -> None:
    """Replace top-level members of one of the attempt's JSON files, canonical as before."""
    path = attempt.file(name)
    value = {**json.loads(path.read_bytes()), **changed}
    path.unlink()
    path.write_bytes(canon.dumps(value) + b"\n")


def snapshot(attempt: Attempt) -> dict[str, bytes]:
    """Name and content of every file of an attempt."""
    return {path.name: path.read_bytes() for path in sorted(attempt.path.iterdir())}


def request(
    arrays: dict[str, np.ndarray], change: tuple[str, Any] | None, repeat: int, source: str, dtype: str, strict: bool
) -> dict[str, Any]:
    """A row whose identity is of these arrays, judged by the contract's threshold for a dtype."""
    row = materialize_fixtures.row(change, repeat=repeat, strict=strict)
    if not change:
        row["values"] |= {"rollout.dtype": dtype, "training.compute_dtype": dtype}
        row["baseline"] = row["values"]
    found = contract.lookup(source, "current")
    row["contract"] = {"source": found.source, "version": found.version, "digest": found.digest, "dtype": dtype}
    digests = {name: canon.digest(name) for name in identity.SEQUENCE_DIGESTS}
    digests |= {name: canon.digest_bytes(array.tobytes()) for name, array in arrays.items()}
    digests["selected_ids"] = digests["token_ids"]
    row["identity"]["sequences"] = {
        **digests, "digest": canon.digest({**digests, "packing": "none"}), "packing": "none",
        "num_sequences": arrays["cu_seqlens"].size - 1, "num_tokens": arrays["token_ids"].size,
        "num_active": int(arrays["active_mask"].sum()),
    }  # fmt: skip
    return materialize_fixtures.signed(row)


def _identity(row: dict[str, Any]) -> dict[str, Any]:
    weights = {
        side: {"dtype": row["values"][knobs.DTYPE_OF_SIDE[side]], "digest": canon.digest(PARAMETERS),
               "parameters": PARAMETERS}
        for side in SIDES
    }  # fmt: skip
    return {"schema_version": "xd.identity.v1", "case_id": row["case_id"], **row["identity"], "weights": weights}
