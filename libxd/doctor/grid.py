"""Grid: logprobs that were rounded on their way, to bfloat16, float16 or so many decimals."""

from __future__ import annotations

import numpy as np

from libxd.diagnostics import ValueGrid
from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import FACT, SHAPE, Finding, Rule
from libxd.rundir import SIDES

_LEAST = 8
#: half a step, and what the other side's own rounding may add
_EXPLAINS = 1.05

RULE = Rule(
    "grid",
    ("rounded-on-the-way",),
    "All logprobs of a side, 8 or more of them different and not 0, lie on the grid of bfloat16, float16 or n "
    "decimals. It explains the difference where 95 % of the tokens are within half a step of the other side.",
    "A float32 lies on the bfloat16 grid once in 2^16, on float16's once in 2^13: for eight tokens below 2^-100.",
    least_tokens=_LEAST,
)


def examine(evidence: Evidence) -> Finding | None:
    lines, explains = [], False
    for side in SIDES:
        values = evidence.of_side(side)
        if np.unique(values[values != 0]).size < _LEAST:
            continue
        grid = ValueGrid()
        grid.add(values.astype(np.float32))
        name = grid.name()
        if name in (None, "none"):
            continue
        half = _half_steps(name, values)
        within = float(np.mean(evidence.magnitude <= _EXPLAINS * half))
        lines.append(
            f"{side}: all {values.size} logprobs lie on the grid of {_words(name)}; half a step is up to "
            f"{half.max():.2g} nats, and {within:.0%} of the tokens are within it of the other side"
        )
        explains |= within >= 0.95
    if not lines:
        return None
    summary = "logprobs were rounded before they were stored" + ("" if explains else ", which is not all of it")
    return Finding("rounded-on-the-way", FACT if explains else SHAPE, summary, lines, [
        "keep logprobs in float32 from the log-softmax to the file: no cast, no printing",
    ])  # fmt: skip


def _words(grid: str) -> str:
    return grid.replace("decimal_", "") + " decimals" if grid.startswith("decimal_") else grid


def _half_steps(grid: str, values: np.ndarray) -> np.ndarray:
    """Half the distance to the next point of the grid: float64 [A], nats."""
    if grid.startswith("decimal_"):
        return np.full(values.size, 0.5 * 10.0 ** -int(grid.removeprefix("decimal_")))
    bits = 8 if grid == "bfloat16" else 11
    _, exponent = np.frexp(np.abs(values))
    return np.ldexp(0.5, exponent - bits)
