"""Plain-torch twins of the kernels: the oracle they are tested against, and the path of a CPU.

Shape suffixes: N tokens, H hidden size, V vocabulary rows (padding included), v vocabulary columns that count.
All arithmetic from the logits on is float32, whatever the operands' dtype.
"""

from __future__ import annotations

import torch


def selected_logprob(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: float = 1.0,
    vocab: int | None = None,
    *,
    entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The logprob of one selected token a row, in nats.

    logits: any floating dtype [N, V], upcast to float32 before anything else. ids: integers [N], each in [0, v).
    temperature: divides the logits. vocab: v, when the last V - v columns are padding; none: all count.
    entropy: also return that of each row's distribution, in nats.

    Returns float32 [N], or two of them. With m the row's maximum and s = sum(exp(x - m)) accumulated in float32,
    logprob = (x_id - m) - log(s), the shifted form of log-softmax, and entropy = log(s) - sum(exp(x - m) (x - m)) / s.
    A column of -inf has probability zero and no part in the entropy. ValueError: shapes, dtypes or ids that do not fit.
    """
    logits_Nv = _columns(logits, ids, temperature, vocab).to(torch.float32) / temperature
    maximum_N1 = logits_Nv.max(dim=-1, keepdim=True).values
    shifted_Nv = logits_Nv - maximum_N1  # at most 0: exp cannot overflow
    weight_Nv = shifted_Nv.exp()
    total_N = weight_Nv.sum(dim=-1)
    log_total_N = total_N.log()
    selected_N = shifted_Nv.gather(-1, ids.to(torch.int64).unsqueeze(-1)).squeeze(-1)
    logprobs_N = selected_N - log_total_N
    if not entropy:
        return logprobs_N
    weighted_Nv = torch.where(weight_Nv > 0, weight_Nv * shifted_Nv, torch.zeros_like(weight_Nv))  # 0 * -inf is 0 here
    return logprobs_N, log_total_N - weighted_Nv.sum(dim=-1) / total_N


def linear_selected_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    temperature: float = 1.0,
    vocab: int | None = None,
    *,
    entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The language-model head and `selected_logprob` in one: the logits are never rounded to the operands' dtype.

    hidden: any floating dtype [N, H]. weight: any floating dtype [V, H]. Both are upcast to float32: products of
    bfloat16 or float16 operands are then exact, and sums are accumulated in float32. (On CUDA the process's float32
    matmul precision holds: TF32 rounds float32 operands, and leaves bfloat16 and float16 ones as they are.) The other
    arguments, the result and the errors are those of `selected_logprob`.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden [N, H] and weight [V, H] do not fit: {tuple(hidden.shape)}, {tuple(weight.shape)}")
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"hidden and weight must be floating point: {hidden.dtype}, {weight.dtype}")
    logits_NV = hidden.to(torch.float32) @ weight.to(torch.float32).mT
    return selected_logprob(logits_NV, ids, temperature, vocab, entropy=entropy)


def _columns(logits: torch.Tensor, ids: torch.Tensor, temperature: float, vocab: int | None) -> torch.Tensor:
    """The columns that count, once everything fits. An id outside them would be read from padding or foreign memory."""
    if logits.ndim != 2 or ids.ndim != 1 or logits.shape[0] != ids.shape[0]:
        raise ValueError(f"logits [N, V] and ids [N] do not fit: {tuple(logits.shape)}, {tuple(ids.shape)}")
    if not logits.is_floating_point():
        raise ValueError(f"logits must be floating point: {logits.dtype}")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"ids must be integers: {ids.dtype}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive: {temperature}")
    columns = logits.shape[1] if vocab is None else vocab
    if not 0 < columns <= logits.shape[1]:
        raise ValueError(f"vocab must be within 1 and {logits.shape[1]}: {vocab}")
    if ids.numel() and not bool(((ids >= 0) & (ids < columns)).all()):
        raise ValueError(f"ids must be within 0 and {columns - 1}")
    return logits[:, :columns]
