"""`native`: what an engine does itself. Its logits, as its head left them, to a float32 log-softmax, gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from libxd.knobs import DTYPES
from libxd.operators.descriptor import OperatorDescriptor

if TYPE_CHECKING:
    import torch

DESCRIPTOR = OperatorDescriptor(
    operation="selected_logprob",
    backend="native",
    targets=frozenset({"rollout", "training"}),
    devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset(DTYPES),
    properties=("float32_accumulation",),
    inputs="logits",
    factory="libxd.operators.native:make",
    version="1",
)


class NativeLogprob:
    """log_softmax of the engine's own logits."""

    def __call__(self, logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
        """logits: the head's dtype [N, V], padding columns removed; ids: integers [N]. float32 [N], in nats.

        What the head rounded away stays away: bfloat16 logits are upcast, then divided by the temperature.
        """
        import torch

        scaled_NV = logits.to(torch.float32)
        if temperature != 1.0:  # dividing by 1 would change no bit
            scaled_NV = scaled_NV / temperature
        logprobs_NV = torch.log_softmax(scaled_NV, dim=-1)
        return logprobs_NV.gather(-1, ids.to(torch.int64).unsqueeze(-1)).squeeze(-1)


def make(side: str, options: dict[str, Any]) -> NativeLogprob:
    """The same on both sides; it takes no options."""
    return NativeLogprob()
