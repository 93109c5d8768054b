"""Sampling with transformers: left-padded batches, a token a step through the KV cache.

Shapes: B rows, V vocabulary, P padded prompt length, S cached length.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libxd import canon, resolution
from libxd.errors import Status, XdError

if TYPE_CHECKING:
    import numpy as np


class Generator:
    """The `Generator` of runtime hf: a causal language model in eval mode with the checkpoint's own tokenizer.

    On a CUDA device where there is one, else on the CPU; attention is transformers' default. XdError 66 when the
    checkpoint is missing, 65 when transformers does not take it.
    """

    def __init__(self, model: str, dtype: str) -> None:
        directory = Path(model)
        if not (directory / "config.json").is_file():
            raise XdError("no checkpoint here: no config.json", status=Status.MISSING, code="missing", where=model,
                          hint="`make model` makes one")  # fmt: skip
        self._files = resolution.checkpoint_files(directory)
        self._tokenizer_files = resolution.tokenizer_files(directory)
        import torch

        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._policy = "chat_template"
        self._load(directory, dtype)
        config = self._model.config
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings
        self.eos_ids = _eos_ids(self._model.generation_config.eos_token_id, config.eos_token_id)
        self._cache: Any = None

    def _load(self, directory: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, logging

        logging.disable_progress_bar()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(
                directory, dtype=getattr(self._torch, dtype), local_files_only=True, use_safetensors=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise XdError(f"transformers cannot load this checkpoint: {error}", code="bad-checkpoint",
                          where=str(directory)) from error  # fmt: skip
        self._model = model.to(self._device).eval()
        # transformers 5 renamed the argument on the way
        accepted = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"

    def encode(self, prompt: dict[str, Any]) -> list[int]:
        if "text" in prompt:
            self._policy = "plain"
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
        from transformers import DynamicCache

        torch = self._torch
        width = max(map(len, prompts))
        # Padding on the left, so that every row's next token comes at the same place of the cache. Which id pads is
        # all the same: the mask hides it.
        ids_BP = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        self._mask_BS = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        positions_BP = (self._mask_BS.cumsum(1) - 1).clamp(min=0)
        self._cache = DynamicCache(config=self._model.config)
        return self._forward(ids_BP, positions_BP)

    def step(self, ids: list[int]) -> np.ndarray:
        torch = self._torch
        positions_B1 = self._mask_BS.sum(1, keepdim=True)
        self._mask_BS = torch.cat([self._mask_BS, torch.ones_like(positions_B1)], dim=1)
        return self._forward(torch.tensor(ids).unsqueeze(1), positions_B1)

    def _forward(self, ids: Any, positions: Any) -> np.ndarray:
        """Logits float32 [B, V] of the last place of every row; the cache grows by the ids."""
        with self._torch.inference_mode():
            logits = self._model(
                input_ids=ids.to(self._device),
                position_ids=positions.to(self._device),
                attention_mask=self._mask_BS.to(self._device),
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_argument: self._cache},
            ).logits
        return logits[:, -1].float().cpu().numpy()

    def describe(self) -> dict[str, Any]:
        import transformers

        return {
            "model": {"digest": canon.digest(self._files), "synthetic": None},
            "tokenizer": {"policy": self._policy, "digest": canon.digest(self._tokenizer_files)},
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
        self._cache = self._model = None
        if self._device == "cuda":
            self._torch.cuda.empty_cache()


def _eos_ids(*given: int | list[int] | None) -> frozenset[int]:
    """The end tokens: of the first place that names any."""
    for ids in given:
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
