"""Head and selected logprob in one: logits are never rounded below float32, and by the kernels never stored.

How many products of the size of the head a call takes, with bfloat16 operands on a GPU:

    forward alone                                  1
    forward and backward, frozen head              2   each row's direction is formed in the forward
    forward and backward, head trained as well     4   head, head again, and one for hidden and weight each
    a gradient through the entropy                 as for a trained head, less the weight's product if it is frozen

Shape suffixes: N tokens, H hidden size, V vocabulary rows (padding included).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch.autograd.function import once_differentiable

from xdkernels import arguments
from xdkernels.dispatch import use_kernels, without_autocast
from xdkernels.reference import logprob as reference

if TYPE_CHECKING:
    from xdkernels.jit.head import Head

#: rows of a sweep that keeps its exponentials: 1024 x 151936 of bfloat16 are 0.29 GiB, and fill an H200 with 128 tiles
CHUNK_TOKENS = 1024
#: rows of a sweep that keeps nothing but three numbers a tile
FORWARD_ROWS = 16384
#: vocabulary columns whose gradients are formed at a time where the head is trained
GRADIENT_COLUMNS = 8192
#: rows whose gradients are formed at a time
GRADIENT_ROWS = 8192
_ALIGNED_BYTES = 16


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
    chunk_tokens: int = CHUNK_TOKENS,
    check: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The logprob of one selected token a row under the head, in nats; differentiable in hidden, weight and bias.

    hidden: floating [N, H]. weight: the same dtype [V, H]. ids: integers [N], each in [0, vocab). bias: floating [V].
    The logits are hidden @ weight.T + bias, then softcap * tanh(logits / softcap), then logits / temperature, float32
    throughout: operands are multiplied as they are and accumulated in float32. vocab: the columns that count, when the
    last ones are padding. entropy: also return that of each row's distribution.

    Returns float32 [N], or two of them. The gradients have their operand's dtype; that of hidden is accumulated in
    float32 from probabilities rounded to the operands' dtype. chunk_tokens: rows whose probabilities are held at a
    time while a gradient is asked for: chunk_tokens * V * 2 bytes. Rows of weight from vocab on are not looked at.
    check: look at the ids' values, which waits for the device; unchecked, an id outside [0, vocab) has the logprob
    -inf. ValueError: shapes, dtypes, devices or ids that do not fit.

    bfloat16 on a GPU takes the kernels; everything else takes the plain-torch twin, which stores the logits. By the
    kernels a row's logprob and entropy have the same bits whatever N and the other rows are, and so has its gradient
    for hidden where the head is frozen and none flows through the entropy: its product is always of chunk_tokens rows.
    Other gradients, and all of the twin, are as invariant as the library's product.
    """
    arguments.require_linear(hidden, weight, ids, bias, temperature, softcap, vocab, check=check)
    arguments.require_integer("chunk_tokens", chunk_tokens)
    if not use_kernels(hidden) or hidden.dtype != torch.bfloat16:
        return reference.linear_selected_logprob(
            hidden, weight, ids, bias, temperature, softcap, vocab, entropy=entropy, check=False
        )
    vocab = weight.shape[0] if vocab is None else vocab
    direction = torch.is_grad_enabled() and hidden.requires_grad and not weight.requires_grad
    direction = direction and not (bias is not None and bias.requires_grad)
    ids, bias = ids.contiguous(), None if bias is None else bias.contiguous()
    logprobs, entropies = _LinearLogprob.apply(
        hidden, weight, ids, bias, temperature, softcap, vocab, entropy, chunk_tokens, direction
    )
    return (logprobs, entropies) if entropy else logprobs


class _LinearLogprob(torch.autograd.Function):
    """Forward: one sweep, chunk by chunk. Backward: scale the directions, or sweep again."""

    @staticmethod
    def forward(ctx, hidden, weight, ids, bias, temperature, softcap, vocab, entropy, chunk_tokens, direction):
        from xdkernels.jit import head as kernels

        ctx.set_materialize_grads(False)
        ctx.head = functools.partial(
            kernels.Head, bias=bias, temperature=temperature, softcap=softcap, vocab=vocab
        )  # fmt: skip
        found = kernels.Swept.empty(hidden, entropy=entropy, direction=direction)
        head = ctx.head(_rows_aligned(weight))
        step = chunk_tokens if direction else FORWARD_ROWS
        for first in range(0, len(hidden), step):
            chunk = slice(first, first + step)
            with without_autocast(hidden):
                kernels.sweep(
                    _rows_aligned(hidden[chunk]), head, ids[chunk], found.part(chunk), product_rows=chunk_tokens
                )
        ctx.save_for_backward(
            hidden, weight, ids, bias, found.logprobs, found.logsumexp, found.entropies, found.direction
        )
        # copies: what is kept for the backward is not the caller's to change
        return found.logprobs.clone(), None if found.entropies is None else found.entropies.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, entropy_upstream):
        from xdkernels.jit import head as kernels

        hidden, weight, ids, bias, logprobs, logsumexp, entropies, directions = ctx.saved_tensors
        nothing = (None,) * 10
        if upstream is None and entropy_upstream is None:
            return nothing
        if directions is not None and entropy_upstream is None:
            return kernels.scale_rows(directions, upstream.contiguous()), *nothing[1:]
        needs_hidden, needs_weight, _, needs_bias, *_ = ctx.needs_input_grad
        if upstream is None:
            upstream = torch.zeros_like(entropy_upstream)
        with without_autocast(hidden):
            gradients = _sweep_again(
                hidden, weight, ids, ctx.head, logprobs, logsumexp, entropies, upstream, entropy_upstream,
                (needs_hidden, needs_weight, needs_bias and bias is not None),
            )  # fmt: skip
        by_hidden, by_weight, by_bias = gradients
        return by_hidden, by_weight, None, None if by_bias is None else by_bias.to(bias.dtype), *nothing[4:]


def _sweep_again(
    hidden, weight, ids, head_of, logprobs, logsumexp, entropies, upstream, entropy_upstream, needs
):  # fmt: skip
    """The gradients asked for, by a second sweep over slices of the vocabulary. Accumulated in float32."""
    from xdkernels.jit import head as kernels

    needs_hidden, needs_weight, needs_bias = needs
    rows, width = hidden.shape
    aligned = _rows_aligned(weight)
    head: Head = head_of(aligned)
    upstream = upstream.contiguous()
    entropy_upstream = None if entropy_upstream is None else entropy_upstream.contiguous()
    float32 = {"dtype": torch.float32, "device": hidden.device}
    by_hidden = torch.zeros(rows, aligned.shape[1], **float32) if needs_hidden else None
    by_weight = torch.zeros_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
    by_bias = torch.zeros(weight.shape[0], **float32) if needs_bias else None
    blocks = [slice(first, min(first + GRADIENT_ROWS, rows)) for first in range(0, rows, GRADIENT_ROWS)]
    tile = head.tiling.block_n
    for first in range(0, head.vocab, GRADIENT_COLUMNS):
        columns = slice(first, min(first + GRADIENT_COLUMNS, head.vocab))
        count = columns.stop - columns.start
        of_weight = None
        for block in blocks:
            h = _rows_aligned(hidden[block])
            out = torch.empty(h.shape[0], -(-count // tile) * tile, dtype=torch.bfloat16, device=hidden.device)
            kernels.logit_gradients(
                h, head, ids[block], logprobs[block], logsumexp[block],
                None if entropies is None else entropies[block], upstream[block],
                None if entropy_upstream is None else entropy_upstream[block], columns, out,
            )  # fmt: skip
            by_logit = out[:, :count]
            if needs_hidden:
                by_hidden[block] += kernels.product(by_logit, aligned[columns])
            if needs_weight:
                part = kernels.product(by_logit.mT, h)
                of_weight = part if of_weight is None else of_weight.add_(part)
            if needs_bias:
                by_bias[columns] += by_logit.sum(dim=0, dtype=torch.float32)
        if of_weight is not None:
            by_weight[columns] = of_weight[:, :width].to(weight.dtype)
    return (
        by_hidden[:, :width].to(hidden.dtype) if needs_hidden else None,
        by_weight,
        by_bias,
    )


def _rows_aligned(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix itself where its rows begin at multiples of 16 bytes and lie in one piece, else a copy that does.

    The copy engine reads no other. A width that is no multiple of 8 is filled up with zeros.
    """
    size = matrix.element_size()
    width = matrix.shape[1]
    if (
        matrix.stride(1) == 1
        and matrix.stride(0) * size % _ALIGNED_BYTES == 0
        and matrix.stride(0) >= width
        and matrix.data_ptr() % _ALIGNED_BYTES == 0
        and width * size % _ALIGNED_BYTES == 0
    ):
        return matrix
    return torch.nn.functional.pad(matrix, (0, -width % (_ALIGNED_BYTES // size))).contiguous()
