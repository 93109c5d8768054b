"""Policy objectives as losses to be minimised, each with its coefficient: the derivative in the token's logprob.

Notation: n rows, every one an active token (padding was dropped before). lp, old, ref: logprobs of the token under the
policy, under the policy that sampled it, and under the frozen reference. A: advantage. r: importance ratio. All
arithmetic is float64: the vectors are [n], small beside the head, and a ratio is the exponential of a difference.

| objective | term of a token                         | divided by                         | source                    |
|-----------|-----------------------------------------|------------------------------------|---------------------------|
| cispo     | -sg(clip(r, 1 - low, 1 + high)) A lp    | tokens                             | arXiv:2506.13585, eq. 3-5 |
| grpo      | -min(r A, clip(r, 1 - eps, 1 + eps) A)  | its sequence's tokens, sequences   | arXiv:2402.03300, eq. 3   |
| dapo      | -min(r A, clip(r, 1 - low, 1 + high) A) | tokens                             | arXiv:2503.14476, eq. 8   |
| dr_grpo   | as dapo                                 | a constant                         | arXiv:2503.20783, 3.2     |
| gspo      | as dapo, with the ratio of the sequence | as grpo                            | arXiv:2507.18071, eq. 5-7 |

sg is the stop-gradient. The papers maximise; the signs here are those of a loss. Papers average over the group of one
question and then over questions; here tokens and sequences of the whole batch are averaged at once, as trainers do:
the same for `grpo` and `gspo` when groups are of one size. KL: to each term beta * k3 is added, inside the average
(arXiv:2402.03300, eq. 3 and 4).

Two axes. The ratio is a token's, exp(lp - old), or that of a segment, exp(mean over its tokens of (lp - old)), a
geometric mean (arXiv:2507.18071, eq. 7). The advantage is given a token, a turn, or a sequence. The ratio must not be
coarser than the advantage: in -sum_t min(s A_t, clip(s) A_t) a ratio s of the sequence has the derivative
-s (sum_u A_u) / |y| in every logprob, so that each token would get the mean advantage: the credit that finer
advantages carry is lost without a trace, and tokens of both signs would clip one ratio on both sides. (For `cispo`
the weight is constant and the credit survives, but a weight that looks ahead at tokens after t corrects no
advantage that belongs to t; the same pairs are admitted.) With such pairs A and the weight w of a term are constant
over a ratio's segment, and one coefficient serves all levels:

    d loss / d lp_t = -w_t A_t r_t where the clip does not act, else 0      (cispo: -w_t A_t clip(r_t), always)

with r_t the ratio of t's segment: the 1 / |segment| of the geometric mean cancels against the sum over its tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch

from xdkernels.segments import Segments

LEVELS = ("token", "turn", "sequence")
#: (ratio level, advantage level): no ratio coarser than its advantage
SOUND_PAIRS = (
    ("token", "token"), ("token", "turn"), ("token", "sequence"),
    ("turn", "turn"), ("turn", "sequence"),
    ("sequence", "sequence"),
)  # fmt: skip


@dataclass(frozen=True)
class Objective:
    """What sets an objective apart.

    pairs: the (ratio level, advantage level) it admits, its own one first.
    average: over "tokens", over "sequences" of their tokens' means, or by a "constant" that the caller gives.
    clips_weight: the ratio is a clipped constant weight (cispo), not part of a clipped surrogate.
    is_symmetric: one epsilon on both sides. needs_low: an eps_low must be given.
    """

    name: str
    pairs: tuple[tuple[str, str], ...]
    average: str
    clips_weight: bool = False
    is_symmetric: bool = False
    needs_low: bool = True


#: `grpo` with a sequence's ratio would be `gspo`, and has that name; `gspo` with another ratio is none
OBJECTIVES = {
    objective.name: objective
    for objective in (
        Objective("cispo", SOUND_PAIRS, "tokens", clips_weight=True, needs_low=False),
        Objective("grpo", SOUND_PAIRS[:-1], "sequences", is_symmetric=True, needs_low=False),
        Objective("dapo", SOUND_PAIRS, "tokens"),
        Objective("dr_grpo", SOUND_PAIRS, "constant"),
        Objective("gspo", SOUND_PAIRS[-1:], "sequences"),
    )
}


def find(objective: str) -> Objective:
    """The objective of that name. ValueError lists those there are."""
    if objective not in OBJECTIVES:
        raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}: {objective!r}")
    return OBJECTIVES[objective]


def levels(objective: Objective, ratio_level: str | None, advantage_level: str | None) -> tuple[str, str]:
    """The pair of levels, an absent one being the objective's own. ValueError for a pair that it does not admit."""
    pair = tuple(
        own if given is None else given
        for given, own in zip((ratio_level, advantage_level), objective.pairs[0], strict=True)
    )
    if pair not in objective.pairs:
        admitted = ", ".join(f"{ratio}/{advantage}" for ratio, advantage in objective.pairs)
        why = " (a ratio must not be coarser than its advantage)" if _is_coarser(*pair) else ""
        raise ValueError(
            f"{objective.name} does not admit ratio_level/advantage_level {pair[0]}/{pair[1]}{why}, but {admitted}"
        )
    return pair


def _is_coarser(ratio_level: str, advantage_level: str) -> bool:
    known = ratio_level in LEVELS and advantage_level in LEVELS
    return known and LEVELS.index(ratio_level) > LEVELS.index(advantage_level)


def clip_bounds(objective: Objective, eps_low: float | None, eps_high: float | None) -> tuple[float, float]:
    """The bounds (1 - eps_low, 1 + eps_high) of the ratio.

    cispo: without an eps_low there is no lower bound, as its authors ran it. (Some trainers call the upper bound
    itself epsilon_high; here it is 1 + eps_high, as in the paper.) grpo: eps_high alone, or an equal eps_low.
    ValueError: missing, negative or not finite.
    """
    for name, epsilon in (("eps_low", eps_low), ("eps_high", eps_high)):
        if epsilon is None:
            if name == "eps_high" or objective.needs_low:
                raise ValueError(f"{objective.name} needs {name}")
        elif isinstance(epsilon, bool) or not isinstance(epsilon, Real) or not 0 <= epsilon < math.inf:
            raise ValueError(f"{name} must be a finite number, 0 or more: {epsilon!r}")
    if objective.is_symmetric:
        if eps_low not in (None, eps_high):
            raise ValueError(f"{objective.name} clips symmetrically: eps_low {eps_low} is not eps_high {eps_high}")
        eps_low = eps_high
    return (-math.inf if eps_low is None else 1.0 - eps_low), 1.0 + eps_high


class Terms(NamedTuple):
    """Of each row, float64 [n]: the term, its derivative in lp, and (bool) whether a bound of the clip changed it."""

    values: torch.Tensor
    slopes: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor


def clipped_surrogate(ratios: torch.Tensor, advantages: torch.Tensor, lower: float, upper: float) -> Terms:
    """-min(r A, clip(r, lower, upper) A) and its derivative, with dr/dlp = r.

    The clip acts where it lowers the gain: above `upper` for A > 0, below `lower` for A < 0. *At* a bound it does not
    act yet: of the two one-sided derivatives there the one from inside, -A r, is taken, so that an epsilon of 0 leaves
    the first, on-policy step (r = 1 everywhere) its full gradient. A row with A = 0 has term and derivative 0.
    """
    low = (advantages < 0) & (ratios < lower)
    high = (advantages > 0) & (ratios > upper)
    # an overflowed ratio times an advantage of 0 would be NaN; a NaN stays one
    acting = torch.where((advantages == 0) & ratios.isinf(), 1.0, ratios)
    acting = torch.where(low, lower, torch.where(high, upper, acting))
    values = -advantages * acting
    return Terms(values, torch.where(low | high, 0.0, values), low, high)


def clipped_weight(
    logprobs: torch.Tensor, ratios: torch.Tensor, advantages: torch.Tensor, lower: float, upper: float
) -> Terms:
    """-sg(clip(r, lower, upper)) A lp and its derivative: the weight is a constant, so every token keeps a gradient.

    At a bound both sides agree. A row with A = 0 has term 0 and counts as not clipped: nothing changed.
    """
    slopes = -advantages * ratios.clamp(lower, upper)
    acts = advantages != 0
    values = torch.where(slopes == 0, 0.0, slopes * logprobs)  # of a logprob of -inf, too
    return Terms(values, slopes, acts & (ratios < lower), acts & (ratios > upper))


def k3_new_reference(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k3 = exp(ref - lp) - (ref - lp) - 1 and its derivative in lp, 1 - exp(ref - lp), float64 [n].

    A token's estimate of KL(policy || reference), at least 0, when the policy sampled the token (arXiv:2402.03300,
    eq. 4). By expm1, since differences of 1e-8 would cancel.
    """
    difference = reference_logprobs - logprobs
    excess = torch.expm1(difference)
    return excess - difference, -excess


class Evaluation(NamedTuple):
    """A batch under an objective, all float64 but the masks.

    loss: 0-d, the sum of `terms` [n]; coefficients [n] = d loss / d lp. log_ratios [n]: log r at the ratio's level, not
    clipped. clipped_low, clipped_high: bool [n], rows whose term a bound changed.
    """

    loss: torch.Tensor
    terms: torch.Tensor
    coefficients: torch.Tensor
    log_ratios: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor


def evaluate(
    objective: Objective,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    bounds: tuple[float, float],
    *,
    ratio_segments: Segments | None = None,
    sequences: Segments | None = None,
    denominator: float | torch.Tensor | None = None,
    beta: float = 0.0,
    reference_logprobs: torch.Tensor | None = None,
) -> Evaluation:
    """The loss of n active rows and its coefficients.

    logprobs, old_logprobs, advantages, reference_logprobs: [n], any floating dtype; an advantage a row, constant over
    the ratio's segment. bounds: of `clip_bounds`. ratio_segments: whose tokens share a ratio; none: each its own.
    sequences: needed where the average is over them. denominator: what the sum of weighted terms is divided by,
    instead of the number of tokens (cispo, dapo) or of sequences with a row (grpo, gspo); dr_grpo has no other.
    beta, reference_logprobs: weight and reference of the k3 penalty.
    """
    logprobs, old_logprobs, advantages = (x.detach().to(torch.float64) for x in (logprobs, old_logprobs, advantages))
    log_ratios = logprobs - old_logprobs
    if ratio_segments is not None:
        log_ratios = ratio_segments.mean(log_ratios)
    ratios = log_ratios.exp()
    if objective.clips_weight:
        terms = clipped_weight(logprobs, ratios, advantages, *bounds)
    else:
        terms = clipped_surrogate(ratios, advantages, *bounds)
    values, coefficients = terms.values, terms.slopes
    if beta:
        penalty, slope = k3_new_reference(logprobs, reference_logprobs.detach().to(torch.float64))
        values, coefficients = values + beta * penalty, coefficients + beta * slope
    if objective.average == "sequences":
        values, coefficients = values / sequences.row_counts, coefficients / sequences.row_counts
        denominator = sequences.present if denominator is None else denominator
    elif objective.average == "tokens" and denominator is None:
        denominator = len(values)
    values, coefficients = values / denominator, coefficients / denominator
    return Evaluation(values.sum(), values, coefficients, log_ratios, terms.clipped_low, terms.clipped_high)
