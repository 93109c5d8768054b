"""Paged caches full of traps, and attention over them in float64: shared by the twin's tests and the kernel's."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from tolerances import PAGED_ATTENTION_FLOAT32


@dataclass(frozen=True)
class Paged:
    """The arguments of `paged_decode_attention`. q [B, Hq, D]; caches [blocks, page, Hkv, D]."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor

    def __iter__(self):
        return iter((self.q, self.k_cache, self.v_cache, self.block_tables, self.context_lens))

    def rows(self, index: list[int] | slice) -> Paged:
        """Some of the sequences, in that order, over the same cache."""
        return replace(
            self, q=self.q[index], block_tables=self.block_tables[index], context_lens=self.context_lens[index]
        )

    def tokens(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one sequence, each [L, Hkv, D]."""
        length, page = int(self.context_lens[row]), self.k_cache.shape[1]
        token = torch.arange(length, device=self.q.device)
        block = self.block_tables[row, token // page].long()
        return self.k_cache[block, token % page], self.v_cache[block, token % page]


def paged(
    lengths: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    page: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    spare_blocks: int = 3,
    seed: int = 7,
) -> Paged:
    """Random sequences in scattered blocks. Every slot not in use holds NaN, every table entry not in use nonsense."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page) for length in lengths]
    blocks = sum(counts) + spare_blocks
    where = iter(torch.randperm(blocks, generator=generator).tolist())
    k_cache = torch.full((blocks, page, kv_heads, head_dim), float("nan"))
    v_cache = k_cache.clone()
    tables = torch.full((len(lengths), max(counts, default=0) + 2), -7, dtype=torch.int32)
    tables[:, 1::2] = 2**31 - 1
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for entry in range(count):
            block, used = next(where), min(page, length - entry * page)
            tables[row, entry] = block
            k_cache[block, :used] = torch.randn(used, kv_heads, head_dim, generator=generator)
            v_cache[block, :used] = torch.randn(used, kv_heads, head_dim, generator=generator)
    q = torch.randn(len(lengths), heads, head_dim, generator=generator) * 2  # peaked enough for the maximum to matter
    return Paged(
        q.to(device, dtype),
        k_cache.to(device, dtype),
        v_cache.to(device, dtype),
        tables.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def oracle(
    case: Paged, scale: float | None = None, softcap: float | None = None, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64 over the operands as they are, and the same over |V|: float64 [B, Hq, D] each."""
    outputs, absolute = [], []
    kv_heads = case.k_cache.shape[2]
    for row in range(len(case.q)):
        k, v = (t.double().transpose(0, 1) for t in case.tokens(row))  # [Hkv, L, D]
        if window is not None:
            k, v = k[:, -window:], v[:, -window:]
        x = case.q[row].double().unflatten(0, (kv_heads, -1)) @ k.mT * (scale or case.q.shape[2] ** -0.5)
        if softcap is not None:
            x = softcap * torch.tanh(x / softcap)
        weights = torch.softmax(x, dim=-1)
        outputs.append((weights @ v).flatten(0, 1))
        absolute.append((weights @ v.abs()).flatten(0, 1))
    return torch.stack(outputs), torch.stack(absolute)


def excess(out: torch.Tensor, case: Paged, **options) -> float:
    """The greatest error over what rounding may cost; at most 1 is right, and NaN is not.

    In 16 bits, rounding the output moves it by u |o|, and rounding each probability by u times the output over |V|, u
    being half the dtype's epsilon; float32 arithmetic comes on top.
    """
    wanted, absolute = oracle(case, **options)
    half = 0.0 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps / 2
    allowed = half * (wanted.abs() + absolute) + PAGED_ATTENTION_FLOAT32
    return float(((out.double() - wanted).abs() / allowed).max())
