"""A pair of five sequences whose ratios are out of every bound, and what its impact and its credit are asked with."""

from __future__ import annotations

import numpy as np
from comparison_fixtures import scored

from libxd import impact, pairs, schema
from libxd.columns import Layout

LENGTHS = (7, 5, 1, 9, 4)
TOKENS = sum(LENGTHS)
BOUNDS = np.cumsum((0, *LENGTHS))
#: turns of the sequences: 2, 1, 0, 3, 1
ACTIVE = np.array([0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1], bool)
TURNS = 7
BY_SEQUENCE = np.array([1.5, -0.5, 7.0, -2.0, 0.0])
SEQUENCE_OF = np.repeat(np.arange(5), LENGTHS)


def drawn(spread: float = 0.4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs float32 [TOKENS] of both sides, some ratios out of every bound; NaN where nothing is active."""
    generator = np.random.default_rng(seed)
    rollout = -generator.exponential(1.0, TOKENS)
    training = rollout + spread * generator.standard_normal(TOKENS)
    training[[1, 9, 17]] = rollout[[1, 9, 17]] + [1.9, -1.2, -0.9]
    rollout[~ACTIVE] = training[~ACTIVE] = np.nan
    return rollout.astype(np.float32), training.astype(np.float32)


def pair_of(root, rollout=None, training=None, active=ACTIVE, lengths=LENGTHS):
    if rollout is None:
        rollout, training = drawn()
    return pairs.of_attempt(scored(root, rollout, training, active=active, lengths=lengths))


def figures(pair, *given):
    return schema.validate("impact", impact.of_pair(pair, *given).as_json(), "impact")


def layout(pair):
    return Layout(pair.cu_seqlens, pair.rollout.active_mask)


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path
