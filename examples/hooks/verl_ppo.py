"""verl: a trainer that writes each step's logprobs down, for xd-compare and xd-doctor.

    VERL_USE_EXTERNAL_MODULES=verl_ppo python -m verl.trainer.main_ppo trainer.v1.trainer_mode=scored ...

with this file on PYTHONPATH. The rollout side is `rollout_log_probs`, which the engine gave while it sampled
(`actor_rollout_ref.rollout.calculate_log_probs=True`), the training side `old_log_probs`, which the actor recomputed
before the update. With `rollout_correction.bypass_mode` verl copies the one into the other, and there is nothing to
compare. Written against verl 0.9.1 and its trainer over TransferQueue.
"""

from __future__ import annotations

import os
from typing import Any

import transfer_queue
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

import libxd

FIELDS = ["input_ids", "response_mask", "rollout_log_probs", "old_log_probs", "advantages", "uid"]


@register_trainer("scored")
class ScoredTrainer(PPOTrainerSync):
    """All ranks' sequences come together in the one process that this runs in."""

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        write(batch, self.global_steps, self.config)
        return super()._update_actor(batch, metrics)


def meant(rollout: Any) -> dict[str, float] | None:
    """The actor divides the logits by the temperature, and so does what vLLM calls processed, which truncates, too."""
    alike = rollout.logprobs_mode == "processed_logprobs" and rollout.top_p == 1 and rollout.top_k <= 0
    return {"temperature": rollout.temperature} if alike else None


def write(batch: Any, step: int, config: Any) -> None:
    """One step, from TransferQueue: nested tensors, a row a sequence; a response's rows stand for its last tokens."""
    data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=FIELDS)
    real = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]  # verl fills up uneven batches
    rows = {name: [data[name][i] for i in real] for name in FIELDS}
    actor, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    libxd.write_scores(
        os.environ.get("XD_RUNS", "runs"),
        config.trainer.experiment_name,
        token_ids=rows["input_ids"],
        active_mask=rows["response_mask"],
        rollout=rows["rollout_log_probs"],
        training=rows["old_log_probs"],
        advantages=rows["advantages"],
        prompts=[str(uid) for uid in rows["uid"]],
        dtype={"rollout": rollout.dtype, "training": os.environ["XD_TRAINING_DTYPE"]},
        checkpoint=actor.path if step == 1 else None,  # later steps hold weights that no file has
        semantics=meant(rollout),
        rollout_mode="decode",
        step=step,
    )
