"""Megatron: the per-token loss of a forward step, written down as the training side's logprobs.

Megatron-Core's GPTModel, given labels, returns the loss of each [B, S]: the negative logprob, in nats, already summed
over the vocabulary's shards. So a forward step that trains on rollouts needs one call behind it:

    output = model(tokens, position_ids, attention_mask, labels=labels)  # labels [B, S]: tokens, one to the left
    megatron_loss.write(output, tokens, labels, loss_mask, lengths, rollout_logprobs, step=step, **SCORES)

Written against megatron-core 0.16.1.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

import libxd


def write(
    output: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, lengths: torch.Tensor,
    rollout_logprobs: torch.Tensor, *, step: int, **scores: Any,
) -> None:  # fmt: skip
    """One micro-batch of this data-parallel rank; nothing on the ranks that hold the same tokens, or none of the loss.

    output, labels, loss_mask, rollout_logprobs [B, S]: column i is of the token that label i names, and the last one of
    a row of none. tokens [B, S], lengths [B]: how many of a row are tokens. scores: as for `libxd.write_scores`.
    """
    if not parallel_state.is_pipeline_last_stage() or parallel_state.get_tensor_model_parallel_rank() != 0:
        return
    if parallel_state.get_context_parallel_world_size() > 1:
        raise ValueError("context parallel ranks hold parts of a sequence: gather them, then write")
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    held = columns < lengths[:, None]  # padding on the right
    if not torch.equal(torch.where(held[:, 1:], labels[:, :-1], 0), torch.where(held[:, 1:], tokens[:, 1:], 0)):
        raise ValueError("labels are not the tokens one to the left: the loss belongs to other tokens")
    libxd.write_scores(
        **scores,
        token_ids=tokens,
        attention_mask=held,
        active_mask=loss_mask[:, :-1] * held[:, 1:],  # [B, S - 1]: of the tokens from the second on
        rollout=rollout_logprobs[:, :-1],
        training=-output.detach().float()[:, :-1],
        step=step,
        rank=parallel_state.get_data_parallel_rank(),
    )
