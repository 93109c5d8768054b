"""The verdict on an attempt: actual.json, token_diffs.safetensors and comparison.json from its two score files.

The one rule: a token is a mismatch when it is active and abs(training - rollout) > threshold, in float32. Identity
comes before numbers, and numbers that cannot be compared before a verdict on them:

    INVALID_IDENTITY    some violation of identity.json (`judge.violations`), whatever else is the matter
    INVALID_ARTIFACT    another dtype than the format's, shapes that disagree, a non-finite active logprob
    ZERO_ACTIVE_TOKENS  nothing to judge
    MISMATCH, PASS      by the rule

Each of them is a result. An attempt that was refused, lacks a file or holds one that is damaged or another attempt's
is an error, and nothing is written.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from libxd import canon, contract, judge, publish, records, tensors, verdict
from libxd.actual import actual
from libxd.difference import DEFINITION, Difference
from libxd.errors import XdError, of_exception
from libxd.measurement import DIRECTION, QUANTILES, Measurement
from libxd.records import JUDGED, Case
from libxd.rundir import SIDES, Attempt
from libxd.scores import ScoreFile
from libxd.tally import Tally
from libxd.tensors import Lazy

TOKEN_DIFFS = "token_diffs.safetensors"
OUTPUTS = ("actual.json", TOKEN_DIFFS, "comparison.json")
_READ_BYTES = 1 << 22
_THREADS = 3  # for digests, a first pass of statistics, and a second that waits for the first


@dataclass(frozen=True)
class Judged:
    """What a verdict is judged by, but for the scores: an attempt's case and both sides' readbacks."""

    case: Case
    readbacks: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, attempt: Attempt) -> Judged:
        """XdError 69 when the attempt was refused, 66 or 65 when a file is missing, damaged or another attempt's."""
        case = Case.read(attempt)
        if refusal := attempt.refusal():
            raise refusal.error(attempt, "there is nothing to compare")
        readbacks = {side: attempt.readback(side) for side in SIDES}
        for side, readback in readbacks.items():
            expected = {"side": side, **{key: case.materialized[key] for key in ("repeat", "execution_key")}}
            for key, wanted in expected.items():
                if readback[key] != wanted:
                    raise XdError("belongs to another attempt", code="foreign-file", path=f"/{key}",
                                  where=str(attempt.file(f"readback_{side}.json")), found=readback[key],
                                  expected=wanted)  # fmt: skip
        return cls(case, readbacks)

    def digests(self) -> dict[str, str]:
        """By name, the digest of each record (`records.digest`)."""
        values = (self.case.requested, self.case.identity, self.case.materialized, *self.readbacks.values())
        return {name: records.digest(name, value) for name, value in zip(JUDGED, values, strict=True)}


def compare(attempt: Attempt) -> dict[str, Any]:
    """Judge an attempt, write its three files (comparison.json last) and return the comparison.

    Writing again what stands there already is fine; anything else is XdError 73, with what stands there kept.
    """
    judged = Judged.read(attempt)
    case = judged.case
    bound = case.requested["contract"]
    threshold = contract.from_row(bound, str(attempt)).threshold(bound["dtype"])
    num_tokens = case.identity["sequences"]["num_tokens"]
    scores = {side: ScoreFile.of(attempt, side, case.materialized, num_tokens) for side in SIDES}
    problems = [problem for side in SIDES for problem in scores[side].problems]
    problems += _disagreements(scores)
    difference = None if problems else Difference(scores["rollout"], scores["training"], threshold)
    for name in OUTPUTS:
        attempt.refuse_growth(name)

    with ThreadPoolExecutor(_THREADS) as pool:  # numpy and BLAKE3 let go of the interpreter lock
        tally = pool.submit(Tally, difference) if difference else None
        digests = {path.name: pool.submit(_digest, path) for side in SIDES for path in attempt.scores(side)}
        scored = {side: pool.submit(scores[side].identity) for side in SIDES}
        measuring = pool.submit(lambda: Measurement(difference, tally.result())) if difference and tally else None
        token_diffs = _write_token_diffs(attempt, case, threshold, difference, tally)
        measured = measuring.result() if measuring else None
        inputs = judged.digests() | {name: found.result() for name, found in digests.items()}
        facts = {side: found.result() for side, found in scored.items()}
    violations = judge.violations(case.identity, judged.readbacks, facts, case.materialized["strict"])
    if measured:
        problems += _nonfinite(measured)

    followed = actual(case.requested, case.materialized, judged.readbacks)
    attempt.write_json("actual.json", followed)
    comparison = {
        "schema_version": "xd.comparison.v1",
        "case_id": case.requested["case_id"],
        "repeat": case.requested["repeat"],
        "execution_key": case.materialized["execution_key"],
        "status": verdict.status(violations, problems, measured.counts if measured else None),
        "contract": bound,
        "threshold": threshold,
        "threshold_bits": struct.pack(">f", threshold).hex(),
        "violations": violations,
        "artifact_problems": problems,
        **(_numbers(measured) if measured else _no_numbers()),
        "inputs": inputs,
        "actual": canon.digest(followed),
        "token_diffs": token_diffs,
    }
    attempt.write_json("comparison.json", comparison)
    return comparison


def _numbers(measured: Measurement) -> dict[str, Any]:
    return {
        "counts": measured.counts,
        "mismatch_ratio": verdict.ratio(measured.counts, "mismatches"),
        "bitwise_equal_share": verdict.ratio(measured.counts, "bitwise_equal"),
        "logprob_difference": measured.logprob_difference(),
        "worst": measured.worst(),
        "first_mismatch": measured.first_mismatch(),
        "value_grid": measured.value_grid(),
        "kl": measured.kl(),
    }


def _no_numbers() -> dict[str, Any]:
    """What comparison.json says where the two arrays cannot be laid beside one another: nothing, never 0."""
    return {
        "counts": None,
        "mismatch_ratio": None,
        "bitwise_equal_share": None,
        "logprob_difference": {
            "definition": DEFINITION,
            **dict.fromkeys(("mean_signed", "mean_absolute", *QUANTILES, "max_absolute")),
        },
        "worst": None,
        "first_mismatch": None,
        "value_grid": dict.fromkeys(SIDES),
        "kl": {"direction": DIRECTION, **dict.fromkeys(("k1", "k2", "k3"))},
    }


def _write_token_diffs(
    attempt: Attempt,
    case: Case,
    threshold: float,
    difference: Difference | None,
    tally: Future[Tally] | None,
) -> str:
    """Publish token_diffs.safetensors; its digest. The logprobs are written while `tally` is still being computed."""
    hasher = blake3()

    def chunks() -> Iterator[bytes | memoryview]:
        arrays = _token_diffs(difference, tally, threshold) if difference and tally else _no_token_diffs(threshold)
        for chunk in tensors.serialise(arrays, _metadata(case, whole=difference is not None)):
            hasher.update(chunk)
            yield chunk

    publish.publish(attempt.file(TOKEN_DIFFS), chunks())
    return hasher.hexdigest()


def _token_diffs(difference: Difference, tally: Future[Tally], threshold: float) -> dict[str, Any]:
    """The tensors from which the verdict can be recomputed (T tokens, B sequences), each aligned to its own width."""

    def column(dtype: str, values: Callable[[slice], np.ndarray]) -> Lazy:
        return Lazy(dtype, (difference.tokens,), map(values, difference.places()))

    def total(name: str, dtype: str) -> Lazy:
        return Lazy(dtype, (sequences,), (getattr(tally.result(), name) for _ in range(1)))

    sequences = difference.rollout.cu_seqlens.size - 1
    return {
        "cu_seqlens": difference.rollout.cu_seqlens,
        "rollout_logprobs": column("float32", lambda where: difference.rollout.logprobs[where]),
        "training_logprobs": column("float32", lambda where: difference.training.logprobs[where]),
        "sequence_sum_signed": total("sequence_sum_signed", "float64"),
        "sequence_sum_absolute": total("sequence_sum_absolute", "float64"),
        "sequence_active": total("sequence_active", "int64"),
        "sequence_mismatches": total("sequence_mismatches", "int64"),
        "threshold": np.array([threshold], np.float32),
        "active_mask": column("bool", difference.active),
        "mismatch_mask": column("bool", difference.mismatch),
    }


def _no_token_diffs(threshold: float) -> dict[str, Any]:
    """The same tensors of no tokens, where the two sides' arrays cannot be laid beside one another."""
    return {
        "cu_seqlens": np.zeros(1, np.int64),
        "rollout_logprobs": np.zeros(0, np.float32),
        "training_logprobs": np.zeros(0, np.float32),
        "sequence_sum_signed": np.zeros(0, np.float64),
        "sequence_sum_absolute": np.zeros(0, np.float64),
        "sequence_active": np.zeros(0, np.int64),
        "sequence_mismatches": np.zeros(0, np.int64),
        "threshold": np.array([threshold], np.float32),
        "active_mask": np.zeros(0, bool),
        "mismatch_mask": np.zeros(0, bool),
    }


def _metadata(case: Case, whole: bool) -> dict[str, Any]:
    return {
        "schema_version": "xd.token_diffs.v1",
        "case_id": case.requested["case_id"],
        "repeat": case.requested["repeat"],
        "execution_key": case.materialized["execution_key"],
        "contract": case.requested["contract"],
        "definition": DEFINITION,
        "whole": whole,
    }


def _disagreements(scores: dict[str, ScoreFile]) -> list[dict[str, str]]:
    """Score files that are sound each, and yet of different shapes."""
    rollout, training = (scores[side] for side in SIDES)
    if rollout.problems or training.problems:
        return []
    if rollout.cu_seqlens.size == training.cu_seqlens.size and rollout.tokens == training.tokens:
        return []
    shapes = [f"{file.tokens} tokens in {file.cu_seqlens.size - 1} sequences" for file in (rollout, training)]
    return [{"code": "shape", "side": "training", "detail": f"{shapes[1]}; the rollout side has {shapes[0]}"}]


def _nonfinite(measured: Measurement) -> list[dict[str, str]]:
    problems = []
    for side in SIDES:
        index = measured.tally.first_nonfinite[side]
        if index is not None:
            sequence, position = measured.where(index)
            count = measured.counts[f"nonfinite_{side}"]
            detail = f"{count} active logprobs are not finite, the first in sequence {sequence} at position {position}"
            problems.append({"code": "not-finite", "side": side, "detail": detail})
    return problems


def _digest(path: Path) -> str:
    """A file's digest, read in blocks."""
    try:
        with open(path, "rb") as file:
            return canon.digest_stream(iter(lambda: file.read(_READ_BYTES), b""))
    except OSError as error:
        raise of_exception(error, str(path)) from error
