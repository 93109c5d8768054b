"""What `llamacpp` would build for a row, and the door to its engine. No torch and no llama.cpp until it opens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from libxd import knobs, planner
from libxd.errors import Status, XdError
from libxd.runtimes import planning
from libxd.runtimes.protocol import EngineContext, KnobRecord, SidePlan

if TYPE_CHECKING:
    from libxd.runtimes.protocol import Engine

#: threads of llama.cpp: their number decides how sums are cut
THREADS = 1
#: an interpreter with torch and llama.cpp in it, and a vocabulary of answers as JSON
_PROCESS_BYTES = 1 << 30

#: how each knob is applied, in words
_APPLIED = {
    "batch.size": "one sequence at a time, in the server's only slot",
    "rollout.tensor_parallel_size": "one process holds every matrix whole",
    "rollout.context_parallel_size": "one process holds the whole cache",
    "rollout.dtype": "the checkpoint written as a float32 GGUF file, the cache's types set to float32",
    "rollout.enable_prefix_caching": "the server's cache_prompt in a sequence's first request",
    "rollout.enforce_eager": "llama.cpp has no compiled path on the CPU; how its graph ran, the server does not show",
    "logp.backend": "the bound operator is called on the server's logprobs of the whole vocabulary",
}


class LlamaCpp:
    """The runtime; rollout alone, on the CPU."""

    name = "llamacpp"
    version = "1"
    sides = frozenset({"rollout"})
    registers_smoke_operators = False
    operator_inputs = frozenset({"logits"})

    def materialize(
        self, side: str, row: dict[str, Any], environment: dict[str, Any], allow_fallback: frozenset[str]
    ) -> SidePlan:
        """Pure. What llama.cpp's server cannot do, or does in no way that could be told apart, is unsupported."""
        records = [_record(knob, planner.requested(row, side, knob.path), allow_fallback)
                   for knob in knobs.of_side(side)]  # fmt: skip
        value = {record.knob: record.materialized for record in records}
        construction = {
            "dtype": value["rollout.dtype"],
            "enable_prefix_caching": value["rollout.enable_prefix_caching"],
            "enforce_eager": value["rollout.enforce_eager"],
            "llamacpp_threads": THREADS,
            "checkpoint": row["identity"]["checkpoint"]["digest"],
            # by which the context is sized
            "sequences": row["identity"]["sequences"]["digest"],
        }
        world = {
            "tensor_parallel_size": value["rollout.tensor_parallel_size"],
            "context_parallel_size": value["rollout.context_parallel_size"],
        }
        return SidePlan(
            records,
            engine={"device": "cpu", **construction, **world},
            construction=construction,
            context=world,
            process={"device": "cpu", **world},
            refusals=_refusals(row, environment),
        )

    def numerics(self) -> dict[str, Any]:
        """torch's settings that are those of the whole process: operators compute with it."""
        from libxd.runtimes import live

        return live.numerics()

    def estimate_bytes(self, side: str, engine: dict[str, Any], locations: dict[str, Any]) -> int:
        """The weights in float32, mapped, and the process; 0 when the checkpoint is not at hand."""
        from libxd.runtimes import sizes

        directory = locations["checkpoint"]
        return sizes.weights(directory, planning.BYTES["float32"]) + _PROCESS_BYTES if directory else 0

    def open(self, side: str, plan: dict[str, Any], context: EngineContext) -> Engine:
        """XdError 69 where xllamacpp is not installed, or the checkpoint cannot be written as GGUF here."""
        try:
            from xd_runtime_llamacpp.engine import RolloutEngine
        except ModuleNotFoundError as error:
            raise XdError(f"{error.name} is not installed for the interpreter that scores", status=Status.REFUSED,
                          code="not-installed", where=self.name,
                          hint="name one that has it with XD_PYTHON_LLAMACPP or --python") from error  # fmt: skip
        return RolloutEngine(context.locations, plan["engine"])


def _refusals(row: dict[str, Any], environment: dict[str, Any]) -> list[str]:
    """Reasons that belong to no knob."""
    reasons, identity = [], row["identity"]
    if row["scenario"]["device"] != "cpu":
        reasons.append(f"llamacpp runs on the CPU alone; the scenario asks for {row['scenario']['device']}")
    if "torch" not in environment["packages"]:
        reasons.append(
            "torch, which operators compute with, is not installed for the interpreter that would score; name one that "
            "has it with XD_PYTHON_LLAMACPP or --python-rollout"
        )
    if identity["checkpoint"]["synthetic"]:
        reasons.append("llamacpp scores checkpoint directories, no synthetic model")
    if identity["rollout_mode"] != "decode":
        reasons.append("llama.cpp's server gives logprobs of tokens that it decodes, none of a prompt: no mode prefill")
    if planning.beyond_temperature(identity["semantics"]):
        reasons.append("llamacpp processes logprobs by temperature alone: no top-p, top-k or penalties")
    return reasons


def _record(knob: knobs.Knob, requested: Any, allow_fallback: frozenset[str]) -> KnobRecord:
    objection = _OBJECTIONS.get(knob.path)
    return planning.record(knob, requested, objection and objection(requested), _APPLIED[knob.path], allow_fallback)


def _one_at_a_time(size: int) -> str | None:
    if size == 1:
        return None
    return f"the server does not show what it decodes together: {size} sequences at a time could not be seen"


def _one_process(size: int) -> str | None:
    return None if size == 1 else f"this runtime scores in one process; {size} ranks were asked for"


def _float32(dtype: str) -> str | None:
    if dtype == "float32":
        return None
    return f"llama.cpp keeps norms and activations in float32 whatever its matrices are in: no engine of {dtype} alone"


def _no_compiled_path(enforce_eager: bool) -> str | None:
    return None if enforce_eager else "llama.cpp has no compiled path on the CPU"


_OBJECTIONS: dict[str, Callable[[Any], str | None]] = {
    "batch.size": _one_at_a_time,
    "rollout.tensor_parallel_size": _one_process,
    "rollout.context_parallel_size": _one_process,
    "rollout.dtype": _float32,
    "rollout.enforce_eager": _no_compiled_path,
}
