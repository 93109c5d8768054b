"""Identity: what a case pins, what each scorer must have held, and what was not so.

A comparison means something only when both sides scored the same tokens with the same weights in the same state. What a
scorer observed is judged here before any number is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from libxd import at_hand, canon, strictjson
from libxd.knobs import DTYPE_OF_SIDE
from libxd.resolution import OBSERVED_DIGESTS, SEQUENCE_COUNTS, SEQUENCE_DIGESTS
from libxd.rundir import SIDES
from libxd.runtimes import registry
from libxd.strictjson import pointer_to

_SCHEMA_VERSION = "xd.identity.v1"
#: what a cache policy lets a scorer be seen doing
_CACHE_USES = {"kv_cache": ("kv_cache",), "forbidden": ("none",), "allowed": ("kv_cache", "none")}
#: what is done to logits before the softmax when nothing is
UNPROCESSED: dict[str, Any] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0,
    "penalties": {"repetition": 1.0, "presence": 0.0, "frequency": 0.0},
}  # fmt: skip
SCORED = ("token_ids", "active_mask", "cu_seqlens")  # what a score file holds of the sequences


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
    identity: Mapping[str, Any], locations: Mapping[str, str | None], missing: Iterable[str]
) -> Iterator[tuple[str, Any, Any]]:
    """(pointer into the row, found, expected) where a row's identity is not what it says beside itself.

    Each digest is recomputed from what is listed with it; what is listed is there whole or not at all, just when the
    row says where it lies, and is missing just when it is not there.
    """
    checkpoint, tokenizer, sequences = (identity[part] for part in ("checkpoint", "tokenizer", "sequences"))
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
    at_hand = {"checkpoint": bool(checkpoint["files"]), "tokenizer": bool(tokenizer["files"]),
               "sequences": any(listed.values())}  # fmt: skip
    for part, there in at_hand.items():
        if (locations[part] is not None) != there:
            yield f"/locations/{part}", locations[part], "a place" if there else None
    lacking = {part for part, there in at_hand.items() if not there}
    if checkpoint["synthetic"] is not None:
        lacking.discard("checkpoint")
    if tokenizer["policy"] == "token_ids":
        lacking.discard("tokenizer")
    if identity["model"] is None:
        lacking.add("model")
    yield "/missing", sorted({reason.partition(":")[0] for reason in missing}), [
        f"/identity/{part}" for part in sorted(lacking)
    ]  # fmt: skip


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


# -- what was not so


def violations(
    identity: Mapping[str, Any],
    readbacks: Mapping[str, Mapping[str, Any]],
    scores: Mapping[str, Mapping[str, Any]],
    strict: bool,
) -> list[dict[str, Any]]:
    """Where a scorer's observed identity is not the case's: [] when the numbers may be looked at.

    identity: identity.json. readbacks: side -> readback_<side>.json. scores: side -> the score file's `metadata` and
    the digests of its token_ids, active_mask and cu_seqlens. An entry names code, side, the place (file#/pointer), and
    the expected and observed JSON scalar. What was not observed is refused in strict mode; otherwise it counts as
    declared when the identity pins it.
    """
    found = [
        {"code": code, "side": side, "path": path, "expected": wanted, "observed": seen}
        for side in SIDES
        for code, path, wanted, seen in _Judge(identity, side, readbacks[side], scores[side], strict).violations()
    ]
    return found + list(_between_sides(readbacks))


def _between_sides(readbacks: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """What no checkpoint pins, but what cannot be so on both sides: one is blamed, both are in the entry.

    A buffer that both hold under one name and in one dtype, such as rotary frequencies, has the same bits on both; a
    dtype of its own shows where the parameters' dtypes are equal. What one side has as a parameter is one on the other.
    """
    rollout, training = (readbacks[side] for side in SIDES)
    one_dtype = rollout["observed"]["weights_dtype"] == training["observed"]["weights_dtype"]
    for name in sorted(rollout["buffers"].keys() & training["buffers"].keys()):
        wanted, seen = rollout["buffers"][name], training["buffers"][name]
        key = "dtype" if wanted["dtype"] != seen["dtype"] else "digest"
        if wanted[key] != seen[key] and (key == "digest" or one_dtype):
            place = f"readback_training.json#{pointer_to(pointer_to('/buffers', name), key)}"
            yield {"code": "buffers", "side": "training", "path": place, "expected": wanted[key], "observed": seen[key]}
    for side, other in (SIDES, SIDES[::-1]):
        for name in sorted(set(readbacks[side]["not_parameters"]) & readbacks[other]["parameters"].keys()):
            yield {"code": "weights", "side": side, "path": f"readback_{side}.json#{pointer_to('/parameters', name)}",
                   "expected": readbacks[other]["parameters"][name], "observed": None}


#: code, path, expected, observed
Violation = tuple[str, str, Any, Any]


class _Judge:
    """One side's evidence beside the identity."""

    def __init__(
        self,
        identity: Mapping[str, Any],
        side: str,
        readback: Mapping[str, Any],
        score: Mapping[str, Any],
        strict: bool,
    ) -> None:
        self.identity = identity
        self.side = side
        self.readback = readback
        self.observed = readback["observed"]
        self.score = score
        self.strict = strict
        self.mode = identity["rollout_mode"] if side == "rollout" else "teacher_forced"
        self.parameters = held_weights(identity["weights"][side], readback["not_parameters"])
        self.weights_digest = None if self.parameters is None else canon.digest(self.parameters)

    def violations(self) -> Iterator[Violation]:
        sequences = self.identity["sequences"]
        for name in OBSERVED_DIGESTS:
            yield from self._same(name, sequences[name])
        yield from self._held_weights()
        yield from self._kept_weights()
        yield from self._same("mode_before", "eval")
        yield from self._same("mode_after", self.observed["mode_before"] or "eval", "mode-changed")
        yield from self._same("optimizer", False)
        yield from self._cache()
        yield from self._same("scoring_mode", self.mode)
        yield from self._semantics()
        yield from self._same("model_state", self.identity["model_state"])
        yield from self._score_file()

    def _place(self, *names: str) -> str:
        pointer = ""
        for name in names:
            pointer = pointer_to(pointer, name)
        return f"readback_{self.side}.json#{pointer}"

    def _unseen(self, name: str, wanted: Any) -> Iterator[Violation]:
        """Nothing was observed: refused when strict, or when there is no declaration to fall back on."""
        if self.strict or wanted is None:
            yield "unobservable", self._place("observed", name), wanted, None

    def _same(self, name: str, wanted: Any, code: str = "") -> Iterator[Violation]:
        seen = self.observed[name]
        if seen is None:
            yield from self._unseen(name, wanted)
        elif wanted is None:
            yield "unpinned", self._place("observed", name), None, seen
        elif seen != wanted:
            yield code or name.replace("_", "-"), self._place("observed", name), wanted, seen

    def _held_weights(self) -> Iterator[Violation]:
        """The weights before scoring; the first wrong parameter is named."""
        wanted, seen, held = self.parameters, self.observed["weights_before"], self.readback["parameters"]
        if wanted is None or seen is None:
            yield from self._same("weights_before", self.weights_digest)
            return
        yield from self._same("weights_dtype", self.identity["weights"][self.side]["dtype"])
        wrong = _first_difference(wanted, held)
        if wrong is not None:
            yield "weights", self._place("parameters", wrong), wanted.get(wrong), held.get(wrong)
        elif seen != self.weights_digest:
            yield "weights", self._place("observed", "weights_before"), self.weights_digest, seen

    def _kept_weights(self) -> Iterator[Violation]:
        """The weights after scoring against those before; the first changed parameter is named."""
        changed = self.readback["changed_parameters"]
        if changed:
            name = min(changed)
            held = self.readback["parameters"].get(name)
            yield "weights-changed", self._place("changed_parameters", name), held, changed[name]
        else:
            held = self.observed["weights_before"] or self.weights_digest
            yield from self._same("weights_after", held, "weights-changed")

    def _cache(self) -> Iterator[Violation]:
        policy, seen = self.identity["cache_policy"][self.side], self.observed["cache"]
        if seen is None:
            yield from self._unseen("cache", policy)
        elif seen not in _CACHE_USES[policy]:
            yield "cache", self._place("observed", "cache"), policy, seen

    def _semantics(self) -> Iterator[Violation]:
        """What was done to the logits: all that processed logprobs are behind, nothing where they are raw."""
        wanted, seen = _processing(self.identity["semantics"]), self.observed["semantics"]
        if seen is None:
            # no token whose logprob could have been another one
            if self.identity["sequences"]["num_active"] != 0:
                yield from self._unseen("semantics", "declared")
            return
        for name, value in wanted.items():
            place = self._place("observed", "semantics", name)
            if seen[name] is None:
                if self.strict:
                    yield "unobservable", place, None if isinstance(value, Mapping) else value, None
            else:
                yield from self._differing("semantics", place, value, seen[name])

    def _score_file(self) -> Iterator[Violation]:
        """The score file must speak of the same scoring as the readback, and hold the frozen tokens themselves."""
        file, metadata, observed = f"score_{self.side}.safetensors", self.score["metadata"], self.observed
        yield from self._differing("semantics", f"{file}#/xd/semantics", observed["semantics"], metadata["semantics"])
        if metadata["mode"] != self.mode:
            yield "scoring-mode", f"{file}#/xd/mode", self.mode, metadata["mode"]
        yield from self._differing("score-file", f"{file}#/xd/observed", observed, metadata["observed"])
        for name in SCORED:
            wanted = self.identity["sequences"][name]
            if name in self.score and self.score[name] != wanted:
                yield name.replace("_", "-"), f"{file}#/{name}", wanted, self.score[name]

    def _differing(self, code: str, path: str, wanted: Any, seen: Any) -> Iterator[Violation]:
        """The leaves in which two JSON values differ."""
        if isinstance(wanted, Mapping) and isinstance(seen, Mapping):
            for name in sorted(wanted.keys() | seen.keys()):
                yield from self._differing(code, pointer_to(path, name), wanted.get(name), seen.get(name))
        elif wanted != seen:
            yield code, path, wanted, seen


def _processing(semantics: Mapping[str, Any]) -> dict[str, Any]:
    """What stands between logits and the logprob that is meant: of raw logprobs, nothing."""
    return UNPROCESSED if semantics["logprobs"] == "raw" else {name: semantics[name] for name in UNPROCESSED}


def _first_difference(wanted: Mapping[str, str], seen: Mapping[str, str]) -> str | None:
    """The first name, in order, whose digests differ or that stands on one side only."""
    return next((name for name in sorted(wanted.keys() | seen.keys()) if wanted.get(name) != seen.get(name)), None)
