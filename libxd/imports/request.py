"""What an imported attempt asks for: a row whose knobs are unknown, and the record of what nobody saw being built."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from libxd import canon, contract, knobs, materialize, planner, resolution, topology
from libxd.errors import Status, XdError
from libxd.identity import lacking
from libxd.rundir import SIDES

RUNTIME = "imported"
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_UNSEEN = "the scores were imported: nobody saw it"


@dataclass(frozen=True)
class Declared:
    """What is in no dump, and somebody answers for. None: unknown, and never made up.

    dtypes: side -> dtype of its weights and computation, whose looser one chooses the contract's threshold; a verdict
    takes it, so it has no default. checkpoint: what both sides held when they scored, a directory or the digest of
    one. tokenizer: a directory, to show text by. semantics: which logprob both sides mean, as a config's. rollout_mode:
    "decode" or "prefill". contract_source: which numerical contract judges.
    """

    dtypes: Mapping[str, str]
    checkpoint: str | os.PathLike[str] | None = None
    tokenizer: str | os.PathLike[str] | None = None
    semantics: Mapping[str, Any] | None = None
    rollout_mode: str | None = None
    contract_source: str = "ws1"


def row(
    experiment_id: str, name: str, sequences: Mapping[str, Any] | None, location: str | None, declared: Declared
) -> dict[str, Any]:
    """The requested.json value. sequences: the identity of the tokens (`sequences.identity_of`), found at `location`;
    None where their prompts are unknown. XdError 65 or 66 for a checkpoint or a contract that is none.
    """
    checkpoint, model = _checkpoint(declared.checkpoint)
    tokenizer = _tokenizer(declared.tokenizer)
    identity = {
        "checkpoint": checkpoint,
        "tokenizer": tokenizer,
        "sequences": sequences or {**dict.fromkeys((*resolution.SEQUENCE_DIGESTS, *resolution.SEQUENCE_COUNTS)),
                                   "digest": None, "packing": "none"},
        "semantics": declared.semantics and dict(declared.semantics),
        "rollout_mode": declared.rollout_mode,
        "cache_policy": dict.fromkeys(SIDES, "allowed"),
        "model_state": "pre_update",
        "model": model,
    }  # fmt: skip
    values = {knob: None for knob in knobs.CATALOG} | {
        knobs.DTYPE_OF_SIDE[side]: _dtype(side, declared.dtypes.get(side)) for side in SIDES
    }
    found = contract.lookup(declared.contract_source, "current")
    missing = ["/values: imported: the knobs are unknown"]
    missing += [f"{part}: imported: not at hand" for part in sorted(lacking(identity))]
    unsigned = {
        "schema_version": planner.SCHEMA_VERSION,
        "experiment_id": experiment_id,
        "scenario_id": name,
        "scenario": {"level": None, "device": None},
        "strategy": planner.IMPORTED,
        "repeat": 0,
        "submission": "canonical",
        "baseline": values,
        "intervention": [],
        "values": values,
        "operators": {"selected_logprob": {side: {"backend": None, "options": {}} for side in SIDES}},
        "contract": {"source": found.source, "version": found.version, "digest": found.digest,
                     "dtype": contract.looser(*(values[knob] for knob in knobs.DTYPE_OF_SIDE.values()))},
        "derived": topology.derived(values, model),
        "identity": identity,
        "locations": {"checkpoint": str(declared.checkpoint) if checkpoint["files"] else None,
                      "tokenizer": str(declared.tokenizer) if tokenizer["files"] else None, "sequences": location},
        "strict_fallback": False,
        "executable": False,
        "missing": missing,
    }  # fmt: skip
    digest = planner.case_digest(unsigned)
    signed = unsigned | {"case_id": f"c-{digest[:16]}", "case_digest": digest}
    return signed | {"request_digest": planner.request_digest(signed)}


def materialized(requested: Mapping[str, Any]) -> dict[str, Any]:
    """The materialized.json value: a record a knob, each of them unobservable, and no engine, operator or scorer."""
    sides = {
        side: {
            "runtime": RUNTIME,
            "knobs": [
                {"knob": knob.path, "requested": requested["values"][knob.path],
                 "materialized": requested["values"][knob.path], "status": "unobservable",
                 "lifecycle": knob.lifecycle, "evidence": _UNSEEN}
                for knob in knobs.of_side(side)
            ],
            "engine": {},
            "operator": {"operation": materialize.OPERATION, "backend": None, "options": {}, "version": None,
                         "build": None, "inputs": None, "properties": []},
            "fingerprints": None,
            "environment": None,
            "scorer": None,
        }
        for side in SIDES
    }  # fmt: skip
    value = {
        "schema_version": materialize.SCHEMA_VERSION,
        **{name: requested[name] for name in ("case_id", "repeat", "submission")},
        "strict": False,
        "status": "ready",
        "refusals": [],
        "catalog": None,
        "smoke_operators": False,
        "sides": sides,
    }
    return {**value, "execution_key": materialize.execution_key(value)}


def dtype_name(given: Any) -> str:
    """A dtype's canonical name: of a name, an alias, or torch's or numpy's own object."""
    name = str(given.__name__ if isinstance(given, type) else getattr(given, "name", given)).removeprefix("torch.")
    return knobs.DTYPE_ALIASES.get(name, name)


def _dtype(side: str, given: str | None) -> str:
    if given not in knobs.DTYPES:
        raise XdError(f"say in which dtype the {side} side computed: the contract's threshold goes by it, and there is "
                      "no default", status=Status.USAGE, code="no-dtype", where=f"dtype of {side}", found=given,
                      expected=" or ".join(knobs.DTYPES))  # fmt: skip
    return given


def _checkpoint(given: str | os.PathLike[str] | None) -> tuple[dict[str, Any], dict[str, int] | None]:
    """A row's checkpoint, and the model's sizes where its config says all of them."""
    if given is None:
        return {"digest": None, "files": {}, "synthetic": None}, None
    if _DIGEST.match(os.fspath(given)):
        return {"digest": os.fspath(given), "files": {}, "synthetic": None}, None
    files = _digests(resolution.checkpoint_files, given, "checkpoint")
    if not ("config.json" in files and any(map(resolution.holds_weights, files))):
        raise XdError("is no checkpoint: it takes a config.json and safetensors files", code="bad-checkpoint",
                      where=os.fspath(given), hint="name the directory that both sides held, or its digest")
    facts = resolution.model_facts(given)
    whole = set(facts) == set(resolution.MODEL_FACTS)
    return {"digest": canon.digest(files), "files": files, "synthetic": None}, facts if whole else None


def _tokenizer(given: str | os.PathLike[str] | None) -> dict[str, Any]:
    """A row's tokenizer: its files, where they are named; whether the ids are from it, nobody knows."""
    unknown = {"id": None, "policy": None, "digest": None, "files": {}}
    if given is None:
        return unknown
    files = _digests(resolution.tokenizer_files, given, "tokenizer")
    if not files:
        raise XdError("holds no tokenizer file", code="bad-tokenizer", where=os.fspath(given))
    return unknown | {"digest": canon.digest(files), "files": files}


def _digests(read: Any, directory: str | os.PathLike[str], what: str) -> dict[str, str]:
    """What `read` gives of a directory, once a process for as long as its files stay as they are."""
    try:
        entries = sorted((entry.name, (s := entry.stat()).st_size, s.st_mtime_ns) for entry in os.scandir(directory))
    except OSError as error:
        raise XdError(f"the {what} cannot be read: {error.strerror}", status=Status.MISSING, code="missing",
                      where=os.fspath(directory)) from error  # fmt: skip
    return _read(read, os.path.abspath(directory), tuple(entries))


@cache
def _read(read: Any, directory: str, entries: tuple[tuple[str, int, int], ...]) -> dict[str, str]:
    return read(directory)
