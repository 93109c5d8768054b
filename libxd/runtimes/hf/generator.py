"""Sampling with transformers: left-padded batches, a token a step through the KV cache.

Shapes: B rows, V vocabulary, P padded prompt length, S cached length.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libxd import canon, checkpoint, resolution
from libxd.errors import Status, XdError

if TYPE_CHECKING:
    import numpy as np


class Generator:
    """The `Generator` of runtime hf: a causal language model in eval mode with the checkpoint's own tokenizer.

    Attention is transformers' default. XdError 66 when the checkpoint is missing, 65 when transformers does not take
    it, 69 when there is no such device.
    """

    def __init__(self, model: str, dtype: str, device: str) -> None:
        directory = Path(model)
        if not (directory / "config.json").is_file():
            raise XdError("no checkpoint here: no config.json", status=Status.MISSING, code="missing", where=model,
                          hint="`make model` makes one")  # fmt: skip
        checkpoint.require_sound(directory)
        self._files = resolution.checkpoint_files(directory)
        self._tokenizer_files = resolution.tokenizer_files(directory)
        import torch

        self._torch = torch
        if device == "cuda" and not torch.cuda.is_available():
            raise XdError("torch sees no CUDA device here", status=Status.REFUSED, code="no-device", where=model)
        self._device = device
        self._policy: str | None = None
        self._load(directory, dtype)
        config = self._model.config
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings
        self.eos_ids = _eos_ids(self._model.generation_config.eos_token_id, config.eos_token_id)
        self._batch: Any = None

    def _load(self, directory: Path, dtype: str) -> None:
        from transformers import AutoTokenizer

        from libxd.runtimes.hf.loading import load, reading

        with reading(str(directory)):
            self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model = load(str(directory), getattr(self._torch, dtype), None)
        self._model = model.to(self._device)
        # transformers 5 renamed the argument on the way
        accepted = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"

    def encode(self, prompt: dict[str, Any]) -> list[int]:
        policy = "plain" if "text" in prompt else "chat_template"
        if self._policy not in (None, policy):  # a sequences file names one
            raise XdError("prompts as text and conversations do not go into one file", code="mixed-prompts",
                          found=policy, expected=self._policy, hint="sample them apart")  # fmt: skip
        self._policy = policy
        if policy == "plain":
            return self._tokenizer(prompt["text"])["input_ids"]
        from jinja2.exceptions import TemplateError

        if self._tokenizer.chat_template is None:
            raise XdError("the tokenizer has no chat template", code="no-chat-template", hint="give prompts as text")
        try:
            return self._tokenizer.apply_chat_template(
                prompt["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateError as error:
            raise XdError(f"the chat template refuses the conversation: {error}", code="chat-template") from error

    def prefill(self, prompts: list[list[int]]) -> np.ndarray:
        import numpy as np
        from transformers import DynamicCache

        from libxd.runtimes.hf import decoding
        from libxd.runtimes.hf.attention import explicit_masks

        fed = [decoding.Prompt(np.array(p), np.arange(len(p)), np.ones(len(p))) for p in prompts]
        width = max(map(len, fed))
        cache = DynamicCache(config=self._model.config)
        with explicit_masks(), self._torch.inference_mode():
            logits = decoding.prefill(self._forward, fed, width, cache)
        self._batch = decoding.Batch(cache, decoding.padded([p.mask for p in fed], width))
        self._lengths = np.array([len(p) for p in fed])
        return logits.float().cpu().numpy()

    def step(self, ids: list[int]) -> np.ndarray:
        import numpy as np

        from libxd.runtimes.hf.attention import explicit_masks

        with explicit_masks(), self._torch.inference_mode():
            logits = self._batch.step(self._forward, np.array(ids), self._lengths, np.ones(len(ids)))
        self._lengths = self._lengths + 1
        return logits.float().cpu().numpy()

    def _forward(self, ids: Any, positions: Any, mask: Any, cache: Any) -> Any:
        """Logits [B, 1, V] of the last place of every row; the cache grows by the ids."""
        return self._model(
            input_ids=ids.to(self._device),
            position_ids=positions.to(self._device),
            attention_mask=mask.to(self._device),
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        ).logits

    def describe(self) -> dict[str, Any]:
        import transformers

        return {
            "model": {"digest": canon.digest(self._files), "synthetic": None},
            "tokenizer": {"policy": self._policy or "chat_template", "digest": canon.digest(self._tokenizer_files)},
            "engine": {
                "class": type(self._model).__name__,
                "attention": self._model.config._attn_implementation,
                "device": self._device,
                "threads": self._torch.get_num_threads(),
                "torch": self._torch.__version__,
                "transformers": transformers.__version__,
            },
        }

    def close(self) -> None:
        self._batch = self._model = None
        if self._device == "cuda":
            self._torch.cuda.empty_cache()


def _eos_ids(*given: int | list[int] | None) -> frozenset[int]:
    """The end tokens: of the first place that names any."""
    for ids in given:
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
