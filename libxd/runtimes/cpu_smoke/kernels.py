"""The two ways the decoder's operations run: one by one, each rounding its result, or fused, rounding once.

Legend: M rows (tokens), N outputs, K inputs, D head dimension. Both take and give the compute dtype unless a line says
float32. The fused path is what a compiled engine does: neighbouring projections become one product, the norm's scale
is applied after it, and what is between two products stays in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from libxd.runtimes.cpu_smoke import attention, gemm


class EagerKernels:
    """Operation by operation; every operation rounds to the compute dtype, and attention is a plain softmax."""

    is_eager = True

    def __init__(self) -> None:
        self.calls = 0

    def norm(self, x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
        """RMSNorm over the last dimension, its statistics in float32: [M, K]."""
        self.calls += 1
        return gain * (x.float() * _inverse_rms(x, epsilon)).to(x.dtype)

    def norm_linear(self, x: Tensor, gain: Tensor, epsilon: float, weights: list[Tensor]) -> list[Tensor]:
        """RMSNorm, then a product for each weight [N, K]: a list of [M, N]."""
        normed = self.norm(x, gain, epsilon)
        return [self.linear(normed, weight) for weight in weights]

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """[M, K] times [N, K] transposed: [M, N]."""
        self.calls += 1
        return gemm.matmul(x, weight).to(weight.dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        """Rotary embedding of [M, heads, D]."""
        self.calls += 1
        return x * cos.to(dtype) + gemm.rotate_half(x) * sin.to(dtype)

    def gate(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
        """SwiGLU's elementwise half: silu(gate) * up, [M, N]."""
        self.calls += 1
        return torch.nn.functional.silu(gate) * up

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Attention over one shard of positions; see `attention.plain`."""
        self.calls += 1
        return attention.plain(query, key, value, visible)


class FusedKernels:
    """Fused: float32 between the products; attention a running softmax over blocks of keys."""

    is_eager = False

    def __init__(self) -> None:
        self.calls = 0

    def norm(self, x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
        """RMSNorm in float32, rounded once: [M, K]."""
        self.calls += 1
        return (x.float() * (_inverse_rms(x, epsilon) * gain.float())).to(x.dtype)

    def norm_linear(self, x: Tensor, gain: Tensor, epsilon: float, weights: list[Tensor]) -> list[Tensor]:
        """One product over all weights side by side, the norm's scale after it: a list of float32 [M, N]."""
        self.calls += 1
        scaled = (x.float() * gain.float()).to(x.dtype)
        product = gemm.matmul(scaled, torch.cat(weights)) * _inverse_rms(x, epsilon)
        return list(product.split([weight.shape[0] for weight in weights], dim=-1))

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """[M, K] times [N, K] transposed, rounded once: [M, N]."""
        self.calls += 1
        return gemm.matmul(x, weight).to(weight.dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        """Rotary embedding of float32 [M, heads, D], rounded at the end."""
        self.calls += 1
        return (x * cos + gemm.rotate_half(x) * sin).to(dtype)

    def gate(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
        """silu(gate) * up of float32 [M, N], rounded at the end."""
        self.calls += 1
        return (gate * torch.sigmoid(gate) * up).to(dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Attention over one shard of positions; see `attention.online`."""
        self.calls += 1
        return attention.online(query, key, value, visible)


Kernels = EagerKernels | FusedKernels


def _inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    """1 / sqrt(mean(x^2) + epsilon) in float32: [M, 1]."""
    return torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + epsilon)
