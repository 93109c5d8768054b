"""Imported scores as an attempt like any other: the request, what must be scored, and a side's scores and readback.

`begin` takes a new attempt for a batch, `add` a side of it; so two sides may come from two dumps, and the second must
hold the tokens of the first. Nothing is copied from the request into what was seen: of an import that is the ids, the
mask, the boundaries and the logprobs. The dtype that was declared stands beside it, as declared, so that a score file
by itself says it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from libxd import __version__, canon, publish, schema, shards, tensors
from libxd import sequences as frozen
from libxd.diagnostics import locate
from libxd.errors import Status, XdError
from libxd.imports import request
from libxd.imports.batch import Batch, numbered
from libxd.imports.record import UNKNOWN_SEMANTICS
from libxd.imports.request import Declared
from libxd.imports.spool import Spool
from libxd.knobs import DTYPE_OF_SIDE
from libxd.planner import IMPORTED
from libxd.records import Case
from libxd.rundir import SIDES, Attempt, RunDirectory
from libxd.scores import ScoreFile

SCORE_SCHEMA_VERSION, READBACK_SCHEMA_VERSION = "xd.score.v1", "xd.readback.v1"


def begin(runs: str | os.PathLike[str], experiment_id: str, name: str, batch: Batch, declared: Declared) -> Attempt:
    """A new attempt under `runs`, whose two sides are to come. name: what the table calls it, such as "step 12".

    Its tokens are published beside it as a sequences file, to be scored again by whoever wants to; not so where a
    prompt is unknown, and then the case pins no tokens. XdError 2, 65 or 66 for what is declared and is not so.
    """
    run = RunDirectory(runs, experiment_id)
    sequences = _sequences(batch)
    identity = frozen.identity_of(sequences) if sequences else None
    path = run.sequences(identity["digest"]) if identity else None
    row = schema.validate("plan_row", request.row(experiment_id, name, identity, path and str(path), declared), name)
    if sequences and path:
        publish.directory(path.parent)
        frozen.write(path, sequences)
    attempt = run.new_attempt(row["case_id"])
    attempt.write_json("requested.json", row)
    attempt.write_json("materialized.json", request.materialized(row))
    attempt.write_json("identity.json", {
        "schema_version": "xd.identity.v1", "case_id": row["case_id"], **row["identity"],
        "weights": dict.fromkeys(SIDES),
    })  # fmt: skip
    return attempt


def add(
    attempt: Attempt, side: str, batch: Batch, *, semantics: Mapping[str, Any] | None = None,
    source: Mapping[str, Any] | None = None, extras: bool = True,
) -> list[str]:  # fmt: skip
    """Publish one side's scores and readback; what is to be said of them (`Batch.notes`).

    semantics: what the dump says was done to the logits, as a readback's; None: nothing is known. source: what the
    readback says of where it comes from, JSON without paths or clocks. extras: whether the batch's are written with it.
    XdError 65 when the attempt was not imported, or holds other tokens: the first that differs is named; 73 when the
    side is there already with other scores.
    """
    case = Case.read(attempt)
    if case.requested["strategy"] != IMPORTED:
        raise XdError("is no imported attempt, and its sides are scored", code="not-imported", where=str(attempt),
                      hint="import into a new attempt")  # fmt: skip
    if side not in batch.logprobs:
        raise XdError(f"there are no logprobs of the {side} side", code="no-side", where=str(attempt),
                      found=sorted(batch.logprobs), expected=side)  # fmt: skip
    _require_same_tokens(attempt, case, side, batch)
    observed = _observed(batch, semantics or UNKNOWN_SEMANTICS)
    stamp = {"side": side, **{key: case.materialized[key] for key in ("case_id", "repeat", "execution_key")}}
    metadata = {
        "schema_version": SCORE_SCHEMA_VERSION, **stamp, "semantics": observed["semantics"],
        "mode": case.identity["rollout_mode"] if side == "rollout" else "teacher_forced",
        "dtypes": {"parameters": None, "logits": None}, "observed": observed,
        "declared_dtype": case.requested["values"][DTYPE_OF_SIDE[side]],
    }  # fmt: skip
    shards.write(attempt, side, {
        "cu_seqlens": batch.cu_seqlens, "token_ids": batch.token_ids, "logprobs": batch.logprobs[side],
        **(dict(batch.extras) if extras else {}), "active_mask": batch.active_mask,
    }, metadata)  # fmt: skip
    attempt.write_json(f"readback_{side}.json", {
        "schema_version": READBACK_SCHEMA_VERSION, **stamp, "status": "ok", "refusals": [],
        "knobs": [
            {"knob": record["knob"], "actual": None, "status": "unobservable", "stage": "behaviour", "evidence": {}}
            for record in case.materialized["sides"][side]["knobs"]
        ],
        "operator": {**dict.fromkeys(("backend", "version", "build", "calls", "logprobs", "instance")), "evidence": {}},
        "observed": observed, "parameters": {}, "changed_parameters": {}, "buffers": {}, "not_parameters": [],
        "engine": {"imported": {**(source or {}), "xd": __version__}},
        "reuse": {"engine_serial": 0, "case_serial": 0},
    })  # fmt: skip
    return batch.notes(side)


def _sequences(batch: Batch) -> frozen.Sequences | None:
    """The tokens frozen: at positions from 0, nothing masked. They are the same file whatever was scored of them."""
    if batch.prompt_lens is None:
        return None
    with Spool() as spool:
        for length in np.diff(batch.cu_seqlens).tolist():
            spool.append("positions", np.arange(length, dtype=np.int32))
            spool.append("attention_mask", np.ones(length, bool))
            spool.append("logprobs", np.full(length, np.nan, np.float32))
        constant = {name: spool.array(name) for name in ("positions", "attention_mask", "logprobs")}
    begins = batch.cu_seqlens[:-1]
    prompts = (batch.token_ids[b : b + n].tobytes() for b, n in zip(begins, batch.prompt_lens, strict=True))
    return frozen.Sequences(
        token_ids=batch.token_ids,
        cu_seqlens=batch.cu_seqlens,
        active_mask=batch.active_mask,
        prompt_lens=batch.prompt_lens,
        prompt_index=numbered(prompts),
        **constant,
    )


def _observed(batch: Batch, semantics: Mapping[str, Any]) -> dict[str, Any]:
    """What was seen of the scoring: the ids whose logprobs these are; what went into a model, nobody saw."""
    return {
        "token_ids": None,
        "selected_ids": canon.digest_bytes(tensors.raw_bytes(batch.token_ids)),
        "cu_seqlens": canon.digest_bytes(tensors.raw_bytes(batch.cu_seqlens)),
        "active_mask": canon.digest_bytes(tensors.raw_bytes(batch.active_mask)),
        "attention_mask": None, "positions": None, "weights_before": None, "weights_after": None, "weights_dtype": None,
        "mode_before": None, "mode_after": None, "optimizer": None, "cache": None, "scoring_mode": None,
        "semantics": dict(semantics), "model_state": None,
    }  # fmt: skip


def _require_same_tokens(attempt: Attempt, case: Case, side: str, batch: Batch) -> None:
    """XdError 65 at the first token that is another than the attempt's."""
    other = next(each for each in SIDES if each != side)
    if attempt.scored(other):
        file = ScoreFile.of(attempt, other, case.materialized, case.identity["sequences"]["num_tokens"])
        file.require_sound()
        theirs = (file.cu_seqlens, file.token_ids, file.active_mask)
        _differences(str(attempt), batch, *theirs)
    elif (sequences := _sequences(batch)) and frozen.identity_of(sequences) != case.identity["sequences"]:
        raise XdError("holds other tokens than the attempt was begun for", code="other-tokens", where=str(attempt),
                      hint="import into a new attempt")  # fmt: skip


def _differences(attempt: str, batch: Batch, cu_seqlens: np.ndarray, ids: np.ndarray, active: np.ndarray) -> None:
    def refuse(sequence: int, position: int, what: str, found: Any, expected: Any) -> None:
        where = batch.places[sequence] if batch.places else f"sequence {sequence}"
        raise XdError(f"{what} than in {attempt}: the first is sequence {sequence}, position {position}", where=where,
                      code="other-tokens", status=Status.INVALID, path=f"/{position}", found=found,
                      expected=expected)  # fmt: skip

    count = min(len(batch.token_ids), len(ids))
    differing = np.flatnonzero(batch.token_ids[:count] != ids[:count])
    first = int(differing[0]) if differing.size else None
    shared = min(batch.cu_seqlens.size, cu_seqlens.size)
    bounds = np.flatnonzero(batch.cu_seqlens[:shared] != cu_seqlens[:shared])
    # a sequence of another length moves all that comes after it, so what ends first is named
    if bounds.size and (first is None or min(batch.cu_seqlens[bounds[0]], cu_seqlens[bounds[0]]) <= first):
        sequence = int(bounds[0]) - 1
        lengths = [int(each[sequence + 1] - each[sequence]) for each in (batch.cu_seqlens, cu_seqlens)]
        refuse(sequence, min(lengths), "another length", f"{lengths[0]} tokens", f"{lengths[1]} tokens")
    if first is not None:
        refuse(*locate(first, batch.cu_seqlens), "another token", int(batch.token_ids[first]), int(ids[first]))
    if batch.cu_seqlens.size != cu_seqlens.size:
        raise XdError(f"another number of sequences than in {attempt}", code="other-tokens",
                      where=batch.places[0] if batch.places else attempt, found=batch.cu_seqlens.size - 1,
                      expected=cu_seqlens.size - 1)  # fmt: skip
    masks = np.flatnonzero(batch.active_mask != active)
    if masks.size:
        index = int(masks[0])
        refuse(*locate(index, batch.cu_seqlens), "another mask", bool(batch.active_mask[index]), bool(active[index]))
