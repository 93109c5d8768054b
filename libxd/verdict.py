"""comparison.json as it is read again: what it says must follow from the files beside it.

Whoever prints, seals or trusts a verdict reads it here. What decides is recomputed: the threshold from the numerical
contract, actual.json and the violations from the records, the counts from those of each sequence in token_diffs, the
status from all of them. The masks and the diagnostics are what `xd-compare` run again compares byte for byte. No numpy.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from libxd import canon, contract, judge, shards
from libxd.actual import actual
from libxd.errors import XdError
from libxd.records import JUDGED, Case, digest
from libxd.rundir import SIDES, Attempt
from libxd.tensors import TensorFile

NAME = "comparison.json"
_BLOCK_BYTES = 1 << 20


def status(violations: list[Any], problems: list[Any], counts: Mapping[str, int] | None) -> str:
    """The status; `counts` is None where the numbers could not be compared, which `problems` then says."""
    if violations:
        return "INVALID_IDENTITY"
    if problems or counts is None:
        return "INVALID_ARTIFACT"
    if not counts["active"]:
        return "ZERO_ACTIVE_TOKENS"
    return "MISMATCH" if counts["mismatches"] else "PASS"


def ratio(counts: Mapping[str, int], name: str) -> float | None:
    """A count over the active tokens; None without any."""
    return counts[name] / counts["active"] if counts["active"] else None


def read(attempt: Attempt, case: Case) -> dict[str, Any]:
    """The comparison of an attempt. XdError 66 or 65 where it, or what it is about, is missing, damaged or edited.

    case: the attempt's, as `Case.read` gives it.
    """
    comparison = attempt.read(NAME)
    for name, pointer, found, expected in _flaws(attempt, case, comparison):
        raise XdError("is not what the files of the attempt give", code="not-its-verdict",
                      where=str(attempt.file(name)), path=pointer, found=found, expected=expected,
                      hint="compare a new attempt; evidence is not edited")  # fmt: skip
    return comparison


#: file, pointer, found, expected
_Flaw = tuple[str, str, Any, Any]


def _flaws(attempt: Attempt, case: Case, comparison: dict[str, Any]) -> Iterator[_Flaw]:
    records = dict(zip(JUDGED, (case.requested, case.identity, case.materialized), strict=False))
    records |= {f"readback_{side}.json": attempt.readback(side) for side in SIDES}
    shown = {side: records[f"readback_{side}.json"] for side in SIDES}
    followed = actual(case.requested, case.materialized, shown)
    yield from _differing("actual.json", "", attempt.read("actual.json"), followed)
    bound = case.requested["contract"]
    threshold = contract.from_row(bound, str(attempt)).threshold(bound["dtype"])
    counts, problems = comparison["counts"], comparison["artifact_problems"]
    expected = {
        "repeat": case.requested["repeat"],
        "execution_key": case.materialized["execution_key"],
        "contract": bound,
        "threshold": threshold,
        "threshold_bits": struct.pack(">f", threshold).hex(),
        "actual": canon.digest(followed),
        "mismatch_ratio": counts and ratio(counts, "mismatches"),
        "bitwise_equal_share": counts and ratio(counts, "bitwise_equal"),
        "status": status(comparison["violations"], problems, counts),
    }
    for name, value in expected.items():
        yield from _differing(NAME, f"/{name}", comparison[name], value)
    scored = {path.name for side in SIDES for path in attempt.scores(side)}
    yield from _differing(NAME, "/inputs", sorted(comparison["inputs"]), sorted(scored | records.keys()))
    for name, record in records.items():
        yield from _differing(NAME, f"/inputs/{name}", comparison["inputs"][name], digest(name, record))
    yield from _differing(NAME, "/violations", *_violations(attempt, case, shown, comparison["violations"]))
    if counts and (counts["nonfinite_rollout"] or counts["nonfinite_training"]) and not problems:
        yield NAME, "/artifact_problems", problems, "that active logprobs are not finite"
    yield from _count_flaws(attempt, counts)


def _violations(
    attempt: Attempt, case: Case, shown: dict[str, Any], said: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Those that are said and those that the records give, without the ones that only a score file's tensors show."""
    scores = {side: {"metadata": shards.read_metadata(attempt, side)} for side in SIDES}
    tensors = {f"score_{side}.safetensors#/{name}" for side in SIDES for name in judge.SCORED}
    found = judge.violations(case.identity, shown, scores, case.materialized["strict"])
    return [entry for entry in said if entry["path"] not in tensors], found


def _count_flaws(attempt: Attempt, counts: dict[str, int] | None) -> Iterator[_Flaw]:
    """The counts that decide, against those of each sequence beside the masks."""
    with TensorFile(attempt.file("token_diffs.safetensors")) as file:
        tokens = max(_integers(file, "cu_seqlens"), default=0)
        active, mismatches = (sum(_integers(file, f"sequence_{name}")) for name in ("active", "mismatches"))
    for name, number in (("tokens", tokens), ("active", active), ("mismatches", mismatches)):
        yield from _differing(NAME, f"/counts/{name}", counts[name] if counts else 0, number)


def _integers(file: TensorFile, name: str) -> Iterator[int]:
    """The values of an int64 tensor [n]. XdError 65 when it is another one."""
    file.expect(name, "int64", (None,))
    raw = file.raw(name)
    for start in range(0, len(raw), _BLOCK_BYTES):
        yield from struct.unpack(f"<{len(raw[start : start + _BLOCK_BYTES]) // 8}q", raw[start : start + _BLOCK_BYTES])
        file.release()


def _differing(name: str, pointer: str, found: Any, expected: Any) -> Iterator[_Flaw]:
    if found != expected:
        yield name, pointer, found, expected
