"""The settings of a process in which vLLM scores: variables that vLLM reads when it is imported. No vLLM, no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

#: Part of the process fingerprint; set before vLLM is imported, whatever stood there before.
VARIABLES = {
    # engine and scheduler in the process that asks for logprobs
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # the runner whose sampler is torch: the other one samples in Triton kernels, where no operator can be bound
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # a position more than the longest sequence, which may be as long as the context: its last token is fed, too
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    # kernels are chosen by the sizes that a graph is first compiled for: none is taken from a disk
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "VLLM_USE_AOT_COMPILE": "0",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    # workers begin as new interpreters, and when one dies the others, which wait for it, are not waited for long
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
    # nothing is fetched and nothing is told
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


#: which processors the threads of each rank run on; without it vLLM takes a whole NUMA node a rank, or stops
_BINDING = "VLLM_CPU_OMP_THREADS_BIND"


def variables(device: str, ranks: int, given: Mapping[str, str]) -> dict[str, str]:
    """What is set for an engine of so many ranks. Threads are bound as the user says, or not at all."""
    binding = {_BINDING: given.get(_BINDING, "nobind")} if device == "cpu" and ranks > 1 else {}
    return VARIABLES | binding


def prepare(device: str, ranks: int) -> None:
    """Make this process one that vLLM may be imported into."""
    os.environ.update(variables(device, ranks, os.environ))
