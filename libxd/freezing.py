"""Sampled responses as a sequences file: the frozen tokens, and what its header says of how they came about."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from libxd import sequences
from libxd.prompts import Prompt, digest
from libxd.sampling import DRAWS, Response, Sampling

if TYPE_CHECKING:
    from libxd.sequences import Sequences

#: what the recorded logprobs mean: of the logits as they are, whatever was drawn from
SEMANTICS: dict[str, Any] = {
    "logprobs": "raw",
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "penalties": {"repetition": 1.0, "presence": 0.0, "frequency": 0.0},
}


def freeze(responses: list[Response], metadata: dict[str, Any]) -> Sequences:
    """The responses as frozen sequences: every drawn token is active, the token that ended a response among them."""
    import numpy as np

    lengths = [len(r.prompt_ids) + len(r.ids) for r in responses]
    return sequences.Sequences(
        token_ids=np.concatenate([np.array(r.prompt_ids + r.ids, np.int32) for r in responses]),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        active_mask=np.concatenate([np.repeat([False, True], [len(r.prompt_ids), len(r.ids)]) for r in responses]),
        attention_mask=np.ones(sum(lengths), np.bool_),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        prompt_lens=np.array([len(r.prompt_ids) for r in responses], np.int32),
        prompt_index=np.array([r.prompt_index for r in responses], np.int32),
        logprobs=np.concatenate([np.array([np.nan] * len(r.prompt_ids) + r.logprobs, np.float32) for r in responses]),
        metadata=metadata,
    )


def metadata(runtime: str, described: dict[str, Any], prompts: list[Prompt], sampling: Sampling) -> dict[str, Any]:
    """The header metadata of the sequences file; `described` is what the generator says of itself."""
    return {
        "schema_version": sequences.SCHEMA_VERSION,
        "runtime": runtime,
        **described,
        "prompts": {"digest": digest(prompts), "ids": [prompt.id for prompt in prompts]},
        "sampling": {**asdict(sampling), "draws": DRAWS},
        "semantics": SEMANTICS,
    }
