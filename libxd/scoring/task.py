"""What one attempt asks of one side, and whether it has been answered."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from libxd import planner, shards
from libxd.errors import Status, XdError
from libxd.records import Case
from libxd.rundir import Attempt, refusal_text
from libxd.runtimes.protocol import Request
from libxd.scores import ScoreFile
from libxd.scoring.lifecycle import Needs


@dataclass(frozen=True)
class Task:
    """One side of one materialised attempt: its files, read strictly and found to belong together.

    shard_tokens: scores of more tokens than these are written in shards.
    """

    attempt: Attempt
    side: str
    requested: dict[str, Any]
    identity: dict[str, Any]
    materialized: dict[str, Any]
    shard_tokens: int = shards.SHARD_TOKENS

    @classmethod
    def read(cls, path: str | os.PathLike[str], side: str, shard_tokens: int = shards.SHARD_TOKENS) -> Task:
        """XdError 65 or 66 for files that are broken, absent or of different cases; 69 for a refused attempt."""
        attempt = Attempt.open(path)
        case = Case.read(attempt)
        if case.requested["strategy"] == planner.IMPORTED:
            raise XdError("was imported, and no engine of xd scores it", status=Status.REFUSED, code="imported",
                          where=str(attempt), hint="plan an experiment over its sequences")  # fmt: skip
        task = cls(attempt, side, case.requested, case.identity, case.materialized, shard_tokens)
        if task.materialized["status"] == "refused":
            raise _refused(attempt, task.materialized["refusals"],
                           "it was refused when it was materialised")
        return task

    @property
    def plan(self) -> dict[str, Any]:
        """This side of materialized.json."""
        return self.materialized["sides"][self.side]

    @property
    def needs(self) -> Needs:
        return Needs.of(self.plan, self.identity)

    @property
    def request(self) -> Request:
        """The request-level part of the case."""
        return Request(
            batch_size=next(knob["materialized"] for knob in self.plan["knobs"] if knob["knob"] == "batch.size"),
            mode=self.identity["rollout_mode"] if self.side == "rollout" else "teacher_forced",
            submission=self.materialized["submission"],
            semantics=self.identity["semantics"],
        )

    @property
    def stamp(self) -> dict[str, Any]:
        """What readback and score file say of where they belong."""
        return {
            "side": self.side,
            "case_id": self.materialized["case_id"],
            "repeat": self.materialized["repeat"],
            "execution_key": self.materialized["execution_key"],
        }

    def answered(self) -> bool:
        """Whether readback and score file both stand and are this task's.

        False when the scoring must (still, or again) be done. XdError 69 when it was done and refused; 73 when a
        sealed attempt would grow or other evidence stands there; 65 when what stands there is broken.
        """
        readback_name = f"readback_{self.side}.json"
        self.attempt.refuse_growth(readback_name)
        if not (scored := self.attempt.scored(self.side)):
            self.attempt.refuse_growth(shards.whole(self.side))
        if not self.attempt.has(readback_name):
            return False
        readback = self.attempt.readback(self.side)
        for key, value in self.stamp.items():
            if readback[key] != value:
                raise XdError(
                    "a readback of another execution stands there and was kept", status=Status.CONFLICT,
                    code="output-differs", where=str(self.attempt.file(readback_name)), path=f"/{key}",
                    found=readback[key], expected=value, hint="take a new attempt",
                )
        if readback["status"] == "refused":
            if scored:
                raise XdError("scores stand beside a readback that refused them", code="tampered",
                              where=str(self.attempt.scores(self.side)[0]), hint="take a new attempt")
            raise _refused(self.attempt, readback["refusals"],
                           "its scores were refused at read-back", hint="a retry needs a new attempt")
        if scored:
            num_tokens = self.identity["sequences"]["num_tokens"]
            ScoreFile.of(self.attempt, self.side, self.materialized, num_tokens).require(readback["observed"])
        return scored


def _refused(attempt: Attempt, reasons: list[dict[str, Any]], what: str, hint: str = "") -> XdError:
    return XdError(f"{what}: {refusal_text(reasons)}", status=Status.REFUSED, code="refused", where=str(attempt),
                   hint=hint)
