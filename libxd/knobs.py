"""The ten knobs: every configuration change that xd may turn, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from libxd.errors import XdError

Side = Literal["rollout", "training"]
SIDES: tuple[Side, ...] = ("rollout", "training")

#: the knob that says in which dtype a side holds its weights and computes
DTYPE_OF_SIDE = {"rollout": "rollout.dtype", "training": "training.compute_dtype"}

#: from the most exact to the least: a mixed case is judged by the threshold of the later of two
DTYPES = ("float32", "float16", "bfloat16")
DTYPE_ALIASES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
#: A backend id that changed its name; the new one is what rows and evidence hold.
BACKEND_ALIASES = {"rlkernel.reference_logp": "xd.reference_logp"}

#: Settings that the contract defers: refused by name, so that nobody believes they were varied.
DEFERRED = (
    "quantization", "fp8", "kv_cache_dtype", "moe", "expert_parallel_size", "speculative", "speculative_decoding",
    "pipeline_parallel_size",
)


@dataclass(frozen=True)
class Knob:
    """One knob. `lifecycle` is the least that must be done anew when it changes.

    request: the next request; construction: a new engine; process: a new process (a new world of ranks).
    """

    path: str
    sides: tuple[Side, ...]
    type: Literal["integer", "boolean", "choice", "name"]
    lifecycle: Literal["request", "construction", "process"]
    meaning: str
    values: tuple[str, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)


_ALL = (
    Knob("batch.size", SIDES, "integer", "request",
         "How many samples are submitted together, in canonical order; it changes no engine setting."),
    Knob("rollout.tensor_parallel_size", ("rollout",), "integer", "process",
         "Over how many ranks the rollout engine splits each weight matrix."),
    Knob("rollout.context_parallel_size", ("rollout",), "integer", "process",
         "Over how many ranks the rollout engine splits the positions of a sequence."),
    Knob("rollout.dtype", ("rollout",), "choice", "construction",
         "The dtype the rollout engine holds its weights in and computes with.", DTYPES, DTYPE_ALIASES),
    Knob("rollout.enable_prefix_caching", ("rollout",), "boolean", "construction",
         "Whether the rollout engine computes a prompt prefix once and shares its keys and values."),
    Knob("rollout.enforce_eager", ("rollout",), "boolean", "construction",
         "True: operation by operation; false: the engine's compiled or graph path."),
    Knob("training.attention_backend", ("training",), "choice", "construction",
         "Which attention implementation the training side scores with.",
         ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
         {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "flash": "flash_attention_2",
          "flex": "flex_attention"}),
    Knob("training.compute_dtype", ("training",), "choice", "construction",
         "The dtype the training side computes with.", DTYPES, DTYPE_ALIASES),
    Knob("logp.backend", SIDES, "name", "construction",
         "Which selected_logprob operator both sides use, where no explicit mapping binds one a side.",
         (), BACKEND_ALIASES),
    Knob("training.sharding", ("training",), "choice", "process",
         "How the training side spreads its parameters over ranks.", ("unsharded", "fsdp"),
         {"none": "unsharded", "fsdp2": "fsdp"}),
)  # fmt: skip

CATALOG: dict[str, Knob] = {knob.path: knob for knob in _ALL}
MAX_INTEGER = 65536


def of_side(side: str) -> list[Knob]:
    """The knobs that bear on one side, in catalog order."""
    return [knob for knob in _ALL if side in knob.sides]


def get(path: str, where: str, pointer: str) -> Knob:
    """The knob of that path; XdError for a deferred setting (by name) and for anything else."""
    if path in CATALOG:
        return CATALOG[path]
    if any(name in path.lower() for name in DEFERRED):
        raise XdError(f"{path} is deferred: this contract does not vary it", code="deferred-knob", where=where,
                      path=pointer)
    raise XdError("no such knob", code="unknown-knob", where=where, path=pointer, found=path,
                  expected="one of " + ", ".join(CATALOG))


def normalise(path: str, value: Any, where: str, pointer: str) -> Any:
    """The canonical value of a knob (aliases resolved), or XdError with the place."""
    knob = get(path, where, pointer)
    if knob.type == "boolean" and isinstance(value, bool):
        return value
    if knob.type == "integer" and type(value) is int:
        if 1 <= value <= MAX_INTEGER:
            return value
        raise XdError(f"{path} is out of range", code="out-of-range", where=where, path=pointer, found=value,
                      expected=f"1 to {MAX_INTEGER}")
    if knob.type in ("choice", "name") and isinstance(value, str) and value:
        canonical = knob.aliases.get(value, value)
        if knob.type == "name" or canonical in knob.values:
            return canonical
        raise XdError(f"{path} does not know this value", code="unknown-value", where=where, path=pointer, found=value,
                      expected=" or ".join((*knob.values, *knob.aliases)))
    expected = {"boolean": "true or false", "integer": "a whole number", "choice": "a string", "name": "a string"}
    raise XdError(f"{path} has the wrong type", code="wrong-type", where=where, path=pointer, found=value,
                  expected=expected[knob.type])
