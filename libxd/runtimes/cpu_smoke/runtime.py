"""What `cpu-smoke` would build for a row, and the doors to its engines and its generator. No torch until one opens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from libxd import knobs, planner
from libxd.errors import Status, XdError
from libxd.runtimes import planning
from libxd.runtimes.cpu_smoke import geometry
from libxd.runtimes.cpu_smoke.geometry import Geometry
from libxd.runtimes.protocol import EngineContext, KnobRecord, SidePlan

if TYPE_CHECKING:
    from libxd.runtimes.protocol import Engine, Generator

#: attention of the training side; what else is asked is unsupported, or sdpa where a fallback is declared
ATTENTION = ("eager", "sdpa")
#: the most tokens whose products are held at once, in float32, with room for their temporaries
_WORKSPACE_BYTES = 256 << 20

#: how each knob's real effect comes about
_MECHANISM = {
    "batch.size": "rows of a product decide how its inner dimension is cut (split-K)",
    "rollout.tensor_parallel_size": "matrices split over ranks, partial sums added in rank order in the compute dtype",
    "rollout.context_parallel_size": "cache blocks dealt over ranks, partial attentions merged by log-sum-exp",
    "rollout.dtype": "weights held and results rounded in it",
    "rollout.enable_prefix_caching": "full blocks of a known prefix are shared instead of computed",
    "rollout.enforce_eager": "true: each operation rounds; false: fused operations, float32 between products",
    "training.attention_backend": "the softmax written out, or torch's scaled_dot_product_attention",
    "training.compute_dtype": "weights held and results rounded in it",
    "logp.backend": "the bound operator is called on every selected token",
    "training.sharding": "parameters held as flat shards and gathered before each use",
}
#: knobs that an engine's arguments name otherwise
_ARGUMENTS = {"training.compute_dtype": "dtype", "training.attention_backend": "attention"}
_TOPOLOGY = ("tensor_parallel_size", "context_parallel_size", "sharding")


class CpuSmoke:
    """The runtime; one instance serves both sides."""

    name = "cpu-smoke"
    version = "1"
    sides = frozenset(knobs.SIDES)
    registers_smoke_operators = True
    operator_inputs = frozenset({"logits", "hidden"})

    def materialize(
        self, side: str, row: dict[str, Any], environment: dict[str, Any], allow_fallback: frozenset[str]
    ) -> SidePlan:
        """Pure. A real checkpoint, another device or semantics beyond a temperature refuse the side as a whole."""
        reasons = _refusals(row, environment)
        if reasons:
            return SidePlan([], {"device": "cpu"}, {}, {}, {}, reasons)
        shape = geometry.of(row["identity"]["checkpoint"]["synthetic"])
        records = [
            _record(knob, planner.requested(row, side, knob.path), shape, allow_fallback)
            for knob in knobs.of_side(side)
        ]
        arguments = {
            _ARGUMENTS.get(record.knob, record.knob.partition(".")[2]): record.materialized
            for record in records
            if record.knob not in ("batch.size", "logp.backend")
        }
        return SidePlan(
            records,
            engine={"device": "cpu", "threads": geometry.THREADS, **arguments},
            construction={name: value for name, value in arguments.items() if name not in _TOPOLOGY},
            context={name: value for name, value in arguments.items() if name in _TOPOLOGY},
            process={
                "threads": geometry.THREADS,
                **{name: value for name, value in arguments.items() if name in _TOPOLOGY},
            },
        )

    def numerics(self) -> dict[str, Any]:
        """torch's settings that are those of the whole process."""
        from libxd.runtimes import live

        return live.numerics()

    def synthetic_parameters(self, synthetic: dict[str, Any], dtype: str) -> dict[str, str]:
        """Hugging Face name -> digest of what an engine must hold in `dtype`; numpy only."""
        from libxd.runtimes.cpu_smoke import weights

        return weights.digests(synthetic, dtype)

    def synthetic_model(self, synthetic: dict[str, Any]) -> dict[str, int]:
        """The sizes that a row computes layouts from."""
        shape = geometry.of(synthetic)
        return {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocab}

    def estimate_bytes(self, side: str, engine: dict[str, Any], locations: dict[str, Any]) -> int:
        """Weights of the largest synthetic model and the temporaries of one forward."""
        dtype = engine.get("dtype", "float32")
        largest = max(shape.parameter_count() for shape in geometry.GEOMETRIES.values())
        return largest * planning.BYTES[dtype] + _WORKSPACE_BYTES

    def open(self, side: str, plan: dict[str, Any], context: EngineContext) -> Engine:
        synthetic = context.identity["checkpoint"]["synthetic"]
        geometry.of(synthetic)
        if side == "rollout":
            from libxd.runtimes.cpu_smoke.rollout import RolloutEngine

            return RolloutEngine(synthetic, plan["engine"])
        from libxd.runtimes.cpu_smoke.training import TrainingEngine

        return TrainingEngine(synthetic, plan["engine"])

    def generator(self, model: str, dtype: str, device: str = "cpu") -> Generator:
        """What xd-rollout samples from; `model` is name:seed of a synthetic checkpoint. XdError 69 but for the CPU."""
        if device != "cpu":
            raise XdError("cpu-smoke samples on the CPU alone", status=Status.REFUSED, code="no-device", where=model,
                          found=device)  # fmt: skip
        name, _, seed = model.partition(":")
        if not seed.isdecimal():
            raise XdError(
                "a synthetic model is named with its seed", code="no-such-model", where=model, expected="xd-smoke-1:7"
            )
        synthetic = {"name": name, "seed": int(seed)}
        geometry.of(synthetic)
        from libxd.runtimes.cpu_smoke.generator import SmokeGenerator

        return SmokeGenerator(synthetic, dtype)


def _refusals(row: dict[str, Any], environment: dict[str, Any]) -> list[str]:
    """Reasons that belong to no knob."""
    reasons = []
    identity, semantics = row["identity"], row["identity"]["semantics"]
    if row["scenario"]["device"] != "cpu":
        reasons.append(f"cpu-smoke runs on the CPU alone; the scenario asks for {row['scenario']['device']}")
    if "torch" not in environment["packages"]:
        reasons.append("torch is not installed")
    if (identity["checkpoint"]["synthetic"] or {}).get("name") not in geometry.GEOMETRIES:
        reasons.append("cpu-smoke scores its synthetic models only: " + ", ".join(geometry.GEOMETRIES))
    if planning.beyond_temperature(semantics):
        reasons.append("cpu-smoke processes logprobs by temperature alone: no top-p, top-k or penalties")
    return reasons


def _record(knob: knobs.Knob, requested: Any, shape: Geometry, allow_fallback: frozenset[str]) -> KnobRecord:
    reason = _OBJECTIONS.get(knob.path, lambda value, shape: None)(requested, shape)
    return planning.record(knob, requested, reason, _MECHANISM[knob.path], allow_fallback)


def _no_such_attention(value: str, shape: Geometry) -> str | None:
    return None if value in ATTENTION else f"cpu-smoke has no {value}: it attends by {' or '.join(ATTENTION)}"


def _does_not_split(size: int, shape: Geometry) -> str | None:
    parts = {"key-value heads": shape.kv_heads, "vocabulary rows": shape.vocab, "MLP columns": shape.intermediate}
    uneven = [f"{count} {what}" for what, count in parts.items() if count % size]
    return f"{' and '.join(uneven)} do not split over {size} ranks" if uneven else None


_OBJECTIONS: dict[str, Callable[[Any, Geometry], str | None]] = {
    "rollout.tensor_parallel_size": _does_not_split,
    "training.attention_backend": _no_such_attention,
}
