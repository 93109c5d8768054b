"""A causal language model from a checkpoint directory, and what is made sure of before anything is computed with it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from libxd import checkpoint
from libxd.errors import Status, XdError, ran_out_of_memory
from libxd.runtimes import live

#: tokens of the forward that shows whether a model does more behind its head
_PROBE_TOKENS = 8
#: the greatest logit of that forward: large enough for a cap on logits to show in bfloat16
_PROBE_LOGIT = 64.0
#: the widest head of flash-attn 2 and 3
_FLASH_HEAD_DIM = 256


def load(directory: str, dtype: torch.dtype, attention: str | None) -> Any:
    """The model, in eval mode. attention None: transformers' default.

    XdError 65 when transformers refuses the checkpoint or would make up a weight; 69 when the model has no such
    attention or does not hold all of its weights in the dtype.
    """
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    where = os.path.basename(os.path.normpath(directory))
    checkpoint.require_sound(directory)
    if attention is not None:
        require_attention(directory, dtype, attention)
    with reading(where):
        model, loaded = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation=attention, local_files_only=True, use_safetensors=True,
            output_loading_info=True,
        )  # fmt: skip
    made_up = sorted({*map(str, loaded["missing_keys"]), *map(str, loaded["mismatched_keys"])})
    if made_up:  # transformers would draw them at random
        raise XdError("the checkpoint lacks weights of the model", code="bad-checkpoint", where=where, found=made_up)
    held = sorted({live.DTYPE_NAMES.get(parameter.dtype, str(parameter.dtype)) for parameter in model.parameters()})
    if held != [live.DTYPE_NAMES[dtype]]:  # a model may keep some of its weights in float32 whatever is asked
        raise XdError("the model does not hold all of its weights in the dtype that was asked for",
                      status=Status.REFUSED, code="unsupported-model", where=type(model).__name__, found=held,
                      expected=live.DTYPE_NAMES[dtype])  # fmt: skip
    return model.eval()


def require_attention(directory: str, dtype: torch.dtype, attention: str) -> None:
    """XdError 69 when the model, or the library for it, does not have this attention.

    The model is made without weights, once with the eager attention, which every one has, and once with the asked one:
    what fails only then is about the attention.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    where = os.path.basename(os.path.normpath(directory))
    with reading(where):
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    except (ImportError, ValueError) as error:
        raise _no_attention(attention, where, _first_line(error)) from error
    text = model.config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if attention.startswith("flash_attention") and head_dim > _FLASH_HEAD_DIM:
        raise _no_attention(attention, where, f"its heads of {head_dim} are wider than {_FLASH_HEAD_DIM}")


def require_plain_head(model: Any) -> None:
    """XdError 69 when the model's logits are not its head's product alone: scaled, capped, or of other states; or when
    its attention does not run.

    One forward over a few ids, in which the base model's hidden states are blown up on their way to the head, as a cap
    leaves small logits nearly as they are.
    """
    head = model.get_output_embeddings()
    ids = torch.arange(_PROBE_TOKENS, device=model.device).remainder(model.config.get_text_config().vocab_size)
    expected: list[Tensor] = []

    def blow_up(_module: Any, _arguments: Any, out: Any) -> Any:
        states = out.last_hidden_state
        out.last_hidden_state = states * (_PROBE_LOGIT / head(states).abs().max())
        expected.append(head(out.last_hidden_state))
        return out

    hook = model.base_model.register_forward_hook(blow_up)
    try:
        with torch.inference_mode():
            logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits
    except (ImportError, NotImplementedError, ValueError) as error:  # an attention that lacks what the model asks of it
        raise _no_attention(model.config._attn_implementation, type(model).__name__, _first_line(error)) from error
    finally:
        hook.remove()
    if len(expected) != 1 or logits.shape != expected[0].shape or not torch.equal(logits, expected[0].to(logits.dtype)):
        raise XdError("the model's logits are not its head's product alone: it scales or caps them, or gives the head "
                      "other states than its base model's", status=Status.REFUSED, code="unsupported-model",
                      where=type(model).__name__)  # fmt: skip


@contextlib.contextmanager
def reading(where: str) -> Iterator[None]:
    """What transformers makes of a checkpoint's files: whatever it raises there is about them, XdError 65 in one line.

    But for memory that ran out and for packages that are not there. What it logs is not said beside that.
    """
    from transformers import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except (XdError, ImportError, MemoryError):
        raise
    except Exception as error:  # of many kinds: its own, of safetensors, tokenizers, torch and pydantic-like checks
        if ran_out_of_memory(error):
            raise
        raise XdError(f"transformers cannot load this checkpoint: {type(error).__name__}: {error}",
                      code="bad-checkpoint", where=where) from error  # fmt: skip
    finally:
        logging.set_verbosity(verbosity)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _no_attention(attention: str, where: str, reason: str) -> XdError:
    return XdError(f"the model cannot be run with {attention}: {reason}", status=Status.REFUSED,
                   code="unsupported-attention", where=where)  # fmt: skip
