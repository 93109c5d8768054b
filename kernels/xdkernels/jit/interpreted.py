"""Triton's interpreter, made to compute what a GPU does: without these three repairs its bfloat16 is garbage.

Seen in triton 3.6 and 3.7. Applied once, by `jit.launch` under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import numpy as np
from triton import language as tl
from triton.runtime import interpreter


def repair() -> None:
    """All three."""
    _let_tensors_bound_loops()
    _let_dot_take_bfloat16()
    _let_bfloat16_be_rounded()


def _let_tensors_bound_loops() -> None:
    """The interpreter holds a scalar as an array of one element, which numpy 2.4 makes no integer of."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _let_dot_take_bfloat16() -> None:
    """The interpreter keeps bfloat16 as its bits in integers, and its dot multiplies those."""
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
    """The interpreter cuts float32 off where a GPU rounds to the nearest bfloat16, to even on a tie."""
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
