"""The settings of a process in which vLLM scores: variables that vLLM reads when it is imported. No vLLM, no torch."""

from __future__ import annotations

import os

#: Part of the process fingerprint; set before vLLM is imported, whatever stood there before.
VARIABLES = {
    # engine, scheduler and model in the process that holds the operator
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # the runner whose sampler is torch: the other one samples in Triton kernels, where no operator can be bound
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # a position more than the longest sequence, which may be as long as the context: its last token is fed, too
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    # kernels are chosen by the sizes that a graph is first compiled for: none is taken from a disk
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "VLLM_USE_AOT_COMPILE": "0",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    # nothing is fetched and nothing is told
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def prepare() -> None:
    """Make this process one that vLLM may be imported into."""
    os.environ.update(VARIABLES)
