"""What a runtime promises xd: the types between an adapter, the planner's rows and the scorer's child.

A runtime is found by entry point (`xd.runtimes`). `materialize` and `estimate_bytes` are pure and load neither torch
nor an engine; `open` runs in the scorer's child alone. Shapes: B sequences, T tokens over all of them (flat).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np

    from libxd.sequences import Sequences

Status = Literal["applied", "fallback", "unsupported", "unobservable", "error"]
Mode = Literal["decode", "prefill", "teacher_forced"]
Submission = Literal["canonical", "rotated"]


@dataclass(frozen=True)
class KnobRecord:
    """What an adapter will do about one knob: `requested` and `materialized` are catalog values.

    `lifecycle`: "request", "construction" or "process", what must be done anew; not less than `libxd.knobs` says.
    `evidence` says in plain words how it will be done, or why it cannot be; it enters no digest.
    """

    knob: str
    requested: Any
    materialized: Any
    status: Status
    lifecycle: str
    evidence: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SidePlan:
    """One side of a materialised case.

    `engine` holds the engine arguments (JSON, no path). `construction`, `context` (the distributed one) and `process`
    are digested into the three fingerprints: an engine is kept while all three stay equal. `refusals` are the reasons
    that belong to no single knob, such as a device that is not there; each makes the side unsupported.
    """

    knobs: list[KnobRecord]
    engine: dict[str, Any]
    construction: dict[str, Any]
    context: dict[str, Any]
    process: dict[str, Any]
    refusals: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class EngineContext:
    """What the child hands an opening engine: the case's identity, and where its files are."""

    identity: dict[str, Any]
    locations: dict[str, Any]


@dataclass(frozen=True)
class Observation:
    """A knob as the live engine shows it. `value` None: it cannot be shown. `evidence` is JSON."""

    value: Any
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """One scoring of all sequences, `batch_size` of them submitted together, in an order `submission_batches` gives."""

    batch_size: int
    mode: Mode
    submission: Submission
    semantics: dict[str, Any]


def submission_batches(num_sequences: int, submission: Submission, batch_size: int) -> list[list[int]]:
    """The batches of a request: sequence numbers, `batch_size` of them at a time; the last may be smaller.

    canonical: in the order of the sequences file. rotated: the same order begun half a batch later, so that no batch
    holds what a canonical one does; where a batch holds one sequence, or all, begun in the middle.
    """
    size = min(batch_size, num_sequences)
    first = 0
    if submission == "rotated":
        first = size // 2 if 1 < size < num_sequences else num_sequences // 2
    order = [(first + i) % num_sequences for i in range(num_sequences)]
    return [order[i : i + size] for i in range(0, num_sequences, size)]


@dataclass(frozen=True)
class Piece:
    """`count` tokens of `sequence`, from its token `start` on, that went into one forward."""

    sequence: int
    start: int
    count: int


@dataclass
class ObservedInputs:
    """What the model was really fed, a cell a token of the flat batch (`libxd/scoring/observer.py` records it).

    token_ids int32 [T], selected_ids int32 [T] (the ids whose logprobs were taken; where none was taken, the fed id),
    positions int32 [T], attention_mask bool [T], scored bool [T] (a logprob was taken). A token that reached no model
    has id and position -1. `cache` is whether keys and values outlived a forward. `forwards`: what went into the model
    together, forward by forward. `head_outputs`: `checksum` of each tensor of logits as the head gave it. None where
    the engine does not show it.
    """

    token_ids: np.ndarray
    selected_ids: np.ndarray
    positions: np.ndarray | None
    attention_mask: np.ndarray | None
    scored: np.ndarray
    cache: Literal["kv_cache", "none"] | None
    forwards: list[list[Piece]] | None
    head_outputs: frozenset[int] | None = None


@dataclass
class Scores:
    """What one side says: logprobs float32 [T] in nats, a quiet NaN where nothing was scored.

    Index i belongs to token i given the tokens before it. `logits_dtype` is the dtype that the head returned; None when
    no logits were seen, because the operator takes hidden states.
    """

    logprobs: np.ndarray
    observed: ObservedInputs
    logits_dtype: str | None


class BytesElsewhere(Protocol):
    """Little-endian bytes in a device's memory. They may change when the iterator that gave them goes on."""

    def begin_blake3(self, prefix: bytes) -> Callable[[], str]:
        """Begin BLAKE3 over the prefix and them as they are now; what is returned waits for its 64 hex digits."""


class Engine(Protocol):
    """A live scorer. An engine shows every knob of its side in `settings` or, once it has scored, in `behaviour`."""

    def settings(self) -> dict[str, Observation]:
        """The knobs that can be read from the live objects before anything is scored."""

    def bind(self, operator: Any) -> None:
        """Use this selected-logprob instance from now on."""

    def state(self) -> dict[str, Any]:
        """{"mode": "eval" | "train", "optimizer": bool} as the model and the process are now; None: not to be seen."""

    def parameters(self) -> Iterator[tuple[str, str, tuple[int, ...], bytes | BytesElsewhere]] | None:
        """The weights held now: Hugging Face name, dtype name, shape, raw little-endian bytes. None: not to be seen."""

    def buffers(self) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
        """What else the model holds between calls and no checkpoint pins, in the same form; the KV cache is none."""

    def score(self, sequences: Sequences, request: Request) -> Scores:
        """The logprobs of the frozen tokens; nothing is generated, nothing of the model changes."""

    def behaviour(self) -> dict[str, Observation]:
        """The knobs that only running shows, as the last `score` ran."""

    def describe(self) -> dict[str, Any]:
        """Free JSON about the engine: class names, library versions, device, threads."""

    def not_parameters(self) -> list[str]:
        """Tensors of the checkpoint that this model has no parameter for: persistent buffers, leftovers; sorted."""

    def close(self) -> None:
        """Give the device memory back."""


class Generator(Protocol):
    """What xd-rollout samples from: logits, a batch of prompts at a time, a token a step through the KV cache.

    vocab_size: columns of the logits; max_positions: the longest sequence; eos_ids: the ids that end one.
    """

    vocab_size: int
    max_positions: int
    eos_ids: frozenset[int]

    def encode(self, prompt: dict[str, Any]) -> list[int]:
        """The ids of a prompt: {"messages": [{"role", "content"}, …]} or {"text": "…"}. XdError when it has none."""

    def prefill(self, prompts: list[list[int]]) -> np.ndarray:
        """Begin a new batch, forgetting the last one: float32 [B, V], the logits of each prompt's next token."""

    def step(self, ids: list[int]) -> np.ndarray:
        """Append a token to each row: float32 [B, V], the logits of the next. A finished row is fed on and ignored."""

    def describe(self) -> dict[str, Any]:
        """{"model": {"digest", "synthetic"}, "tokenizer": {"policy", "digest"}, "engine": {…}}; no path, no clock."""

    def close(self) -> None:
        """Give the device memory back."""


class Runtime(Protocol):
    """An adapter. Importing its module imports no torch.

    Beside these, a runtime may have any of the following.
    `operator_inputs: frozenset[str]`, of "logits" and "hidden": what it can hand an operator; without it, both. Empty:
    its engine takes logprobs out of any operator's reach, so its record of `logp.backend` is `unobservable`, and it
    tells the operator that it is bound to what it was given (`libxd.operators.session.EnginesOwn`).
    `account() -> dict`, JSON, where its engine runs elsewhere, at `libxd.environment.url(name)`: what that says of
    itself and what changes numbers, without address or path; XdError when it does not answer.
    `generator(model: str, dtype: str, device: str) -> Generator`, where it can sample; `model` is a checkpoint
    directory, or the runtime's own name for a model.
    `numerics() -> dict`, JSON, where its library has numeric state of the whole process (thread count, TF32, autocast):
    it must stay what it was when the process began, but for what the plan's engine arguments say under the same name.
    `synthetic_parameters(synthetic: dict, dtype: str) -> dict`, name -> digest, and
    `synthetic_model(synthetic: dict) -> dict`, sizes as in the identity's `model`, where it makes models from a seed:
    what a checkpoint's files say otherwise.
    """

    name: str
    version: str
    sides: frozenset[str]
    registers_smoke_operators: bool

    def materialize(
        self, side: str, row: dict[str, Any], environment: dict[str, Any], allow_fallback: frozenset[str]
    ) -> SidePlan:
        """What this runtime would build for a row on a machine with that environment; pure."""

    def estimate_bytes(self, side: str, engine: dict[str, Any], locations: dict[str, Any]) -> int:
        """The memory in bytes that the engine will need, roughly; 0 when nothing is known of the model."""

    def open(self, side: str, plan: dict[str, Any], context: EngineContext) -> Engine:
        """The engine of `plan`, a side of materialized.json; in the scorer's child only."""
