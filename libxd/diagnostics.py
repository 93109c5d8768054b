"""What is reported beside the verdict and never decides it: value grid, KL estimators, worst and first token.

Every class takes blocks in token order and holds constant memory. Results are the same on every machine: float64 sums
are formed by a fixed tree inside a block and correctly rounded (`math.fsum`) over the blocks; only +, - and * of IEEE
754 are used, no function whose last bit depends on a math library.
"""

from __future__ import annotations

import math

import numpy as np

#: decimals that are tried: a float32 logprob printed with more of them is hardly ever told from one that was not
MAX_DECIMALS = 6


class ValueGrid:
    """The coarsest grid that holds every value: rounding that somebody did before the logprobs arrived.

    Tried in this order: bfloat16, float16, then multiples of 10^-n (n = 1 to 6), each exactly: a value lies on a grid
    when it is the float32 nearest to a point of it. A decimal grid counts only while its spacing is at least four
    times that of float32 at the value, since below that nearly every float32 value lies on it.
    """

    def __init__(self) -> None:
        self._left = ["bfloat16", "float16", *(f"decimal_{n}" for n in range(1, MAX_DECIMALS + 1))]
        self._seen = False

    def add(self, values: np.ndarray) -> None:
        """Take in finite float32 values [N]."""
        if not values.size:
            return
        self._seen = True
        for part in (values[:64], values):  # most grids fall on the first few values
            self._left = [grid for grid in self._left if _holds(grid, part)]

    def name(self) -> str | None:
        """The grid's name, "none" when there is none, None without values."""
        if not self._seen:
            return None
        return self._left[0] if self._left else "none"


def _holds(grid: str, values: np.ndarray) -> bool:
    if grid == "bfloat16":
        return not (values.view(np.uint32) & np.uint32(0xFFFF)).any()
    if grid == "float16":
        with np.errstate(over="ignore"):
            return bool((values.astype(np.float16).astype(np.float32) == values).all())
    scale = 10.0 ** int(grid.removeprefix("decimal_"))
    with np.errstate(over="ignore"):  # beyond the largest float32 there is no next
        spacing = float(np.spacing(np.abs(values).max()))
    if 4 * spacing > 1 / scale:
        return False
    points = np.rint(values.astype(np.float64) * scale) / scale
    return bool((points.astype(np.float32) == values).all())


class KullbackLeibler:
    """Estimates of KL(rollout || training) in nats a token, from tokens that the rollout policy sampled.

    With d = training - rollout = log r: k1 = mean(-d), k2 = mean(d^2) / 2, k3 = mean(exp(d) - 1 - d)
    (J. Schulman, "Approximating KL divergence", 2020). d is the float32 difference that is judged; the rest is float64.
    """

    _CHUNK = 1 << 15  # values that stay in a core's cache through the series

    def __init__(self) -> None:
        self._squares: list[float] = []
        self._k3: list[float] = []

    def add(self, differences: np.ndarray) -> None:
        """Take in float32 differences [N] of finite logprobs; they themselves may be beyond float32."""
        squares, terms = [], []
        for start in range(0, differences.size, self._CHUNK):
            d = differences[start : start + self._CHUNK].astype(np.float64)
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite then has no estimate
                squares.append(tree_sum(d * d))
                terms.append(tree_sum(expm1_minus(d)))
        self._squares.append(_fsum(squares))
        self._k3.append(_fsum(terms))

    def k2(self, count: int) -> float | None:
        """k2 over `count` tokens; None for none."""
        return finite(_fsum(self._squares) / count / 2) if count else None

    def k3(self, count: int) -> float | None:
        """k3 over `count` tokens; None for none, or where exp(d) is beyond float64."""
        return finite(_fsum(self._k3) / count) if count else None


def tree_sum(values: np.ndarray) -> float:
    """The float64 sum of values [N], halves added to halves: the order is fixed by N alone. Overwrites `values`."""
    size = 1 << max(values.size - 1, 0).bit_length()
    if size == values.size:
        work = values
    else:
        work = np.zeros(size, np.float64)
        work[: values.size] = values
    while size > 1:
        size //= 2
        work[:size] += work[size : 2 * size]
    return float(work[0])


_SERIES_BOUND = 0.5
#: up to which |x| the Taylor series may end at which power of x: what is left out is below 2^-44 of the sum
_DEGREES = ((0.125, 9), (_SERIES_BOUND, 13))
_HALVINGS = 11  # brings |x| up to 1024, beyond which exp over- or underflows, to 0.5


def expm1_minus(x: np.ndarray) -> np.ndarray:
    """exp(x) - 1 - x of float64 x [N], to a relative 1e-11, with + - * alone.

    A Taylor series up to |x| = 0.5, without the cancellation that `expm1(x) - x` has for small x; beyond, exp(x /
    2^11) by the series, squared eleven times.
    """
    result = _series(x)
    far = np.flatnonzero(np.abs(x) > _SERIES_BOUND)
    if far.size:
        clipped = np.clip(x[far], -1024.0, 1024.0)
        scaled = clipped * 2.0**-_HALVINGS
        power = 1.0 + (scaled + _series(scaled))
        for _ in range(_HALVINGS):
            power *= power
        result[far] = power - 1.0 - x[far]
    return result


def _series(x: np.ndarray) -> np.ndarray:
    largest = float(np.abs(x).max()) if x.size else 0.0
    degree = next((degree for bound, degree in _DEGREES if largest <= bound), _DEGREES[-1][1])
    total = np.full_like(x, 1 / math.factorial(degree))
    for k in range(degree - 1, 1, -1):
        total *= x
        total += 1 / math.factorial(k)
    total *= x
    total *= x
    return total


class Extremes:
    """The active token with the largest |difference|, and the first that is a mismatch; of equals, the first."""

    def __init__(self) -> None:
        self.worst: int | None = None
        self.first_mismatch: int | None = None
        self._largest = -1.0

    def add(self, places: np.ndarray, differences: np.ndarray, mismatch: np.ndarray) -> None:
        """Take in active tokens: their flat indices, float32 differences and whether each is a mismatch, all [A]."""
        if not places.size:
            return
        magnitudes = np.abs(differences)
        index = int(magnitudes.argmax())
        if float(magnitudes[index]) > self._largest:
            self._largest = float(magnitudes[index])
            self.worst = int(places[index])
        if self.first_mismatch is None and mismatch.any():
            self.first_mismatch = int(places[mismatch.argmax()])


def locate(index: int, cu_seqlens: np.ndarray) -> tuple[int, int]:
    """The sequence that a flat index lies in, and the position inside it (cu_seqlens: int64 [B+1])."""
    sequence = int(np.searchsorted(cu_seqlens, index, side="right")) - 1
    return sequence, index - int(cu_seqlens[sequence])


def finite(value: float) -> float | None:
    """None for what JSON has no number for."""
    return value if math.isfinite(value) else None


def _fsum(values: list[float]) -> float:
    """The correctly rounded sum of non-negative values, infinite where it is beyond float64."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf
