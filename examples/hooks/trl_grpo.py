"""TRL: a GRPOTrainer that writes each step's logprobs down, for xd-compare and xd-doctor.

    trainer = ScoredGRPOTrainer(..., scores=dict(runs="runs", experiment="grpo", dtype="bfloat16"), checkpoint="model")

The rollout side is what the engine said while it sampled (`sampling_per_token_logps`: vLLM's, or those of a
`rollout_func`); the training side is what the loss was just computed from. Where TRL samples with transformers it keeps
no logprob of the rollout: `sample` below is a rollout_func that does. Written against TRL 1.16.
"""

from __future__ import annotations

from typing import Any

import torch
from trl import GRPOTrainer

import libxd


class ScoredGRPOTrainer(GRPOTrainer):
    """scores: what `libxd.write_scores` is told beside the batch: runs, experiment, dtype. checkpoint: begun from."""

    def __init__(self, *args: Any, scores: dict[str, Any], checkpoint: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scores, self._checkpoint = scores, checkpoint

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        answer = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._per_token_logps = answer[0].detach()  # [B, C], NaN nowhere; padding is masked below
        return answer

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        if model.training:
            libxd.write_scores(
                **self._scores,
                token_ids=torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),  # [B, P + C]
                attention_mask=torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
                active_mask=inputs["completion_mask"] * inputs.get("tool_mask", 1),  # [B, C], as all below
                rollout=inputs.get("sampling_per_token_logps"),
                training=self._per_token_logps,
                advantages=inputs["advantages"],
                checkpoint=self._checkpoint if self.state.global_step == 0 else None,  # no file holds later weights
                semantics={"temperature": self.temperature},  # TRL divides the logits by it, and asks vLLM to
                step=self.state.global_step,
                rank=self.accelerator.process_index if self.accelerator.num_processes > 1 else None,
            )
        return loss


def sample(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list]:
    """A rollout_func: transformers' generate through its KV cache, with the logprob of each token that was drawn.

    One completion a prompt, as TRL has repeated them; prompts are text or messages.
    """
    tokenizer, args = trainer.processing_class, trainer.args
    texts = [
        prompt if isinstance(prompt, str)
        else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]  # fmt: skip
    fed = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    fed = fed.to(trainer.accelerator.device)
    model = trainer.accelerator.unwrap_model(trainer.model)
    model.eval()
    with torch.no_grad():
        drawn = model.generate(
            **fed, do_sample=True, top_k=0, top_p=1.0, temperature=args.temperature,
            max_new_tokens=args.max_completion_length, pad_token_id=tokenizer.pad_token_id,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    model.train()
    ids = drawn.sequences[:, fed["input_ids"].shape[1] :]  # [B, C]
    logits = torch.stack(drawn.logits, 1).float() / args.temperature  # [B, C, V]
    logprobs = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    lengths = [_length(row, trainer.eos_token_ids) for row in ids.tolist()]
    return {
        "prompt_ids": [
            row[mask.bool()].tolist() for row, mask in zip(fed["input_ids"], fed["attention_mask"], strict=True)
        ],
        "completion_ids": [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)],
        "logprobs": [row[:n].tolist() for row, n in zip(logprobs, lengths, strict=True)],
    }


def _length(ids: list[int], eos_token_ids: list[int]) -> int:
    """Up to the first end token, which counts."""
    return next((i + 1 for i, token in enumerate(ids) if token in eos_token_ids), len(ids))
