"""A statement over sealed attempts, for others to sign: in-toto's Statement v1, in canonical bytes.

Its subjects are every file of each attempt, the seal among them, by BLAKE3 as the seal has it and by SHA-256 for
everybody's tools; its predicate is what the attempts prove. Whoever makes it again from the same attempts gets the same
bytes: it holds no clock and no host, and no place but the names under a run directory. Formats: docs/formats.md; what a
signature adds, and how to make one: docs/trust.md.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from libxd import canon, planner, schema, seal, verdict
from libxd.errors import Status, XdError, of_exception
from libxd.records import Case
from libxd.rundir import SEAL, SIDES, Attempt

TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:xd:predicate:sealed-attempts:v1"
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Stated:
    """One attempt's part of a statement: its subjects, and what it proves, under its name in a run directory."""

    name: str
    subjects: list[dict[str, Any]]
    proves: dict[str, Any]


def read(attempt: Attempt) -> Stated:
    """What can be stated of an attempt. Every file of it is read once, for both digests.

    XdError 66 when it is not sealed, 65 when it is not what its seal says, or its verdict does not follow from its
    files.
    """
    if not attempt.sealed:
        raise XdError("is not sealed, so nothing can be stated of it", status=Status.MISSING, code="not-sealed",
                      where=str(attempt), hint="xd-seal seals what is whole")  # fmt: skip
    seal.require_untampered(attempt, ())
    sealed = attempt.read(SEAL)
    name = f"{sealed['experiment_id']}/cases/{attempt.case_id}/{attempt.attempt_id}"
    subjects = []
    for file in sorted([*sealed["files"], SEAL]):
        digests = _digests(attempt.file(file))
        if file != SEAL and digests["blake3"] != sealed["files"][file]["blake3"]:
            raise XdError(f"sealed, but {file}: changed", code="tampered", where=str(attempt))
        subjects.append({"name": f"{name}/{file}", "digest": digests})
    return Stated(name, subjects, _proves(attempt, name))


def dumps(stated: Iterable[Stated]) -> bytes:
    """The statement over these attempts, in canonical bytes and a newline; their order does not matter.

    XdError 66 without any, 65 when two bear one name.
    """
    ordered = sorted(stated, key=lambda each: each.name)
    if not ordered:
        raise XdError("no attempt was given, and a statement is of one at least", status=Status.MISSING, code="nothing")
    name, times = Counter(each.name for each in ordered).most_common(1)[0]
    if times > 1:
        raise XdError("stands twice among the attempts, so its files could not be told apart", code="stated-twice",
                      where=name)  # fmt: skip
    value = {
        "_type": TYPE,
        "subject": [subject for each in ordered for subject in each.subjects],
        "predicateType": PREDICATE_TYPE,
        "predicate": {"attempts": [each.proves for each in ordered]},
    }
    return canon.dumps(schema.validate("statement", value, "the statement")) + b"\n"


def _proves(attempt: Attempt, name: str) -> dict[str, Any]:
    from libxd.table import Row
    from libxd.table_text import claim

    case = Case.read(attempt)
    judged = verdict.read(attempt, case)
    requested, materialized = case.requested, case.materialized
    imported = requested["strategy"] == planner.IMPORTED
    return {
        "name": name,
        **{key: requested[key] for key in ("experiment_id", "case_id", "case_digest", "repeat", "intervention")},
        "execution_key": materialized["execution_key"],
        "scenario": None if imported else {"id": requested["scenario_id"], **requested["scenario"]},
        "claim": claim([Row(attempt, requested, judged["status"])]),
        "strict": materialized["strict"],
        "runtimes": {side: materialized["sides"][side]["runtime"] for side in SIDES},
        "identity": {part: case.identity[part]["digest"] for part in ("checkpoint", "tokenizer", "sequences")},
        **{key: judged[key] for key in ("status", "contract", "threshold", "threshold_bits", "counts")},
    }


def _digests(path: Path) -> dict[str, str]:
    """Both digests over the same bytes, read once."""
    one, other = blake3(), hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                one.update(block)
                other.update(block)
    except OSError as error:
        raise of_exception(error, str(path)) from error
    return {"blake3": one.hexdigest(), "sha256": other.hexdigest()}
