"""Temporary test operators: they prove that the framework tells right from wrong (docs/SMOKE_OPERATORS.md).

On the CPU alone; registered by the cpu-smoke runtime alone, and used only when the command line authorises it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from libxd.knobs import DTYPES
from libxd.operators.descriptor import OperatorDescriptor

if TYPE_CHECKING:
    import torch

#: What `smoke_only.logp_offset` adds on the rollout side, in nats: above every threshold of the contracts (6e-2 is the
#: widest), and a power of two, so that the sum loses little to rounding.
OFFSET_NATS = 0.125


def _smoke_descriptor(name: str) -> OperatorDescriptor:
    return OperatorDescriptor(
        operation="selected_logprob",
        backend=f"smoke_only.logp_{name}",
        targets=frozenset({"rollout", "training"}),
        devices=frozenset({"cpu"}),
        dtypes=frozenset(DTYPES),
        properties=("float32_accumulation",),
        inputs="logits",
        factory=f"libxd.operators.smoke_ops:make_{name}",
        version="1",
        is_smoke_only=True,
    )


REFERENCE = _smoke_descriptor("reference")
OFFSET = _smoke_descriptor("offset")


class SmokeReference:
    """log_softmax and gather: what `native` does, so it must bring no difference."""

    def __call__(self, logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
        """logits: any floating dtype [N, V]; ids: integers [N]. float32 [N], in nats."""
        import torch

        logprobs_NV = torch.log_softmax(logits.to(torch.float32) / temperature, dim=-1)
        return logprobs_NV.gather(-1, ids.to(torch.int64).unsqueeze(-1)).squeeze(-1)


class SmokeOffset(SmokeReference):
    """The same, wrong by a constant on one side, so it must be found."""

    def __init__(self, offset_nats: float) -> None:
        self.offset_nats = offset_nats

    def __call__(self, logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
        """As SmokeReference, plus `offset_nats`."""
        return super().__call__(logits, ids, temperature) + self.offset_nats


def make_reference(side: str, options: dict[str, Any]) -> SmokeReference:
    """The same on both sides; it takes no options."""
    return SmokeReference()


def make_offset(side: str, options: dict[str, Any]) -> SmokeOffset:
    """Wrong on the rollout side alone: bound to both sides, one of them still scores right."""
    return SmokeOffset(OFFSET_NATS if side == "rollout" else 0.0)
