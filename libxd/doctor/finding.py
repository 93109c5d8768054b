"""What a detector says: a candidate cause with its evidence, and the rule by which it speaks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: how firmly a rule singles out its cause. An order in which to look, and no probability
FACT = 0.95  # it stands in the files
FIT = 0.9  # the numbers are those of this very cause, by a third scorer
SHAPE = 0.7  # a shape that this cause makes, and few others
SYMPTOM = 0.4  # something is wrong there, by whatever cause
HINT = 0.2  # compatible with this cause, and with others


@dataclass(frozen=True)
class Finding:
    """A candidate cause.

    cause: a stable kebab-case word. likelihood: in (0, 1], by the rule's kind; findings are ordered by it, and it is no
    probability. summary: one line without figures. evidence: lines with figures (nats, unless they say otherwise) and
    places of tokens. next: what to try, an exact command where there is one.
    """

    cause: str
    likelihood: float
    summary: str
    evidence: list[str]
    next: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Rule:
    """How a detector decides. Data, so that `xd-doctor --rules` and docs/doctor.md show what is applied.

    least_tokens, least_sequences: the smallest sample at which it speaks; of active tokens, and of sequences that have
    one. needs: what must be at hand beside the two score files, by the names of `Known`. false_alarms: how often it
    speaks of a pair without a mistake.
    """

    detector: str
    causes: tuple[str, ...]
    decides: str
    false_alarms: str
    least_tokens: int = 1
    least_sequences: int = 1
    needs: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "causes": list(self.causes), "needs": list(self.needs)}
