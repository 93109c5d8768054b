"""When an engine may be kept for the next case, when it must be built anew, and when its whole process must go."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from libxd import canon
from libxd.errors import Status, XdError

Step = Literal["reuse", "rebuild", "restart"]


@dataclass(frozen=True)
class Needs:
    """What one side of a case needs of its engine, as digests. Two cases with equal needs can share an engine.

    process: the runtime and its process fingerprint, which no living process can change. construction, context (the
    distributed one) and weights (the checkpoint's identity): what an engine is built from. operator: its binding.
    Request-level arguments are in none of them.
    """

    process: str
    construction: str
    context: str
    weights: str
    operator: str

    @classmethod
    def of(cls, plan: dict[str, Any], identity: dict[str, Any]) -> Needs:
        """The needs of `plan` (a side of materialized.json) for the checkpoint of `identity` (identity.json)."""
        prints = plan["fingerprints"]
        return cls(
            process=canon.digest([plan["runtime"], prints["process"]]),
            construction=prints["construction"],
            context=prints["context"],
            weights=canon.digest(identity["checkpoint"]),
            operator=canon.digest(plan["operator"]),
        )

    def differences(self, other: Needs) -> list[str]:
        """The names of the needs in which the two differ."""
        mine, others = asdict(self), asdict(other)
        return [name for name in mine if mine[name] != others[name]]


def step(process: str | None, held: Needs | None, wanted: Needs) -> Step:
    """What must happen before a case with these needs can be scored.

    process: the process need that the living child serves (None: there is no child). held: the needs its engine was
    built for (None: it holds no engine).
    """
    if process != wanted.process:
        return "restart"
    return "reuse" if held == wanted else "rebuild"


def require_same(held: Needs | None, wanted: Needs) -> None:
    """XdError 69 `incompatible-reuse` unless an engine is held and was built for exactly these needs."""
    differing = ["engine"] if held is None else held.differences(wanted)
    if differing:
        raise XdError(
            f"an engine would be reused that was built for something else: {', '.join(differing)} differ",
            status=Status.REFUSED, code="incompatible-reuse", found=differing, expected=[],
        )
