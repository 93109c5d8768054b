"""The dumps of examples/diagnosis: a step's batch of TRL's trainer, with a mistake made, and without it.

    xd-rollout experiments/prompts/mix.jsonl --model models/smollm2-135m-instruct --limit 6 --samples 2 \\
      --max-new-tokens 32 --temperature 0.9 --seed 3 --batch-size 12 --out sequences.safetensors
    python -P dev/make_diagnosis.py sequences.safetensors OUT

Both sides are the hf engines, decoding against one pass. The rollout divides by the temperature that it drew at; in
step0.jsonl the trainer divides by 1, in the others by the same. Rewards, made up, are the share of distinct tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from libxd import sequences as frozen
from libxd.operators import catalog
from libxd.operators.session import OperatorSession
from libxd.runtimes import registry
from libxd.runtimes.protocol import EngineContext, Request
from libxd.sequences import Sequences

MODEL = str(Path(__file__).resolve().parent.parent / "models" / "smollm2-135m-instruct")
TEMPERATURE = 0.9
#: name, dtype of both sides, what the trainer divides by
DUMPS = (
    ("step0", "bfloat16", 1.0),
    ("step0-fixed", "bfloat16", TEMPERATURE),
    ("step0-float32", "float32", TEMPERATURE),
)


def scored(side: str, given: Sequences, dtype: str, temperature: float) -> np.ndarray:
    """float32 [T]: one side's logprobs at a temperature, NaN over the prompts."""
    arguments = {"device": "cpu", "devices": 1, "dtype": dtype, "attention": "sdpa", "world_size": 1,
                 "tensor_parallel_size": 1, "context_parallel_size": 1, "vocabulary_rows": None,
                 "enable_prefix_caching": False, "enforce_eager": True, "sharding": "unsharded"}  # fmt: skip
    semantics = {"logprobs": "raw" if temperature == 1 else "processed", "temperature": temperature, "top_p": 1.0,
                 "top_k": 0, "penalties": {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}}  # fmt: skip
    session = OperatorSession(catalog.load(False))
    session.resolve(side, {"backend": "native", "options": {}})
    engine = registry.load("hf").open(side, {"engine": arguments}, EngineContext({}, {"checkpoint": MODEL}))
    try:
        engine.bind(session.instance(side))
        mode = "decode" if side == "rollout" else "teacher_forced"
        return engine.score(given, Request(8, mode, "canonical", semantics)).logprobs
    finally:
        engine.close()


def advantages(given: Sequences) -> np.ndarray:
    """float64 [B]: GRPO's, of the samples of one prompt."""
    drawn = [given.token_ids[given.span(s)][given.active_mask[given.span(s)]] for s in range(given.num_sequences)]
    rewards = np.array([len(set(ids.tolist())) / ids.size for ids in drawn])
    made = np.zeros(rewards.size)
    for prompt in np.unique(given.prompt_index):
        group = given.prompt_index == prompt
        made[group] = (rewards[group] - rewards[group].mean()) / (rewards[group].std(ddof=1) + 1e-4)
    return made


def numbers(values: np.ndarray) -> list[float]:
    """float32, as `tensor.tolist()` gives it."""
    return values.astype(np.float32).tolist()


def main() -> None:
    given, out = frozen.read(Path(sys.argv[1])), Path(sys.argv[2])
    credit = numbers(advantages(given).round(4))
    for name, dtype, temperature in DUMPS:
        rollout = scored("rollout", given, dtype, TEMPERATURE)
        training = scored("training", given, dtype, temperature)
        with (out / f"{name}.jsonl").open("w") as file:
            for sequence in range(given.num_sequences):
                cells, prompt = given.span(sequence), int(given.prompt_lens[sequence])
                ids = given.token_ids[cells].tolist()
                assert given.active_mask[cells][prompt:].all(), "all of a response was sampled"
                row = {
                    "prompt_ids": ids[:prompt], "completion_ids": ids[prompt:],
                    "sampling_per_token_logps": numbers(rollout[cells][prompt:]),
                    "old_per_token_logps": numbers(training[cells][prompt:]), "advantages": credit[sequence],
                }  # fmt: skip
                file.write(json.dumps(row, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    main()
