"""One case's operators: resolved, made, counted, closed. Nothing of a session outlives it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from libxd import plugins
from libxd.errors import Status, XdError, ran_out_of_memory
from libxd.operators.catalog import SemanticOperatorCatalog
from libxd.operators.descriptor import OperatorDescriptor
from libxd.rundir import SIDES

if TYPE_CHECKING:
    import numpy as np


class Operator:
    """An operator's instance, as an engine calls it.

    Called with (logits [N, V], ids [N], temperature) or, when `inputs` is "hidden", with (hidden [N, H],
    weight [V, H], ids [N], temperature); gives float32 [N] logprobs in nats. `calls` counts the calls that returned,
    `temperatures` holds what they were made at, `logits_given` the `checksum` of the logits of each (empty when it
    takes hidden states; None among them: not to be had). What was returned is kept, as it was then.
    `implementation` names what really runs, as module:qualified name.
    """

    def __init__(self, descriptor: OperatorDescriptor, options: dict[str, Any], function: Callable[..., Any]) -> None:
        self.backend = descriptor.backend
        self.version = descriptor.version
        self.build = descriptor.build
        self.inputs = descriptor.inputs
        self.options = options
        self.calls = 0
        self.temperatures: set[float] = set()
        self.logits_given: set[int | None] = set()
        self._returned: list[tuple[np.ndarray, np.ndarray]] = []
        self.implementation = _implementation(function)
        self._function = function

    def __call__(self, *operands: Any, temperature: float = 1.0) -> Any:
        *tensors, ids = operands[: self._arity]
        if len(operands) > self._arity:
            (temperature,) = operands[self._arity :]
        if self.inputs == "logits":
            self.logits_given.add(checksum(tensors[0]))
        logprobs = self._function(*tensors, ids, temperature)
        if logprobs.shape != ids.shape or str(logprobs.dtype) != "torch.float32":
            raise XdError(
                "an operator must give one float32 logprob a token", status=Status.BUG, code="bad-operator",
                where=f"operator {self.backend}", found=f"{logprobs.dtype} {list(logprobs.shape)}",
                expected=f"torch.float32 {list(ids.shape)}",
            )
        self.calls += 1
        self.temperatures.add(float(temperature))
        self._returned.append((_kept(ids), _kept(logprobs)))
        return logprobs

    def returned(self) -> tuple[np.ndarray, np.ndarray]:
        """All that it was asked and all that it gave, call after call: ids int64 [n], logprobs float32 [n]."""
        return _flat(self._returned)

    def take_over(self, other: Operator) -> None:
        """Be as a copy of this instance is by now, one that was called in another process."""
        self.calls, self.temperatures, self.logits_given = other.calls, other.temperatures, other.logits_given
        self._returned, self.implementation = other._returned, other.implementation

    @property
    def _arity(self) -> int:
        return 3 if self.inputs == "hidden" else 2


class EnginesOwn:
    """An engine's own step, which no operator reaches: it computes nothing, and is told what came out.

    It stands where an `Operator` does. `version`, `build` and `implementation` are None: what ran was not seen.
    """

    version = build = implementation = None
    inputs = None
    options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.calls = 0
        self.temperatures: set[float] = set()
        self.logits_given: set[int | None] = {None}  # not to be had
        self._told: list[tuple[np.ndarray, np.ndarray]] = []

    def gave(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """One answer of the engine: logprobs float32 [n] in nats of ids [n]."""
        self.calls += 1
        self._told.append((ids.copy(), logprobs.copy()))

    def returned(self) -> tuple[np.ndarray, np.ndarray]:
        """All that it was told, as an Operator's: ids int64 [n], logprobs float32 [n]."""
        return _flat(self._told)


def checksum(logits: Any) -> int | None:
    """The sum of a tensor's bit patterns, eight bytes at a time and modulo 2**64: equal for equal bits, and moved by
    whatever is done to some of them.

    None for what is no torch tensor of floating-point numbers. Reads the tensor once; a contiguous one is copied only
    where it does not begin at a multiple of eight bytes.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(logits, torch.Tensor) or logits.element_size() not in (2, 4):
        return None
    held = logits.detach().contiguous().flatten().view(torch.uint8)
    if held.storage_offset() % 8:
        held = held.clone()
    whole = held.numel() - held.numel() % 8
    return (int(held[:whole].view(torch.int64).sum()) + int(held[whole:].sum())) % 2**64


def _flat(answers: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    import numpy as np

    ids, values = zip((np.empty(0), np.empty(0)), *answers, strict=True)
    return np.concatenate(ids, dtype=np.int64, casting="unsafe"), np.concatenate(values, dtype=np.float32,
                                                                                casting="unsafe")  # fmt: skip


def _kept(tensor: Any) -> np.ndarray:
    """A copy, out of reach of whoever holds the tensor."""
    return tensor.detach().cpu().numpy().copy()


def _implementation(function: Callable[..., Any]) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


class OperatorSession:
    """Resolution and instances of one case. A failed resolution leaves nothing; there is no fallback."""

    def __init__(self, catalog: SemanticOperatorCatalog) -> None:
        self._catalog = catalog
        self._bound: dict[str, tuple[OperatorDescriptor, dict[str, Any]]] = {}
        self._instances: dict[str, Operator] = {}
        self._closed = False

    def __enter__(self) -> OperatorSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def resolve(self, side: str, binding: dict[str, Any]) -> OperatorDescriptor:
        """Bind a side: `binding` is a row's {"backend", "options"} or the `operator` record of a materialised side.

        XdError 69 for a backend that the catalog lacks, that does not serve the side, whose options it does not take,
        or (`stale-operator`) whose version or build is another than the record's.
        """
        self._require_open()
        assert side in SIDES, side
        descriptor = self._catalog.get(binding.get("operation", "selected_logprob"), binding["backend"])
        where = f"operator {descriptor.backend}"
        if side not in descriptor.targets:
            raise XdError(f"does not serve the {side} side", status=Status.REFUSED, code="wrong-side", where=where)
        unknown = sorted(set(binding["options"]) - set(descriptor.options))
        if unknown:
            raise XdError("does not take these options", status=Status.REFUSED, code="unknown-option", where=where,
                          found=unknown, expected=list(descriptor.options))
        for field in ("version", "build"):
            if field in binding and binding[field] != getattr(descriptor, field):
                raise XdError(
                    f"is another {field} than the one materialised", status=Status.REFUSED, code="stale-operator",
                    where=where, found=getattr(descriptor, field), expected=binding[field],
                    hint="materialise the row again",
                )
        if self._bound.get(side) != (descriptor, binding["options"]):
            self._instances.pop(side, None)
        self._bound[side] = (descriptor, dict(binding["options"]))
        return descriptor

    def instance(self, side: str) -> Operator:
        """The side's operator, made at the first call. XdError 70 when its factory fails to load."""
        self._require_open()
        if side not in self._bound:
            raise XdError("no operator is bound", status=Status.BUG, code="unbound-operator", where=side)
        if side not in self._instances:
            descriptor, options = self._bound[side]
            self._instances[side] = Operator(descriptor, options, _made(descriptor, side, options))
        return self._instances[side]

    def close(self) -> None:
        """Let go of everything; the session cannot be used afterwards."""
        self._instances.clear()
        self._bound.clear()
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise XdError("the operator session is closed", status=Status.BUG, code="closed-session")


def _made(descriptor: OperatorDescriptor, side: str, options: dict[str, Any]) -> Callable[..., Any]:
    """What the descriptor's factory makes; memory that ran out is not the factory's fault."""
    module, _, name = descriptor.factory.partition(":")
    what = "factory cannot be loaded"
    try:
        factory = getattr(importlib.import_module(module), name)
        what = f"cannot be made for the {side} side"
        return factory(side=side, options=dict(options))
    except Exception as error:
        if ran_out_of_memory(error) or (isinstance(error, XdError) and error.status != Status.BUG):
            raise
        raise plugins.foreign("operator", descriptor.backend, what, error, descriptor.factory) from error
