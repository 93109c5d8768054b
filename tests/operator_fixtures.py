"""Operators of the tests: named as factories by descriptors of their own."""

from __future__ import annotations

from typing import Any

from libxd.knobs import DTYPES
from libxd.operators.descriptor import OperatorDescriptor


def descriptor(**changes: Any) -> OperatorDescriptor:
    """A well-formed descriptor, changed."""
    fields = {
        "operation": "selected_logprob",
        "backend": "test.logp",
        "targets": frozenset({"rollout", "training"}),
        "devices": frozenset({"cpu", "cuda"}),
        "dtypes": frozenset(DTYPES),
        "inputs": "logits",
        "factory": "operator_fixtures:make",
        "version": "1",
    }
    return OperatorDescriptor(**{**fields, **changes})


class Logp:
    """log-softmax and gather, remembering how it was made."""

    def __init__(self, side: str, options: dict[str, Any]) -> None:
        self.side = side
        self.options = options

    def __call__(self, logits, ids, temperature):
        """logits [N, V], ids [N] -> float32 [N]."""
        return (logits.float() / temperature).log_softmax(-1).gather(-1, ids.long()[:, None])[:, 0]


def make(side: str, options: dict[str, Any]) -> Logp:
    """A good factory."""
    return Logp(side, options)


def make_double(side: str, options: dict[str, Any]):
    """A factory whose operator gives float64."""
    return lambda logits, ids, temperature: Logp(side, options)(logits, ids, temperature).double()


def make_rectangle(side: str, options: dict[str, Any]):
    """A factory whose operator gives one column too many."""
    return lambda logits, ids, temperature: Logp(side, options)(logits, ids, temperature)[:, None]
