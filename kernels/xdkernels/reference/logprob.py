"""Plain-torch twins of the selected logprob, of its partial log-sum-exps and their merge, and of the fused head.

Shape suffixes: N tokens, H hidden size, V vocabulary rows (padding included), K vocabulary blocks, B columns of one.
All arithmetic from the logits on is float32, whatever the operands' dtype. Sums are folded by halves, elementwise:
torch's own reduction chooses its order by the tensor's shape and the number of threads, so that a row alone could have
other bits than the same row in a batch.
"""

from __future__ import annotations

import torch

from xdkernels import arguments
from xdkernels.dispatch import without_autocast
from xdkernels.logsumexp import default_vocab_block

#: where maxima start: finite, so that a column of -inf gives exp(-inf - LOWEST) = 0 and no NaN
LOWEST = torch.finfo(torch.float32).min
#: exp(x) is 0 in float32 here and below; an x that multiplies exp(x) stops here, so that 0 is not multiplied by -inf
UNDERFLOW = -128.0


def selected_logprob(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: float = 1.0,
    vocab: int | None = None,
    *,
    entropy: bool = False,
    vocab_block: int | None = None,
    check: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What `xdkernels.logprob.selected_logprob` computes, of the same arguments; differentiable by autograd."""
    vocab = arguments.require_logits(logits, ids, temperature, vocab, check=check)
    vocab_block = default_vocab_block(logits.shape[1]) if vocab_block is None else vocab_block
    *sums, selected_N = selected_logprob_partials(logits, ids, temperature, vocab, 0, vocab_block, entropy)
    maximum_N, log_total_N, entropy_N = merge_logsumexp(*sums)
    logprobs_N = (selected_N - maximum_N) - log_total_N
    return (logprobs_N, entropy_N) if entropy else logprobs_N


def selected_logprob_partials(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: float,
    columns: int,
    first: int,
    vocab_block: int,
    entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """maximum, total and weighted, float32 [N, K], and the selected logits over temperature, float32 [N].

    logits [N, V], of which `columns` columns count; ids [N], counted like `first`, the place of the shard's first
    column; the selected logit is -inf where the shard does not hold it. Nothing is checked here. Maxima are constants
    to autograd: no result of a merge depends on them.
    """
    logits = logits.to(torch.float32)  # once, so that a gradient is added up in float32 and rounded once
    blocks = [
        _block(logits[:, begin : max(min(begin + vocab_block, columns), begin)], temperature, entropy)
        for begin in range(0, logits.shape[1], vocab_block)
    ]
    maximum_NK, total_NK, weighted_NK = (torch.stack(each, dim=1) for each in zip(*blocks, strict=True))
    token_N = ids.to(torch.int64) - first
    here_N = (token_N >= 0) & (token_N < columns)
    selected_N = logits.gather(1, token_N.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
    selected_N = torch.where(here_N, selected_N / temperature, -torch.inf)
    return maximum_NK, total_NK, weighted_NK if entropy else None, selected_N


def _block(logits_NB: torch.Tensor, temperature: float, entropy: bool) -> tuple[torch.Tensor, ...]:
    """maximum, total and weighted of one block, float32 [N]; of no columns, what a merge passes over."""
    if logits_NB.shape[1] == 0:
        zeros_N = logits_NB.new_zeros(logits_NB.shape[0])
        return zeros_N + LOWEST, zeros_N, zeros_N
    x_NB = logits_NB.contiguous() / temperature
    maximum_N = x_NB.detach().amax(dim=1).clamp(min=LOWEST)
    shifted_NB = x_NB - maximum_N.unsqueeze(1)  # at most 0: exp cannot overflow
    weight_NB = shifted_NB.exp()
    total_N = _fold(weight_NB)
    weighted_N = _fold(weight_NB * shifted_NB.clamp(min=UNDERFLOW)) if entropy else total_N
    return maximum_N, total_N, weighted_N


def merge_logsumexp(
    maximum: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """maximum, log of the total, and entropy (none without weighted), float32 [N], of K blocks' partials [N, K]."""
    maximum_N = maximum.amax(dim=1)
    shift_NK = (maximum - maximum_N.unsqueeze(1)).clamp(min=UNDERFLOW)
    scale_NK = shift_NK.exp()
    total_N = _fold(total * scale_NK)
    log_total_N = total_N.log()
    if weighted is None:
        return maximum_N, log_total_N, None
    weighted_N = _fold((weighted + total * shift_NK) * scale_NK)
    return maximum_N, log_total_N, log_total_N - weighted_N / total_N


def linear_selected_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    vocab: int | None = None,
    *,
    entropy: bool = False,
    check: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The language-model head and `selected_logprob` in one: the logits are never rounded to the operands' dtype.

    hidden: any floating dtype [N, H]. weight: the same dtype [V, H]. bias: any floating dtype [V]. All are upcast to
    float32: products of bfloat16 or float16 operands are then exact, and sums are accumulated in float32. (On CUDA the
    process's float32 matmul precision holds: TF32 rounds float32 operands, and leaves bfloat16 and float16 ones as they
    are.) softcap: logits become softcap * tanh(logits / softcap), before temperature divides them. The other
    arguments, the result and the errors are those of `selected_logprob`.
    """
    vocab = arguments.require_linear(hidden, weight, ids, bias, temperature, softcap, vocab, check=check)
    with without_autocast(hidden):
        logits_NV = hidden.to(torch.float32) @ weight[:vocab].to(torch.float32).mT  # padding may hold anything
        if bias is not None:
            logits_NV = logits_NV + bias[:vocab].to(torch.float32)
        if softcap is not None:
            logits_NV = softcap * (logits_NV / softcap).tanh()
        return selected_logprob(logits_NV, ids, temperature, entropy=entropy, check=False)


def _fold(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, halves added to each other: its order is a function of the length alone."""
    while (length := x.shape[-1]) > 1:
        half = (length + 1) // 2
        folded = x[..., : length - half] + x[..., half:]
        x = torch.cat((folded, x[..., half - 1 : half]), dim=-1) if length % 2 else folded
    return x.squeeze(-1)
