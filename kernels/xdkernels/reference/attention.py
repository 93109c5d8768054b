"""Plain-torch twin of paged decode attention. All arithmetic is float32, whatever the operands' dtype.

Shape suffixes: L tokens attended to, G query heads a key-value head, K key-value heads, D head dimension.
"""

from __future__ import annotations

import torch

from xdkernels.dispatch import without_autocast


@torch.no_grad()
def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """What `xdkernels.paged_attention.paged_decode_attention` computes, a sequence at a time and in one piece: no
    splits, and the probabilities stay float32. Its arguments, its result, its trust in them: nothing is checked here.

    On CUDA the process's float32 matmul precision holds. A row's bits depend on its own operands and length alone.
    """
    page, kv_heads = k_cache.shape[1:3]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for row, length in enumerate(context_lens.tolist()):
        start = 0 if window is None else max(length - window, 0)
        tokens = torch.arange(start, length, device=q.device)
        blocks, slots = block_tables[row, tokens // page].to(torch.int64), tokens % page
        k_KDL = k_cache[blocks, slots].to(torch.float32).permute(1, 2, 0)
        v_KLD = v_cache[blocks, slots].to(torch.float32).transpose(0, 1)
        q_KGD = q[row].to(torch.float32).unflatten(0, (kv_heads, -1))
        with without_autocast(q):
            x_KGL = q_KGD @ k_KDL * scale
            if softcap is not None:
                x_KGL = softcap * torch.tanh(x_KGL / softcap)
            out[row] = (torch.softmax(x_KGL, dim=-1) @ v_KLD).flatten(0, 1).to(q.dtype)
    return out
