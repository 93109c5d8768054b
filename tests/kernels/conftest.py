"""The kernels' tests: one text, under Triton's interpreter on the CPU and compiled on a GPU.

    TRITON_INTERPRET=1 pytest tests/kernels        no GPU is needed
    pytest tests/kernels                           on a machine that has one

The variable is read when triton is imported and would reach other tests, so the interpreted ones are a run of their own
(`make test` makes both). Where there is neither the variable nor a GPU, the folder is passed over.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

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


def _let_tensors_bound_loops() -> None:
    """Triton 3.6's interpreter holds a scalar as an array of one element, which numpy 2.4 makes no integer of."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _let_dot_take_bfloat16() -> None:
    """Triton 3.6's interpreter keeps bfloat16 as its bits in integers, and its dot multiplies those."""
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def floats(operand):
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        wide = (operand.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def patched(self, a, b, d, input_precision, max_num_imprecise_acc):
        return dot(self, floats(a), floats(b), d, input_precision, max_num_imprecise_acc)

    interpreter.InterpreterBuilder.create_dot = patched


def _let_bfloat16_be_rounded() -> None:
    """Triton 3.6's interpreter cuts float32 off where a GPU rounds to the nearest bfloat16, to even on a tie."""
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.cast_impl

    def patched(self, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, dst_type)
        bits = np.ascontiguousarray(src.data).view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return interpreter.TensorHandle(
            np.where(np.isnan(src.data), bits >> 16 | 0x40, nearest).astype(np.uint16), dst_type.scalar
        )

    interpreter.InterpreterBuilder.cast_impl = patched


if INTERPRETED and can_run():
    _let_tensors_bound_loops()
    _let_dot_take_bfloat16()
    _let_bfloat16_be_rounded()


def pytest_configure(config: pytest.Config) -> None:
    """numpy warns where the interpreter computes what a GPU computes quietly: inf - inf, log(0)."""
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(scope="session")
def device() -> str:
    """Where the tests' tensors live: "cpu" under the interpreter, else "cuda"."""
    return "cpu" if INTERPRETED else "cuda"
