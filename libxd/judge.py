"""What of a case's identity was not so: a scorer's observations, judged before any number is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from libxd import canon
from libxd.identity import UNPROCESSED, held_weights
from libxd.resolution import OBSERVED_DIGESTS
from libxd.rundir import SIDES
from libxd.strictjson import pointer_to

#: what a cache policy lets a scorer be seen doing
_CACHE_USES = {"kv_cache": ("kv_cache",), "forbidden": ("none",), "allowed": ("kv_cache", "none")}
SCORED = ("token_ids", "active_mask", "cu_seqlens")  # what a score file holds of the sequences


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
        if self.mode is not None:  # an imported attempt may leave it open
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

    def _weights_unseen(self, name: str) -> Iterator[Violation]:
        """Weights that nobody looked at: those of the checkpoint, where it is known by a digest at least."""
        yield from self._unseen(name, self.weights_digest or self.identity["checkpoint"]["digest"])

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
        if seen is None:
            yield from self._weights_unseen("weights_before")
            return
        if wanted is None:
            yield from self._same("weights_before", None)
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
        elif self.observed["weights_after"] is None and self.observed["weights_before"] is None:
            yield from self._weights_unseen("weights_after")
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
        declared, seen = self.identity["semantics"], self.observed["semantics"]
        if seen is None:
            # else no token whose logprob could have been another one
            if self.identity["sequences"]["num_active"] != 0:
                yield from self._unseen("semantics", declared and "declared")
            return
        if declared is None:
            code = "unobservable" if all(value is None for value in seen.values()) else "unpinned"
            yield code, self._place("observed", "semantics"), None, None
            return
        wanted = _processing(declared)
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
