"""A diagnosis: is it a bug or rounding, which causes come into question, and what could not be looked at.

Of one pair (an attempt, or two score files), or of several attempts together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from libxd import ladder, roundoff
from libxd.doctor import repeats, series
from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import SHAPE, Finding, Rule
from libxd.doctor.registry import DETECTORS, examined
from libxd.errors import Status, XdError
from libxd.ladder import Ladder, Rung
from libxd.planner import IMPORTED

SCHEMA_VERSION = "xd.diagnosis.v1"
#: causes that say nothing of the numbers themselves
_OF_A_REPORT = ("aggregate",)
#: what is shown of a rule
RULES: tuple[Rule, ...] = (*(rule for rule, _ in DETECTORS), repeats.RULE, series.RULE)


@dataclass(frozen=True)
class Answer:
    """To "bug or rounding?". answer: "nothing" where no number differs. by: what it rests on."""

    answer: str
    why: str
    by: str
    next: list[str]

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Diagnosis:
    """subject: the operands it is of. figures: of the active tokens that are compared, nats; None without any."""

    subject: list[str]
    dtypes: dict[str, str | None] | None
    tokens: int
    sequences: int
    figures: dict[str, float] | None
    answer: Answer | None
    findings: list[Finding]
    silent: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """A line of `xd-doctor --json`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "subject": self.subject,
            "dtypes": self.dtypes,
            "tokens": self.tokens,
            "sequences": self.sequences,
            "figures": self.figures,
            "answer": self.answer and self.answer.as_json(),
            "findings": [finding.as_json() for finding in self.findings],
            "silent": self.silent,
        }


def of_pair(evidence: Evidence, climbed: Ladder | None = None) -> Diagnosis:
    """climbed: a ladder that the attempt is a rung of."""
    found = examined(evidence)
    unasked = {} if climbed is not None else {"ladder": "needs the same tokens in two precisions"}
    subject = [str(evidence.attempt)] if evidence.attempt else [str(file.path) for file in evidence.files]
    return Diagnosis(
        subject, evidence.dtypes, evidence.count, int(evidence.sequences.size), _figures(evidence),
        _answer(evidence, found.findings, climbed), found.findings, found.silent | unasked,
    )  # fmt: skip


def together(evidences: Sequence[Evidence], in_order: bool) -> Diagnosis | None:
    """What several attempts show beside one another; in_order: they are steps, and
    `silent` says so where only who asks knows their order. A tampered one is left out. None where they show nothing."""
    evidences = [each for each in evidences if not each.tampered]
    silent = {}
    if in_order:
        evidences, why = series.ordered(evidences)
        silent = {series.RULE.detector: why} if why else {}
    findings = [*repeats.examine(evidences), *(series.examine(evidences) if in_order else [])]
    if not findings and not silent:
        return None
    findings.sort(key=lambda finding: -finding.likelihood)
    return Diagnosis([str(each.attempt) for each in evidences], None, sum(each.brief.count for each in evidences),
                     sum(each.brief.sequences for each in evidences), None, None, findings, silent)  # fmt: skip


def rung(evidence: Evidence) -> Rung | None:
    """An attempt as a rung; None for what was not judged, is tampered with, or does not say its dtypes.

    XdError for damaged records.
    """
    attempt = evidence.attempt
    known = all(dtype in roundoff.UNIT_ROUNDOFF for dtype in evidence.dtypes.values())
    if attempt is None or not known or not attempt.has("comparison.json") or evidence.tampered:
        return None
    return ladder.read(attempt)


def climbed(rungs: Iterable[Rung]) -> dict[str, Ladder]:
    """Attempt -> the ladder of two precisions or more that it is a rung of."""
    found = {}
    for each in ladder.ladders(rungs):
        if len({one.unit_roundoff for one in each.rungs}) > 1:
            found |= {str(one.attempt): each for one in each.rungs}
    return found


def _figures(evidence: Evidence) -> dict[str, float] | None:
    if not evidence.count:
        return None
    d = evidence.magnitude
    p50, p99 = np.quantile(d, [0.5, 0.99], method="inverted_cdf")
    return {
        "mean_signed": float(evidence.d.mean()), "mean_absolute": float(d.mean()), "p50_absolute": float(p50),
        "p99_absolute": float(p99), "max_absolute": float(d.max()),
    }  # fmt: skip


def _answer(evidence: Evidence, findings: list[Finding], climbed: Ladder | None) -> Answer:
    if evidence.tampered:
        return Answer("undecided", "the attempt is not what was sealed", "nothing", [])
    if climbed is not None and climbed.judgement.answer != "undecided":
        judged = climbed.judgement
        return Answer(judged.answer, f"{judged.why}, on a ladder of {len(climbed.rungs)} rungs", "ladder", [])
    telling = [finding for finding in findings if finding.likelihood >= SHAPE and finding.cause not in _OF_A_REPORT]
    if telling:
        return Answer("bug", f"by what was found: {telling[0].summary}", "findings", [])
    if findings and findings[0].cause == "more-than-rounding":
        return Answer("bug", findings[0].summary, "findings", [])
    if not evidence.count:
        return Answer("undecided", "nothing is compared", "nothing", [])
    if not evidence.magnitude.any():
        return Answer("nothing", "every logprob is the other side's bit for bit", "tokens", [])
    if climbed is not None:
        return Answer("undecided", climbed.judgement.why, "ladder", _runs(evidence))
    return Answer("undecided", _too_few_precisions(evidence), "nothing", _runs(evidence))


def _too_few_precisions(evidence: Evidence) -> str:
    dtypes = set(evidence.dtypes.values())
    mean = float(evidence.magnitude.mean())
    if dtypes == {"float32"}:
        usual = roundoff.LIMIT * roundoff.LEAST_FACTOR["mean"] * roundoff.UNIT_ROUNDOFF["float32"]
        beside = "no more than" if mean <= usual else "more than"
        return (f"one precision alone, float32; mean {mean:.2g} is {beside} the {usual:.2g} that a 135M model's "
                "rounding leaves")  # fmt: skip
    return "one precision alone: rounding shrinks with the dtype's roundoff, a mistake stays"


def _runs(evidence: Evidence) -> list[str]:
    """What is cheap and was not done, and which run would decide."""
    beside = [] if evidence.known.has("rescored") else [
        f"{evidence.rescoring}: one float32 pass shows temperature, truncation, labels and head"
    ]  # fmt: skip
    return [*beside, *_deciding(evidence)]


def _deciding(evidence: Evidence) -> list[str]:
    missing, size = "float32", "smaller"
    if set(evidence.dtypes.values()) == {"float32"}:
        missing, size = "bfloat16", "larger"
    same = f"score the same tokens with both sides in {missing}"
    requested = evidence.attempt.requested() if evidence.attempt is not None else None
    if requested is None:
        return [f"{same}, too, and look at that pair: rounding is thousands of times {size} there, a mistake as large"]
    if requested["strategy"] == IMPORTED:
        return [
            f"{same}, and import them as these were, but with --dtype {missing}: under one --experiment, and declared "
            "alike by --checkpoint and --semantics, the two attempts are a ladder; then",
            f"xd-doctor {evidence.attempt} and the new one",
        ]
    experiment = requested["experiment_id"]
    return [
        f"{same}: add it to {experiment}.json as experiments/ladder.json does (rollout.dtype and "
        "training.compute_dtype, as a pair), then",
        f"make run EXP={experiment} && xd-doctor runs/{experiment}/cases/*/a*",
    ]


def require_several(evidences: Sequence[Evidence]) -> None:
    """XdError 2 when a series has fewer than two steps."""
    if len(evidences) < 2:
        raise XdError("a series has two attempts or more", status=Status.USAGE, code="bad-series",
                      found=len(evidences))  # fmt: skip
