"""An attempt's records, read and found to be one case's: the request, what must be scored, what was to be built.

The attempt's directory bears the case id, the request's content must give it, identity.json must hold the identity that
was requested, and materialized.json must be about that request and bear the execution key of its own content. So no
record can be exchanged alone, and exchanging all of them makes another case. Every tool that reads more than one of
them reads them here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from libxd import canon, materialize, planner
from libxd.errors import XdError
from libxd.knobs import of_side
from libxd.rundir import SIDES, Attempt

#: the records that a verdict rests on, in the order in which the tools write them
JUDGED = ("requested.json", "identity.json", "materialized.json", *(f"readback_{side}.json" for side in SIDES))
#: what a record says beside what was measured: where its files lay, which engine of its process scored
_BESIDE = {"requested.json": "locations", **{f"readback_{side}.json": "reuse" for side in SIDES}}


@dataclass(frozen=True)
class Case:
    """requested.json, identity.json and materialized.json of one attempt, which belong together."""

    requested: dict[str, Any]
    identity: dict[str, Any]
    materialized: dict[str, Any]

    @classmethod
    def read(cls, attempt: Attempt) -> Case:
        """XdError 66 or 65 when one is missing, damaged, contradicts itself or is not of this case."""
        case = cls(attempt.requested(), attempt.identity(), attempt.materialized())
        case.require_one(attempt)
        return case

    def require_one(self, attempt: Attempt) -> None:
        """XdError 65 unless the three records, read from `attempt`, are of one case."""
        planner.require_sound(self.requested, str(attempt.file("requested.json")))
        for flaw in (*self._identity_flaws(), *self._materialized_flaws()):
            name, pointer, message, found, expected = flaw
            raise XdError(message, code="foreign-file", where=str(attempt.file(name)), path=pointer, found=found,
                          expected=expected, hint="take a new attempt")  # fmt: skip

    def _identity_flaws(self) -> Iterator[tuple[str, str, str, Any, Any]]:
        name = "identity.json"
        for part, wanted in self.requested["identity"].items():
            if self.identity[part] != wanted:
                yield name, f"/{part}", "is not the identity that was requested", self.identity[part], wanted
        for side, weights in self.identity["weights"].items():
            if weights and weights["digest"] != (root := canon.digest(weights["parameters"])):
                what = "is not the digest of the parameters beside it"
                yield name, f"/weights/{side}/digest", what, weights["digest"], root

    def _materialized_flaws(self) -> Iterator[tuple[str, str, str, Any, Any]]:
        name, what = "materialized.json", "does not belong to the request beside it"
        for key in ("repeat", "submission"):
            if self.materialized[key] != self.requested[key]:
                yield name, f"/{key}", what, self.materialized[key], self.requested[key]
        if self.requested["strict_fallback"] and not self.materialized["strict"]:
            yield name, "/strict", "is less strict than what was requested", False, True
        ready = self.materialized["status"] == "ready"  # else an adapter may have answered another request
        for side, plan in self.materialized["sides"].items():
            found, every = sorted(record["knob"] for record in plan["knobs"]), sorted(k.path for k in of_side(side))
            if ready and found != every:
                yield name, f"/sides/{side}/knobs", "does not hold one record of each knob", found, every
            for index, record in enumerate(plan["knobs"] if ready else ()):
                wanted = planner.requested(self.requested, side, record["knob"])
                if record["requested"] != wanted:
                    yield name, f"/sides/{side}/knobs/{index}/requested", what, record["requested"], wanted
        key = materialize.execution_key(self.materialized)
        if key != self.materialized["execution_key"]:
            message = "the execution key is not that of its content"
            yield name, "/execution_key", message, self.materialized["execution_key"], key


def digest(name: str, value: Mapping[str, Any]) -> str:
    """The digest by which a verdict names a record that it rests on.

    Of the canonical value without the one member that differs between two attempts that measured the same: the
    `locations` of requested.json, the `reuse` of a readback.
    """
    return canon.digest({key: item for key, item in value.items() if key != _BESIDE.get(name)})
