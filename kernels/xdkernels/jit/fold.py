"""Sums whose order the source decides.

`tl.sum` adds in the order of the compiler's layout, and the layout follows what the compiler knows of the pointers: a
row that begins elsewhere could be added up in another order. Folding by halves leaves a reduction two operands at a
time, and a + b is b + a. Multiplications and additions that could be fused are written as `tl.fma` or launched with
FUSION off, for the same reason. Maxima need no care: their order does not show.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: launch option: no multiplication is contracted into an addition unless the source says so
FUSION = {"enable_fp_fusion": False}
#: where running maxima start: finite, so that a column of -inf gives exp(-inf - LOWEST) = 0 and no NaN
LOWEST = tl.constexpr(-3.4028234663852886e38)
#: exp(x) is 0 in float32 here and below; an x that multiplies exp(x) stops here, so that 0 is not multiplied by -inf
UNDERFLOW = tl.constexpr(-128.0)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.constexpr_function
def _halvings(width):
    assert width & (width - 1) == 0, width
    return width.bit_length() - 1


@triton.jit
def fold_sum(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """float32 [ROWS, WIDTH] -> [ROWS]; WIDTH a power of two. Halves are added until one column is left."""
    for step in tl.static_range(_halvings(WIDTH)):
        x = tl.sum(tl.reshape(x, (ROWS, 2, WIDTH >> (step + 1))), axis=1)
    return tl.reshape(x, (ROWS,))


@triton.jit
def fold_rows(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """float32 [ROWS, WIDTH] -> [WIDTH]; ROWS a power of two. The same, down the columns."""
    for step in tl.static_range(_halvings(ROWS)):
        x = tl.sum(tl.reshape(x, (2, ROWS >> (step + 1), WIDTH)), axis=0)
    return tl.reshape(x, (WIDTH,))


@triton.jit
def exp(x):
    """exp of float32 x <= 0, to some 2 ulp near 0; 0 below the normal range. One multiplication, one ex2."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def divided(x, divisor, reciprocal):
    """float32 x / divisor to the last place: the quotient by the reciprocal, corrected by its remainder.

    reciprocal: 1 / divisor, rounded. Quotients that are not finite are not corrected: inf * divisor - inf is NaN.
    """
    quotient = x * reciprocal
    corrected = tl.fma(tl.fma(-quotient, divisor, x), reciprocal, quotient)
    return tl.where(tl.abs(quotient) < float("inf"), corrected, quotient)
