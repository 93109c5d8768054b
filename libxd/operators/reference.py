"""`xd.reference_logp`: head and selected logprob in one, in float32, by the plain-torch twin of the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from libxd.knobs import DTYPES
from libxd.operators.descriptor import OperatorDescriptor

if TYPE_CHECKING:
    import torch

DESCRIPTOR = OperatorDescriptor(
    operation="selected_logprob",
    backend="xd.reference_logp",
    targets=frozenset({"rollout", "training"}),
    devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset(DTYPES),
    # It multiplies with the whole head weight: a rank that holds a vocabulary shard cannot use it.
    topology={"rollout": {"tensor_parallel_size": (1,)}},
    properties=("float32_logits", "float32_accumulation"),
    inputs="hidden",
    factory="libxd.operators.reference:make",
    version="2",
    sources=("xdkernels.logsumexp", "xdkernels.reference.logprob"),
)


class ReferenceLogprob:
    """float32 logits from hidden states and head weight, which the engine's own head never rounds."""

    def __call__(
        self, hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        """hidden [N, H] and weight [V, H] in any floating dtype; ids: integers [N]. float32 [N], in nats."""
        from xdkernels.reference.logprob import linear_selected_logprob

        return linear_selected_logprob(hidden, weight, ids, temperature=temperature)


def make(side: str, options: dict[str, Any]) -> ReferenceLogprob:
    """The same on both sides; it takes no options."""
    return ReferenceLogprob()
