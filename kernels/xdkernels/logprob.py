"""The selected logprob of logits that exist: what a softmax over the vocabulary is read for in rollout and training."""

from __future__ import annotations

import torch

from xdkernels import arguments
from xdkernels.dispatch import use_kernels
from xdkernels.logsumexp import Partials, default_vocab_block
from xdkernels.reference import logprob as reference


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
    """The logprob of one selected token a row, in nats; differentiable in the logits.

    logits: bfloat16, float16, float32 or float64 [N, V], any strides, upcast to float32 before anything else. ids:
    integers [N], each in [0, vocab). temperature: divides the logits. vocab: the columns that count, when the last
    V - vocab are padding; their gradient is exactly 0. entropy: also return that of each row's distribution.
    vocab_block: columns of a block (none: `default_vocab_block(V)`). check: look at the ids' values, which waits for
    the device; unchecked, an id outside [0, vocab) has the logprob -inf.

    Returns float32 [N], or two of them. With m the row's maximum and s the sum of exp(x - m), accumulated in float32,
    logprob = (x_id - m) - log(s) and entropy = log(s) - sum(exp(x - m) (x - m)) / s. A column of -inf has probability 0
    and no part in the entropy; NaN or +inf make their row NaN, and no other. A row's bits depend on its values, V,
    vocab, vocab_block and temperature alone: not on N, other rows or strides, and they are those of
    `selected_logprob_partials` over any shards, merged. The gradient, in the logits' dtype, is
    (g ([column = id] - p) - h p (log p + entropy)) / temperature for upstream gradients g and h, once differentiable.

    ValueError, before anything is launched: shapes, dtypes, devices, numbers or ids that do not fit.
    """
    vocab = arguments.require_logits(logits, ids, temperature, vocab, check=check)
    vocab_block = default_vocab_block(logits.shape[1]) if vocab_block is None else vocab_block
    arguments.require_vocab_block(vocab_block, logits.shape[1])
    if not use_kernels(logits):
        return reference.selected_logprob(
            logits, ids, temperature, vocab, entropy=entropy, vocab_block=vocab_block, check=False
        )
    logprobs, entropies = _SelectedLogprob.apply(
        logits, ids.contiguous(), float(temperature), vocab, vocab_block, entropy
    )
    return (logprobs, entropies) if entropy else logprobs


@torch.no_grad()
def selected_logprob_partials(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: float = 1.0,
    *,
    vocab: int,
    first: int,
    vocab_block: int,
    entropy: bool = False,
    check: bool = True,
) -> tuple[Partials, torch.Tensor]:
    """A vocabulary shard's part in `selected_logprob`: its blocks' partial sums, and the selected logits it holds.

    logits: [N, V / shards], the vocabulary's columns from `first` on. ids: integers [N], each in [0, vocab), counted
    over the whole vocabulary, as vocab is. vocab_block: that of the whole vocabulary, such as `default_vocab_block(V)`;
    every shard begins at a multiple of it. Everything else as there.

    Returns Partials of K = ceil(width / vocab_block) blocks, and float32 [N]: the row's selected logit over
    temperature, -inf where another shard holds it. `logprob_of_partials` takes both, of all shards in their order; the
    bits are those of one shard. Not differentiable. ValueError: as there.
    """
    columns = arguments.require_shard(logits, ids, temperature, vocab, first, vocab_block, check=check)
    if use_kernels(logits):
        from xdkernels.jit.logprob import partials
    else:
        partials = reference.selected_logprob_partials
    *sums, selected = partials(
        logits, ids.contiguous(), float(temperature), columns, first, vocab_block, entropy
    )  # fmt: skip
    return Partials(*sums, first, logits.shape[1], vocab), selected


class _SelectedLogprob(torch.autograd.Function):
    """Two launches forward, one backward; of [N, V] only the logits are kept."""

    @staticmethod
    def forward(ctx, logits, ids, temperature, vocab, vocab_block, entropy):
        from xdkernels.jit import logprob as kernels
        from xdkernels.jit.logsumexp import merge

        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.vocab = temperature, vocab
        *merged, logprobs = merge(*kernels.partials(logits, ids, temperature, vocab, 0, vocab_block, entropy))
        ctx.save_for_backward(logits, ids, *merged)
        return logprobs, merged[-1]

    @staticmethod
    def backward(ctx, of_logprob, of_entropy):
        from xdkernels.jit import logprob as kernels

        if torch.is_grad_enabled():  # create_graph: what follows would be a constant to it
            raise RuntimeError("selected_logprob has no second derivative")
        logits, ids, *merged = ctx.saved_tensors
        found = None
        if of_logprob is not None or of_entropy is not None:
            found = kernels.gradient(logits, ids, tuple(merged), of_logprob, of_entropy, ctx.temperature, ctx.vocab)
        return found, None, None, None, None, None
