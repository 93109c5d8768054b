"""`xd.fused_linear_logp`: head and selected logprob in one by xdkernels: Triton on CUDA, its twin elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from libxd.knobs import DTYPES
from libxd.operators.descriptor import OperatorDescriptor

if TYPE_CHECKING:
    import torch

DESCRIPTOR = OperatorDescriptor(
    operation="selected_logprob",
    backend="xd.fused_linear_logp",
    targets=frozenset({"rollout", "training"}),
    devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset(DTYPES),
    # It multiplies with the whole head weight: a rank that holds a vocabulary shard cannot use it.
    topology={"rollout": {"tensor_parallel_size": (1,)}},
    # Batch invariance is the kernel's, on CUDA in bfloat16; the twin multiplies with the library's product.
    properties=("float32_logits", "float32_accumulation"),
    inputs="hidden",
    factory="libxd.operators.fused_linear_logp:make",
    version="1",
    sources=(
        "xdkernels.arguments", "xdkernels.dispatch", "xdkernels.jit.fold", "xdkernels.jit.head",
        "xdkernels.jit.interpreted", "xdkernels.jit.launch", "xdkernels.jit.linear_logprob", "xdkernels.jit.logsumexp",
        "xdkernels.jit.tanh", "xdkernels.linear_logprob", "xdkernels.logsumexp", "xdkernels.reference.logprob",
    ),
)  # fmt: skip


class FusedLinearLogprob:
    """float32 logits from hidden states and head weight, a tile at a time, which are never stored."""

    def __call__(
        self, hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        """hidden [N, H] and weight [V, H] in one floating dtype; ids: integers [N]. float32 [N], in nats."""
        from xdkernels.linear_logprob import linear_selected_logprob

        return linear_selected_logprob(hidden, weight, ids, temperature=temperature)


def make(side: str, options: dict[str, Any]) -> FusedLinearLogprob:
    """The same on both sides; it takes no options."""
    return FusedLinearLogprob()
