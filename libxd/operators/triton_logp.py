"""`xd.triton_logp`: the selected logprob of the engine's logits by xdkernels: Triton on CUDA, its twin elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from libxd.knobs import DTYPES
from libxd.operators.descriptor import OperatorDescriptor

if TYPE_CHECKING:
    import torch

DESCRIPTOR = OperatorDescriptor(
    operation="selected_logprob",
    backend="xd.triton_logp",
    targets=frozenset({"rollout", "training"}),
    devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset(DTYPES),
    properties=("float32_accumulation", "batch_invariant"),
    inputs="logits",
    factory="libxd.operators.triton_logp:make",
    version="1",
    sources=(
        "xdkernels.arguments", "xdkernels.dispatch", "xdkernels.jit.fold", "xdkernels.jit.interpreted",
        "xdkernels.jit.launch", "xdkernels.jit.logprob", "xdkernels.jit.logsumexp", "xdkernels.logprob",
        "xdkernels.logsumexp", "xdkernels.reference.logprob",
    ),
)  # fmt: skip


class TritonLogprob:
    """log-softmax of the engine's own logits, gathered, in an order of sums that a row's neighbours do not change."""

    def __call__(self, logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
        """logits: the head's dtype [N, V], padding columns removed; ids: integers [N]. float32 [N], in nats."""
        from xdkernels.logprob import selected_logprob

        return selected_logprob(logits, ids, temperature)


def make(side: str, options: dict[str, Any]) -> TritonLogprob:
    """The same on both sides; it takes no options."""
    return TritonLogprob()
