"""Head and policy objective in one: the loss of a policy update from hidden states, `[N, V]` never stored.

An objective reaches the head through one number a row, its coefficient c_n = d loss / d logprob_n, because
d loss / d hidden_n = c_n d logprob_n / d hidden_n. The sweep over the vocabulary that gives a row's logprob and entropy
gives the direction d logprob_n / d hidden_n as well, whatever the coefficient will be. So with a frozen head every
objective takes two products of the head's size, `gspo` too, whose coefficients need the whole sequence's logprobs
first: they multiply the directions afterwards. Between the two there are vectors [n].
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from xdkernels import objectives
from xdkernels.linear_logprob import CHUNK_TOKENS, linear_selected_logprob
from xdkernels.policy_batch import prepare
from xdkernels.policy_metrics import policy_metrics


def fused_policy_loss(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    labels: torch.Tensor,
    advantages: torch.Tensor,
    old_logprobs: torch.Tensor,
    *,
    objective: str,
    eps_low: float | None = None,
    eps_high: float | None = None,
    beta: float = 0.0,
    reference_logprobs: torch.Tensor | None = None,
    ratio_level: str | None = None,
    advantage_level: str | None = None,
    mask: torch.Tensor | None = None,
    sequence_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    turn_ids: torch.Tensor | None = None,
    denominator: float | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    vocab: int | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    check: bool = True,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss to be minimised, float32 [], and metrics (`policy_metrics`); formulas and sources: `objectives`.

    N rows are the packed tokens of a batch; row n's hidden state predicts labels[n].

    hidden [N, H], lm_head_weight [V, H], labels integer [N], bias [V], temperature, softcap, vocab, chunk_tokens: as
        in `linear_selected_logprob`. The loss is differentiable in hidden, and in lm_head_weight and bias where they
        require a gradient. The temperature must be that of old_logprobs.
    advantages: floating; [N], or one a sequence [B], or one a turn [T], as advantage_level says. A constant, as are:
    old_logprobs: float32 or float64 [N], nats, of the policy that sampled the labels.
    objective: cispo, grpo, dapo, dr_grpo or gspo.
    eps_low, eps_high: the ratio is clipped to 1 - eps_low and 1 + eps_high. cispo: no lower bound without eps_low.
        grpo: eps_high alone.
    beta, reference_logprobs [N]: weight of the k3 penalty, an estimate of KL(policy || reference), and what it is
        taken against. Given without beta, the reference is only measured.
    ratio_level, advantage_level: "token", "turn" or "sequence"; none: the objective's own, sequence/sequence for gspo
        and token/token for the others. Which pairs an objective admits, and why: `objectives`.
    mask: bool [N], rows that count; none: all. What the other rows hold, NaN or labels out of range, is not looked at;
        they cost no product.
    sequence_ids: int [N], each in [0, B); or cu_seqlens: int [B + 1], where rows behind its last value must be masked.
        Needed by grpo, gspo, and a level "sequence". A sequence without an active row does not count as one.
    turn_ids: int [N], each in [0, T), counted through the batch; a turn lies in one sequence. Needed by a level "turn".
    denominator: a number, or a tensor [], by which the sum is divided instead of by the number of active tokens
        (cispo, dapo) or sequences (grpo, gspo). dr_grpo has no other: sequences * longest response allowed, a
        constant of the run. Losses of micro-batches and ranks with the whole batch's denominator add up to its loss.
    check: look at values, too, which waits for the device.

    No active row: with a denominator the part adds nothing, a loss of 0 and gradients of 0 that a rank can still send
    to the others, metrics NaN; without one the mean is not defined: ValueError, rather than a 0 that looks trained.

    ValueError, before the head is touched: shapes, dtypes and devices that do not fit, unknown objective, a pair of
    levels it does not admit, epsilons missing or negative, no reference_logprobs with beta, no denominator for
    dr_grpo, advantages or logprobs that are not finite or ids out of range in active rows, a turn over two sequences.
    """
    chosen = objectives.find(objective)
    pair = objectives.levels(chosen, ratio_level, advantage_level)
    bounds = objectives.clip_bounds(chosen, eps_low, eps_high)
    if hidden.ndim != 2 or labels.ndim != 1 or len(hidden) != len(labels) or hidden.device != labels.device:
        raise ValueError(
            f"hidden [N, H] and labels [N] do not fit: {list(hidden.shape)} on {hidden.device}, "
            f"{list(labels.shape)} on {labels.device}"
        )
    batch = prepare(
        chosen, pair, labels, advantages, old_logprobs,
        reference_logprobs=reference_logprobs, beta=beta, mask=mask, sequence_ids=sequence_ids, cu_seqlens=cu_seqlens,
        turn_ids=turn_ids, denominator=denominator, check=check,
    )  # fmt: skip
    if batch.rows is not None:
        hidden = _SelectRows.apply(hidden, batch.rows)
    logprobs, entropy = linear_selected_logprob(
        hidden, lm_head_weight, batch.labels, bias, temperature, softcap, vocab,
        entropy=True, chunk_tokens=chunk_tokens, check=check,
    )  # fmt: skip
    evaluation = objectives.evaluate(
        chosen, logprobs, batch.old_logprobs, batch.advantages, bounds,
        ratio_segments=batch.ratio_segments, sequences=batch.sequences, denominator=denominator, beta=beta,
        reference_logprobs=batch.reference_logprobs,
    )  # fmt: skip
    metrics = policy_metrics(
        logprobs, batch.old_logprobs, evaluation.log_ratios, evaluation.clipped_low, evaluation.clipped_high,
        reference_logprobs=batch.reference_logprobs, entropy=entropy,
    )  # fmt: skip
    return _LossOfLogprobs.apply(logprobs, evaluation.loss, evaluation.coefficients), metrics


class _LossOfLogprobs(torch.autograd.Function):
    """A loss whose derivative in the logprobs is known. Automatic differentiation would halve it at ties of a min."""

    @staticmethod
    def forward(ctx, logprobs, loss, coefficients):
        ctx.save_for_backward(coefficients.to(logprobs.dtype))
        return loss.to(torch.float32)

    @staticmethod
    def backward(ctx, upstream):
        if torch.is_grad_enabled():  # create_graph: the coefficients' own derivatives would be missing, unnoticed
            raise RuntimeError("the policy loss can be differentiated once: call backward without create_graph")
        (coefficients,) = ctx.saved_tensors
        return upstream * coefficients, None, None


class _SelectRows(torch.autograd.Function):
    """hidden[rows] for distinct rows. The gradient is copied into zeros, where indexing would add atomically."""

    @staticmethod
    def forward(ctx, hidden, rows):
        ctx.save_for_backward(rows)
        ctx.total = len(hidden)
        return hidden[rows]

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        (rows,) = ctx.saved_tensors
        return upstream.new_zeros(ctx.total, *upstream.shape[1:]).index_copy_(0, rows, upstream), None
