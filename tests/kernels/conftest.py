"""The kernels' tests: one text, under Triton's interpreter on the CPU and compiled on a GPU.

    TRITON_INTERPRET=1 pytest tests/kernels        no GPU is needed
    pytest tests/kernels                           on a machine that has one

The variable is read when triton is imported and would reach other tests, so the interpreted ones are a run of their own
(`make test` makes both). Where there is neither the variable nor a GPU, the folder is passed over.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def can_run() -> bool:
    """Whether kernels can be launched in this process, interpreted or compiled."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "triton")):
        return False
    if INTERPRETED:
        return True
    import torch

    return torch.cuda.is_available()


collect_ignore_glob = [] if can_run() else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """numpy warns where the interpreter computes what a GPU computes quietly: inf - inf, log(0)."""
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(scope="session")
def device() -> str:
    """Where the tests' tensors live: "cpu" under the interpreter, else "cuda"."""
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def beyond(device: str, tmp_path: Path) -> torch.Tensor:
    """bfloat16 of more than 2^31 elements; on the CPU a sparse file, of which only what is touched takes room."""
    import torch

    count = 2**31 + 2**28
    if device == "cpu":
        return torch.from_file(str(tmp_path / "sparse"), shared=True, size=count, dtype=torch.bfloat16)
    return torch.empty(count, dtype=torch.bfloat16, device=device)
