"""Runtimes that are vllm with one thing done behind its back."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

from libxd.runtimes.vllm.runtime import Vllm

WEIGHT = "model.layers.1.mlp.up_proj.weight"


class ReloadsWeights(Vllm):
    """Holds, by vLLM's own reload_weights, a checkpoint of which one element is another one."""

    name = "vllm-reloads-weights"

    def open(self, side: str, plan: dict[str, Any], context: Any) -> Any:
        engine = super().open(side, plan, context)
        from safetensors.torch import load_file, save_file

        with tempfile.TemporaryDirectory() as place:
            shutil.copy(os.path.join(context.locations["checkpoint"], "config.json"), place)
            held = load_file(os.path.join(context.locations["checkpoint"], "model.safetensors"))
            held[WEIGHT][0, 0] += 1
            save_file(held, os.path.join(place, "model.safetensors"), metadata={"format": "pt"})
            engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": place})
        return engine


class FeedsOtherId(Vllm):
    """Asks vLLM for another prompt than the frozen one."""

    name = "vllm-feeds-other-id"

    def open(self, side: str, plan: dict[str, Any], context: Any) -> Any:
        engine = super().open(side, plan, context)
        honest = engine.llm.generate

        def generate(prompts: list[dict[str, list[int]]], *arguments: Any, **given: Any) -> Any:
            prompts[0]["prompt_token_ids"][1] ^= 1
            return honest(prompts, *arguments, **given)

        engine.llm.generate = generate
        return engine


RELOADS_WEIGHTS, FEEDS_OTHER_ID = ReloadsWeights(), FeedsOtherId()
