"""A few steps of TRL's GRPOTrainer with examples/hooks/trl_grpo.py, and what the hook takes of a step; docs/hooks.md.

    python -P dev/hook_trl.py RUNS MODEL [--steps N] [--completion-tokens N] [--plant WHAT]

Needs trl. Attempts go to RUNS/grpo. --plant makes a mistake for the tools to find: `temperature` samples at another one
than the trainer recomputes at, `shift` hands over each rollout logprob a token late.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ("Say hello to a friend.", "Count from one to five.", "Name three colours.", "What is two plus two?")
PLANTS = ("temperature", "shift")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs")
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--completion-tokens", type=int, default=12)
    parser.add_argument("--plant", choices=PLANTS)
    given = parser.parse_args()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # a rollout_func is experimental, and says so
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    hook = _hook()
    took_s = _timed(hook)
    with tempfile.TemporaryDirectory() as place:
        arguments = GRPOConfig(
            output_dir=place, per_device_train_batch_size=len(PROMPTS), num_generations=2, max_steps=given.steps,
            max_completion_length=given.completion_tokens, learning_rate=1e-5, temperature=0.9, use_cpu=True,
            bf16=False, report_to=[], save_strategy="no", disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = hook.ScoredGRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32, use_safetensors=True),
            processing_class=AutoTokenizer.from_pretrained(given.model),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in PROMPTS]}),
            reward_funcs=_reward,
            rollout_func=_planted(hook.sample, given.plant),
            scores={"runs": given.runs, "experiment": "grpo", "dtype": "float32"},
            checkpoint=given.model,
        )
        start = time.perf_counter()
        trainer.train()
        whole_s = time.perf_counter() - start
    first_s, *later_s = took_s  # the first one digests the checkpoint
    later = f", each later one {1e3 * statistics.median(later_s):.1f} ms" if later_s else ""
    print(f"{given.steps} steps of {whole_s / given.steps:.2f} s; the hook: first {1e3 * first_s:.0f} ms{later}")


def _hook() -> Any:
    """examples/hooks/trl_grpo.py, without its folder on the path."""
    spec = importlib.util.spec_from_file_location("trl_grpo", ROOT / "examples" / "hooks" / "trl_grpo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _timed(hook: Any) -> list[float]:
    """Where the hook's calls of write_scores leave their seconds."""
    took_s: list[float] = []
    write_scores = hook.libxd.write_scores

    def timed(*arguments: Any, **named: Any) -> Path:
        start = time.perf_counter()
        try:
            return write_scores(*arguments, **named)
        finally:
            took_s.append(time.perf_counter() - start)

    hook.libxd.write_scores = timed
    return took_s


def _reward(completions: list[Any], **_: Any) -> list[float]:
    """Some number that differs between samples."""
    return [float(len(completion[0]["content"])) for completion in completions]


def _planted(sample: Any, plant: str | None) -> Any:
    def planted(prompts: list[Any], trainer: Any) -> dict[str, list]:
        kept = trainer.args.temperature
        trainer.args.temperature = kept * 0.7 if plant == "temperature" else kept
        try:
            drawn = sample(prompts, trainer)
        finally:
            trainer.args.temperature = kept
        if plant == "shift":
            drawn["logprobs"] = [[row[0], *row[:-1]] for row in drawn["logprobs"]]
        return drawn

    return planted


if __name__ == "__main__":
    main()
