"""What adapters share while they plan: widths, semantics beyond a temperature, refusals, a declared fallback. No
torch.
"""

from __future__ import annotations

from typing import Any

from libxd.identity import UNPROCESSED
from libxd.knobs import Knob
from libxd.runtimes.protocol import KnobRecord

#: bytes an element
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
ATTENTION_KNOB = "training.attention_backend"
#: what takes the place of an attention that is not there, where a fallback is declared
FALLBACK_ATTENTION = "sdpa"


def beyond_temperature(semantics: dict[str, Any]) -> bool:
    """Whether logprobs are meant behind more than a temperature: behind truncation or penalties."""
    processing = {name: value for name, value in UNPROCESSED.items() if name != "temperature"}
    return semantics["logprobs"] == "processed" and any(semantics[name] != value for name, value in processing.items())


def record(knob: Knob, requested: Any, reason: str | None, how: str, allow_fallback: frozenset[str]) -> KnobRecord:
    """The record of a knob: applied in the way that `how` says, or, for a reason, not.

    Attention alone has a fallback, and only where the intervention declares it.
    """
    if reason is None:
        return KnobRecord(knob.path, requested, requested, "applied", knob.lifecycle, how)
    if knob.path == ATTENTION_KNOB and knob.path in allow_fallback:
        evidence = f"{reason}; {FALLBACK_ATTENTION} takes its place"
        return KnobRecord(knob.path, requested, FALLBACK_ATTENTION, "fallback", knob.lifecycle, evidence)
    return KnobRecord(knob.path, requested, None, "unsupported", knob.lifecycle, reason)


def would_be(records: list[KnobRecord]) -> dict[str, Any]:
    """Knob -> what an engine is built with; of a knob that is refused, what it would be if its reason fell away."""
    return {
        record.knob: record.requested if record.status == "unsupported" else record.materialized for record in records
    }


def lacking(ranks: int, devices: int) -> str:
    """Why so many ranks find no place on a machine with so many CUDA devices."""
    return f"{ranks} ranks need a CUDA device each, and this machine has {devices or 'none'}"
