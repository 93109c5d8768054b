"""vLLM built from a checkpoint directory, and what is made sure of before."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs

from libxd import checkpoint
from libxd.errors import Status, XdError, ran_out_of_memory
from libxd.runtimes.vllm import memory

#: how vLLM says that its cache does not fit
_NO_ROOM = ("requested memory for kv", "KV cache memory", "No available memory for the cache blocks")
#: and that one of its workers has failed before all were ready: by an error of its own, or killed
_WORKER_FAILED = ("WorkerProc initialization failed", "Executor failed")
_WORKER_DIED = "cancelled"
#: vLLM does not start when less than this part of a GPU is free, whatever it is going to take
_OF_DEVICE: dict[str, dict[str, Any]] = {"cpu": {}, "cuda": {"gpu_memory_utilization": 0.01}}


def load(locations: dict[str, Any], engine: dict[str, Any]) -> LLM:
    """The engine: its scheduler in this process, and so is its only rank; more than one are processes of their own.

    XdError 65 for a checkpoint that vLLM refuses and for sequences that are longer than its context; 69 for a model
    that vLLM does not have.
    """
    directory = locations["checkpoint"]
    where = os.path.basename(os.path.normpath(directory))
    checkpoint.require_sound(directory)
    sizes = memory.of(engine, locations)
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        _require_known(directory, where, sizes.length - 1)
        return LLM(
            model=directory,
            dtype=engine["dtype"],
            enforce_eager=engine["enforce_eager"],
            enable_prefix_caching=engine["enable_prefix_caching"],
            block_size=engine["block_size"],
            max_model_len=sizes.length,
            max_num_seqs=sizes.requests,
            max_num_batched_tokens=sizes.forward,
            kv_cache_memory_bytes=sizes.cache,
            **_OF_DEVICE[engine["device"]],
            tensor_parallel_size=engine["tensor_parallel_size"],
            async_scheduling=False,
            skip_tokenizer_init=True,
            generation_config="vllm",
            load_format="safetensors",
            seed=0,
        )
    except XdError:
        raise
    except Exception as error:  # of many kinds: its own, of pydantic, safetensors and torch
        if ran_out_of_memory(error):
            raise
        if any(words in str(error) for words in _NO_ROOM):
            raise XdError(f"there is no memory for vLLM's cache: {' '.join(str(error).split())}", status=Status.RETRY,
                          code="out-of-memory", hint="it holds all frozen sequences: fewer or shorter ones need less",
                          ) from error  # fmt: skip
        if str(error) == _WORKER_DIED or any(words in str(error) for words in _WORKER_FAILED):
            # what failed it, only the worker said
            raise XdError("a worker of vLLM does not start", status=Status.BUG, code="rank-died", where=where,
                          hint="its last words are above, or with -v") from error  # fmt: skip
        raise XdError(f"vLLM cannot load this checkpoint: {type(error).__name__}: {error}", code="bad-checkpoint",
                      where=where) from error  # fmt: skip
    finally:
        # vLLM puts functions that do nothing in the place of some of torch's, and where it has workers of its own it
        # lets this process, which only schedules for them, have one thread
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _require_known(directory: str, where: str, longest: int) -> None:
    """XdError unless vLLM has this architecture itself and its context is as long as the longest sequence."""
    from vllm import ModelRegistry

    names = checkpoint.config_of(directory).get("architectures") or []
    if not set(names) & set(ModelRegistry.get_supported_archs()):
        raise XdError("vLLM has no model of this architecture", status=Status.REFUSED, code="unsupported-model",
                      where=where, found=names)  # fmt: skip
    context = EngineArgs(model=directory, skip_tokenizer_init=True).create_model_config().max_model_len
    if longest > context:
        raise XdError("a frozen sequence is longer than the model's context", code="bad-sequences", where=where,
                      found=longest, expected=f"at most {context} tokens")  # fmt: skip
