"""What `hf` would build for a row on a machine, and the doors to its engines and its generator.

No torch until one opens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from libxd import knobs, planner
from libxd.environment import RANKS_VARIABLE
from libxd.errors import XdError
from libxd.runtimes import planning
from libxd.runtimes.hf import memory
from libxd.runtimes.protocol import EngineContext, KnobRecord, SidePlan

if TYPE_CHECKING:
    from libxd.runtimes.protocol import Engine, Generator

#: attention of the rollout side, where it is no knob
ROLLOUT_ATTENTION = "sdpa"
#: distributions, as environment.PACKAGES names them
_PACKAGE_OF = {"flash_attention_2": "flash-attn", "flash_attention_3": "flash-attn-3"}
#: the devices that kernels are written for: least and (exclusive) greatest compute capability
_CAPABILITIES = {"flash_attention_2": ((8, 0), None), "flash_attention_3": ((9, 0), (10, 0))}
_TRITON_CAPABILITY = (7, 0)
#: where no policy says more, the fewest that shard anything
_CPU_FSDP_RANKS = 2
_FLASH_DTYPES = ("float16", "bfloat16")

#: how each knob is applied, in words
_APPLIED = {
    "batch.size": "so many sequences are submitted together",
    "rollout.tensor_parallel_size": "each matrix is split over so many ranks, by output rows or input columns",
    "rollout.context_parallel_size": "keys and values are dealt over so many ranks by position, and partial attentions "
    "merged in rank order",
    "rollout.dtype": "the checkpoint is cast to it and computes in it",
    "rollout.enable_prefix_caching": "true: a prompt's keys and values are computed once and shared by its samples; "
    "false: every row's prompt is computed",
    "rollout.enforce_eager": "true: module by module; false: decoding steps through torch.compile",
    "training.attention_backend": "passed to transformers as attn_implementation",
    "training.compute_dtype": "the checkpoint is cast to it and computes in it",
    "logp.backend": "the bound operator turns hidden states or logits into logprobs",
    "training.sharding": "unsharded: one process holds every parameter whole; fsdp: each layer's are sharded (FSDP2) "
    "and gathered before use",
}


class Hf:
    """The runtime; one instance serves both sides."""

    name = "hf"
    version = "1"
    sides = frozenset(knobs.SIDES)
    registers_smoke_operators = False
    operator_inputs = frozenset({"logits", "hidden"})

    def materialize(
        self, side: str, row: dict[str, Any], environment: dict[str, Any], allow_fallback: frozenset[str]
    ) -> SidePlan:
        """Pure. What the machine lacks, or this version does not do, is unsupported with the reason."""
        device = row["scenario"]["device"]
        machine = _Machine(row, environment)
        records = [
            machine.record(knob, planner.requested(row, side, knob.path), allow_fallback)
            for knob in knobs.of_side(side)
        ]
        value = planning.would_be(records)
        if side == "rollout":
            construction = {
                "dtype": value["rollout.dtype"],
                "enable_prefix_caching": value["rollout.enable_prefix_caching"],
                "enforce_eager": value["rollout.enforce_eager"],
                "attention": ROLLOUT_ATTENTION,
            }
            world = machine.rollout_world(
                value["rollout.tensor_parallel_size"], value["rollout.context_parallel_size"]
            )
        else:
            construction = {
                "dtype": value["training.compute_dtype"],
                "attention": value["training.attention_backend"],
            }
            world = machine.training_world(value["training.sharding"])
        construction["checkpoint"] = row["identity"]["checkpoint"]["digest"]
        return SidePlan(
            records,
            engine={"device": device, "devices": machine.devices(world["world_size"]), **construction, **world},
            construction=construction,
            context=world,
            process={"device": device, **world},
            refusals=machine.refusals(row),
        )

    def numerics(self) -> dict[str, Any]:
        """torch's settings that are those of the whole process."""
        from libxd.runtimes import live

        return live.numerics()

    def estimate_bytes(self, side: str, engine: dict[str, Any], locations: dict[str, Any]) -> int:
        """`memory.estimate`; 0 when the checkpoint is not at hand."""
        return memory.estimate(side, engine, locations)

    def open(self, side: str, plan: dict[str, Any], context: EngineContext) -> Engine:
        world_size = plan["engine"]["world_size"]
        if world_size == 1:
            return self.open_rank(side, plan, context)
        from libxd.runtimes.ranks.everywhere import Everywhere

        return Everywhere(self.name, side, plan, context, world_size)

    def open_rank(self, side: str, plan: dict[str, Any], context: EngineContext) -> Engine:
        """This process's part of an engine: of all of it, or of the process group that it belongs to."""
        directory = context.locations["checkpoint"]
        if side == "rollout":
            from libxd.runtimes.hf.rollout import RolloutEngine

            return RolloutEngine(directory, plan["engine"])
        from libxd.runtimes.hf.training import TrainingEngine

        return TrainingEngine(directory, plan["engine"])

    def generator(self, model: str, dtype: str, device: str) -> Generator:
        """What xd-rollout samples from; `model` is a checkpoint directory."""
        from libxd.runtimes.hf.generator import Generator as HfGenerator

        return HfGenerator(model, dtype, device)


class _Machine:
    """What of a row can be done on its device of a machine with this environment."""

    def __init__(self, row: dict[str, Any], environment: dict[str, Any]) -> None:
        self._device = row["scenario"]["device"]
        self._rollout_mode = row["identity"]["rollout_mode"]
        self._training_dtype = row["values"]["training.compute_dtype"]
        self._packages = environment["packages"]
        self._compiler = environment["compiler"]
        self._cuda = environment["cuda"]["devices"]
        self._model: dict[str, int] = row["identity"]["model"] or {}
        self._rollout_ranks = (
            row["values"]["rollout.tensor_parallel_size"] * row["values"]["rollout.context_parallel_size"]
        )
        self._launched = _launched(environment["variables"].get(RANKS_VARIABLE, "0"))

    # -- worlds

    def rollout_world(self, tensor: int, context: int) -> dict[str, Any]:
        """Rank c * T + t is the t-th of T tensor ranks of the c-th context rank; who holds which vocabulary rows."""
        vocabulary = self._model.get("vocab_size")
        rows = None
        if vocabulary is not None:
            shard = -(-vocabulary // tensor)
            rows = [[min(t * shard, vocabulary), min((t + 1) * shard, vocabulary)] for t in range(tensor)]
        return {
            "world_size": tensor * context,
            "tensor_parallel_size": tensor,
            "context_parallel_size": context,
            "rank_order": ["context", "tensor"],
            "vocabulary_rows": rows,
        }

    def training_world(self, sharding: str) -> dict[str, Any]:
        """world_size None: what is here is too few for fsdp, and no policy says how many there would be."""
        ranks = self.fsdp_ranks()
        return {"world_size": 1 if sharding == "unsharded" else ranks if ranks > 1 else None, "sharding": sharding}

    def devices(self, ranks: int | None) -> int | None:
        """How many of its device an engine of so many ranks takes: a GPU each; a CPU serves them all."""
        return ranks if self._device == "cuda" else 1

    def fsdp_ranks(self) -> int:
        """What a launcher will start, by policy; else a rank a device, and on a CPU two."""
        return self._launched or (len(self._cuda) if self._device == "cuda" else _CPU_FSDP_RANKS)

    def places(self, ranks: int) -> str | None:
        """Why so many ranks find no place on this machine; a launcher brings machines of its own."""
        if ranks == 1 or self._device == "cpu" or ranks in (len(self._cuda), self._launched):
            return None
        if ranks > len(self._cuda):
            return (f"{planning.lacking(ranks, len(self._cuda))} (over several machines: a launcher, and "
                    f"{RANKS_VARIABLE}={ranks})")  # fmt: skip
        return None

    # -- knobs

    def refusals(self, row: dict[str, Any]) -> list[str]:
        """Reasons that belong to no knob."""
        reasons = [f"{name} is not installed" for name in ("torch", "transformers") if name not in self._packages]
        if self._device == "cuda" and not self._cuda:
            reasons.append("the scenario asks for a CUDA device and there is none")
        if row["identity"]["checkpoint"]["synthetic"]:
            reasons.append("hf scores checkpoint directories, no synthetic model")
        semantics = row["identity"]["semantics"]
        if planning.beyond_temperature(semantics):
            reasons.append("hf processes logprobs by temperature alone: no top-p, top-k or penalties")
        return reasons

    def record(self, knob: knobs.Knob, requested: Any, allow_fallback: frozenset[str]) -> KnobRecord:
        objection = _OBJECTIONS.get(knob.path)
        reason = objection(self, requested) if objection else None
        return planning.record(knob, requested, reason, _APPLIED[knob.path], allow_fallback)

    def tensor_parallel(self, size: int) -> str | None:
        if size > 1 and (kv_heads := self._model.get("num_key_value_heads", size)) % size:
            return f"the model's {kv_heads} key-value heads do not split over {size} ranks"
        return self.places(self._rollout_ranks) if size > 1 else None

    def context_parallel(self, size: int) -> str | None:
        return self.places(self._rollout_ranks) if size > 1 else None

    def sharding(self, sharding: str) -> str | None:
        if sharding == "unsharded":
            return None
        ranks = self.fsdp_ranks()
        if ranks < 2:
            return (f"fsdp needs two ranks or more, a CUDA device each, and this machine has "
                    f"{len(self._cuda) or 'none'} (over several machines: a launcher, and {RANKS_VARIABLE} says how "
                    "many)")  # fmt: skip
        return self.places(ranks)

    def prefix_caching(self, enabled: bool) -> str | None:
        if enabled and self._rollout_mode == "prefill":
            return "rollout mode prefill keeps no keys and values that samples could share"
        return None

    def compiled(self, enforce_eager: bool) -> str | None:
        if enforce_eager:
            return None
        if self._rollout_mode == "prefill":
            return "decoding steps are what is compiled, and rollout mode prefill has none"
        if self._rollout_ranks > 1:
            return "decoding steps that wait for other ranks are not compiled as one graph"
        return self._cannot_compile("the compiled path")

    def attention(self, backend: str) -> str | None:
        package = _PACKAGE_OF.get(backend)
        if package and self._device != "cuda":
            return f"{backend} runs on CUDA alone, not on the {self._device.upper()}"
        if package and package not in self._packages:
            return f"{backend} needs the package {package}, which is not installed"
        if package and self._training_dtype not in _FLASH_DTYPES:
            return f"{backend} computes in {' or '.join(_FLASH_DTYPES)}, not in {self._training_dtype}"
        if package:
            return self._too_old_or_new(backend, *_CAPABILITIES[backend])
        return self._cannot_compile(backend) if backend == "flex_attention" else None

    def _too_old_or_new(self, what: str, least: tuple[int, int], below: tuple[int, int] | None) -> str | None:
        """Of the first device, which is the one that computes; without any there is nothing to compare."""
        found = self._cuda[0]["capability"] if self._cuda else None
        capability = tuple(map(int, found.split("."))) if found else least
        if capability < least:
            return f"{what} needs compute capability {least[0]}.{least[1]} or more, and this device has {found}"
        if below and capability >= below:
            return f"{what} needs a compute capability below {below[0]}.{below[1]}, and this device has {found}"
        return None

    def _cannot_compile(self, what: str) -> str | None:
        """torch.compile writes C++ for the CPU and Triton kernels for CUDA."""
        if self._device == "cuda":
            if "triton" not in self._packages:
                return f"{what} needs the package triton, which is not installed"
            return self._too_old_or_new(what, _TRITON_CAPABILITY, None)
        return None if self._compiler else f"{what} needs a C++ compiler, and none is on the path"


def _launched(ranks: str) -> int:
    """The ranks that a launcher will start; 0 when none is said. XdError 65 for what is no number."""
    if not (ranks.isascii() and ranks.isdecimal()):
        raise XdError("no number of ranks", code="bad-variable", where=f"${RANKS_VARIABLE}", found=ranks)
    return int(ranks)


_OBJECTIONS: dict[str, Callable[[_Machine, Any], str | None]] = {
    "rollout.tensor_parallel_size": _Machine.tensor_parallel,
    "rollout.context_parallel_size": _Machine.context_parallel,
    "rollout.enable_prefix_caching": _Machine.prefix_caching,
    "rollout.enforce_eager": _Machine.compiled,
    "training.attention_backend": _Machine.attention,
    "training.sharding": _Machine.sharding,
}
