"""OpenRLHF: an experience maker that writes each step's logprobs down, for xd-compare and xd-doctor.

    import openrlhf_ppo
    openrlhf_ppo.install(runs="runs", experiment="ppo", dtype="bfloat16", semantics={"temperature": 1.0})

before the trainer is made, in the process that makes it. The rollout side is `rollout_log_probs`, which vLLM gave while
it sampled (only where `algo.advantage.is_correction_level` is not off), the training side `action_log_probs`, which the
actor recomputed before the update. Both are zeroed outside the actions, and are taken as scored only within. Written
against OpenRLHF 0.11.2.
"""

from __future__ import annotations

import itertools
from typing import Any

import openrlhf.trainer.ppo_trainer as ppo_trainer
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

import libxd


def install(**scores: Any) -> None:
    """Have the PPO trainer make its experience with `ScoredExperienceMaker`. scores: as for `libxd.write_scores`."""
    ScoredExperienceMaker.scores = scores
    ppo_trainer.RemoteExperienceMaker = ScoredExperienceMaker


class ScoredExperienceMaker(RemoteExperienceMaker):
    """Each micro-batch is an attempt: they are padded apart."""

    scores: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps = itertools.count()

    def make_experience_batch(self, rollout_samples: list[Any]) -> list[Any]:
        experiences = super().make_experience_batch(rollout_samples)
        step = next(self._steps)
        for experience in experiences:
            write(experience, step, self.scores)
        return experiences


def write(experience: Any, step: int, scores: dict[str, Any]) -> None:
    """One micro-batch: sequences [B, T]; masks and logprobs [B, T - 1], a label's each, stand for the last columns."""
    libxd.write_scores(
        **scores,
        token_ids=experience.sequences,
        attention_mask=experience.attention_mask,
        active_mask=experience.action_mask,
        rollout=experience.rollout_log_probs,
        training=experience.action_log_probs,
        advantages=experience.advantages,
        rewards=experience.rewards,
        prompts=experience.prompts,
        step=step,
    )
