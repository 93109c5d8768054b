"""Identity: what a case pins, and what each scorer must have held.

A comparison means something only when both sides scored the same tokens with the same weights in the same state.
`judge` holds what a scorer observed against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from libxd import at_hand, canon, strictjson
from libxd.knobs import DTYPE_OF_SIDE
from libxd.resolution import SEQUENCE_COUNTS, SEQUENCE_DIGESTS
from libxd.rundir import SIDES
from libxd.runtimes import registry

_SCHEMA_VERSION = "xd.identity.v1"
#: what is done to logits before the softmax when nothing is
UNPROCESSED: dict[str, Any] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0,
    "penalties": {"repetition": 1.0, "presence": 0.0, "frequency": 0.0},
}  # fmt: skip


def pinned(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What of a resolved identity a case digest covers: each digest, not what the digest stands for.

    So a case planned from declared digests is the same case as one planned with the files at hand. The model's sizes
    follow from the checkpoint, so they are pinned only where that has no digest.
    """
    checkpoint, tokenizer, sequences = (identity[part] for part in ("checkpoint", "tokenizer", "sequences"))
    sizes = {} if checkpoint["digest"] else {"model": identity["model"]}
    return {
        "checkpoint": {name: checkpoint[name] for name in ("digest", "synthetic")},
        "tokenizer": {name: tokenizer[name] for name in ("id", "policy", "digest")},
        "sequences": {name: sequences[name] for name in ("digest", "packing")},
        **{name: identity[name] for name in ("semantics", "rollout_mode", "cache_policy", "model_state")},
        **sizes,
    }


def contradictions(
    identity: Mapping[str, Any], locations: Mapping[str, str | None]
) -> Iterator[tuple[str, Any, Any]]:
    """(pointer into the row, found, expected) where a row's identity is not what it says beside itself.

    Each digest is recomputed from what is listed with it; what is listed is there whole or not at all, just when the
    row says where it lies.
    """
    checkpoint, sequences = identity["checkpoint"], identity["sequences"]
    if checkpoint["synthetic"] is not None:
        yield "/identity/checkpoint/digest", checkpoint["digest"], canon.digest(checkpoint["synthetic"])
    for part in ("checkpoint", "tokenizer"):
        if identity[part]["files"]:
            yield f"/identity/{part}/digest", identity[part]["digest"], canon.digest(identity[part]["files"])
    listed = {name: sequences[name] is not None for name in (*SEQUENCE_DIGESTS, *SEQUENCE_COUNTS)}
    for name, there in listed.items():
        if there != any(listed.values()):
            yield f"/identity/sequences/{name}", sequences[name], "like the digests and counts beside it"
            return
    if any(listed.values()):
        whole = canon.digest({name: sequences[name] for name in (*SEQUENCE_DIGESTS, "packing")})
        yield "/identity/sequences/digest", sequences["digest"], whole
    for part, there in _listed(identity).items():
        if (locations[part] is not None) != there:
            yield f"/locations/{part}", locations[part], "a place" if there else None


def lacking(identity: Mapping[str, Any]) -> set[str]:
    """Pointers, into a row, to the parts of its identity that are not at hand."""
    parts = {part for part, there in _listed(identity).items() if not there}
    if identity["checkpoint"]["synthetic"] is not None:
        parts.discard("checkpoint")
    if identity["tokenizer"]["policy"] == "token_ids":
        parts.discard("tokenizer")
    if identity["model"] is None:
        parts.add("model")
    return {f"/identity/{part}" for part in parts}


def _listed(identity: Mapping[str, Any]) -> dict[str, bool]:
    """Part -> whether what is in it is listed; of sequences, all of it or nothing."""
    return {"checkpoint": bool(identity["checkpoint"]["files"]), "tokenizer": bool(identity["tokenizer"]["files"]),
            "sequences": identity["sequences"]["token_ids"] is not None}  # fmt: skip


# -- what a scorer must have held


def expected(row: Mapping[str, Any], sides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The identity.json value of a row; `sides` is that of its materialized.json.

    The checkpoint is cast to each side's dtype and digested, a parameter at a time. XdError 65 or 66 when what the row
    says of its files, or of a synthetic model, is not so here.
    """
    at_hand.require(row)
    if row["identity"]["checkpoint"]["synthetic"] is not None:
        for side in SIDES:
            synthetic = canon.dumps(row["identity"]["checkpoint"]["synthetic"])
            at_hand.require_model(row["identity"]["model"], _synthetic_model(sides[side]["runtime"], synthetic))
    return {
        "schema_version": _SCHEMA_VERSION,
        "case_id": row["case_id"],
        **row["identity"],
        "weights": {side: _weights(row, side, sides[side]) for side in SIDES},
    }


def _weights(row: Mapping[str, Any], side: str, plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """Dtype, root digest and parameter digests of a side; None when there is nothing to compute them from."""
    knob = DTYPE_OF_SIDE[side]
    planned = next((record["materialized"] for record in plan["knobs"] if record["knob"] == knob), None)
    dtype = planned or row["values"][knob]
    checkpoint, location = row["identity"]["checkpoint"], row["locations"]["checkpoint"]
    if checkpoint["synthetic"] is not None:
        parameters = _synthetic_parameters(plan["runtime"], canon.dumps(checkpoint["synthetic"]), dtype)
    elif location is not None:
        parameters = _file_parameters(location, checkpoint["digest"], dtype)
    else:
        return None
    if parameters is None:
        return None
    return {"dtype": dtype, "digest": canon.digest(parameters), "parameters": parameters}


@cache
def _file_parameters(location: str, digest: str, dtype: str) -> dict[str, str]:
    from libxd import checkpoint

    return checkpoint.parameter_digests(location, dtype)


@cache
def _synthetic_parameters(runtime: str, synthetic: bytes, dtype: str) -> dict[str, str] | None:
    """A runtime that makes synthetic models says what they hold; another one has none to score."""
    digests = getattr(registry.load(runtime), "synthetic_parameters", None)
    return digests(strictjson.loads(synthetic, runtime), dtype) if digests else None


@cache
def _synthetic_model(runtime: str, synthetic: bytes) -> dict[str, int]:
    sizes = getattr(registry.load(runtime), "synthetic_model", None)
    return sizes(strictjson.loads(synthetic, runtime)) if sizes else {}


def held_weights(weights: Mapping[str, Any] | None, not_parameters: Iterable[str]) -> dict[str, str] | None:
    """The digests that an engine's parameters must have: those of `weights` (of identity.json, for a side), less the
    tensors of the checkpoint that the model has no parameter for. None: nothing is known of them."""
    if weights is None:
        return None
    left_out = frozenset(not_parameters)
    return {name: digest for name, digest in weights["parameters"].items() if name not in left_out}
