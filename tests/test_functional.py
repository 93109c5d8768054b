"""The functions of libxd.functional against sums over distributions, loops as the papers have them, and by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from tolerances import FUNCTIONAL_RELATIVE, NEAR_POLICIES_RELATIVE, POLICY_FLOAT64, WHITENED_RELATIVE

from libxd.functional import advantages, corrections, gae, kl, ratios, rewards, segments
from libxd.functional.segments import Segments

CLOSE = {"rel": POLICY_FLOAT64, "abs": POLICY_FLOAT64}
GROUPS = Segments(np.array([0, 1, 0, 1, 1, 2, 2]), 3)
REWARDS = np.array([1.0, 0.0, 0.0, 2.0, 1.0, 0.1, 0.1])


def distributions(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two policies over nine tokens: probabilities of rollout and of training."""
    logits = np.random.default_rng(seed).normal(size=(2, 9))
    weights = np.exp(logits)
    return tuple(weights / weights.sum(axis=1, keepdims=True))


# -- KL, effective sample size and chi-square: expectations over all tokens are the definitions


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_expectation_of_k1_and_k3_is_the_divergence_of_their_name(estimator):
    rollout, training = distributions()
    d = ratios.log_ratios(np.log(training), np.log(rollout))
    wanted = {
        "rollout_training": float(rollout @ (np.log(rollout) - np.log(training))),
        "training_rollout": float(training @ (np.log(training) - np.log(rollout))),
    }
    found = {name: float(rollout @ terms[estimator](d)) for name, terms in kl.ESTIMATORS.items()}
    assert found == pytest.approx(wanted, **CLOSE)
    assert wanted["rollout_training"] != pytest.approx(wanted["training_rollout"], rel=NEAR_POLICIES_RELATIVE)
    assert rollout @ kl.k1_rollout_training(-d) < 0 < wanted["rollout_training"]  # and signs


def test_the_three_estimators_agree_for_near_policies_and_k3_is_no_less_than_0():
    d = np.random.default_rng(1).normal(size=4000) * 1e-3
    for terms in kl.ESTIMATORS.values():
        assert terms["k3"](d).mean() == pytest.approx(terms["k2"](d).mean(), rel=NEAR_POLICIES_RELATIVE)
        assert (terms["k3"](np.concatenate((d, -d, [0.0, 1e-17, -3e-16]))) >= 0).all()
    assert kl.k2_rollout_training(np.array([2.0])) == 2.0
    assert kl.k2_training_rollout(np.array([2.0])) == pytest.approx(2 * math.exp(2), **CLOSE)


def test_chi_square_is_its_definition_in_expectation():
    rollout, training = distributions()
    counts = (rollout * 100_000).round().astype(int)  # a sample in which each token comes as often as it should
    of_sample = counts / counts.sum()
    d = np.log(training) - np.log(of_sample)
    wanted = float((training**2 / of_sample).sum() - 1)
    assert ratios.chi_square(np.repeat(d, counts)) == pytest.approx(wanted, rel=FUNCTIONAL_RELATIVE)
    weights = np.exp(np.repeat(d, counts))
    assert ratios.ess_fraction(np.repeat(d, counts)) == pytest.approx(
        weights.sum() ** 2 / (len(weights) * (weights**2).sum()), rel=FUNCTIONAL_RELATIVE
    )
    assert ratios.ess_fraction(np.repeat(d, counts)) == pytest.approx(1 / (1 + wanted), rel=FUNCTIONAL_RELATIVE)


def test_moments_come_block_by_block_and_do_not_overflow():
    d = np.random.default_rng(2).normal(size=1000)
    whole, parts = ratios.Moments(), ratios.Moments()
    whole.add(d)
    for part in np.array_split(np.sort(d), 7):  # the largest last: every block rescales
        parts.add(part)
    for name in ("count", "mean", "ess_fraction", "chi_square"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=FUNCTIONAL_RELATIVE)
    assert whole.mean == pytest.approx(np.exp(d).mean(), rel=FUNCTIONAL_RELATIVE)
    assert ratios.ess_fraction(np.array([800.0, 800.0, -math.inf, -math.inf])) == 0.5
    assert ratios.chi_square(np.array([800.0])) is None
    assert ratios.ess_fraction(np.array([-math.inf])) is None
    assert ratios.ess_fraction(np.zeros(5)) == 1.0
    assert (ratios.Moments().mean, ratios.chi_square(np.zeros(0))) == (None, None)


# -- segments and ratios


def test_turns_are_unbroken_runs_of_active_tokens_within_a_sequence():
    #        0  1  2  3  4 | 5  6 | 7  8  9   (the third sequence is empty)
    active = np.array([0, 1, 1, 0, 1, 1, 1, 1, 0, 1], bool)
    places = np.flatnonzero(active)
    sequences = segments.by_sequence(places, np.array([0, 5, 7, 7, 10]))
    assert sequences.index.tolist() == [0, 0, 0, 1, 1, 3, 3]
    assert sequences.counts.tolist() == [3, 2, 0, 2]
    turns = segments.by_turn(places, sequences)
    assert (turns.index.tolist(), turns.size) == ([0, 0, 1, 2, 2, 3, 4], 5)
    assert segments.by_turn(places, Segments(np.zeros(7, np.int64), 1)).size == 3  # without the sequences' bounds
    assert segments.by_turn(np.zeros(0, np.int64), Segments(np.zeros(0, np.int64), 2)).size == 0


def test_ratios_of_a_segment():
    d, of = np.array([0.1, 0.3, -0.2, 0.5]), Segments(np.array([0, 0, 2, 0]), 3)
    assert ratios.product(d, of) == pytest.approx([0.9, 0.0, -0.2], **CLOSE)
    assert ratios.geometric_mean(d, of) == pytest.approx([0.3, 0.0, -0.2], **CLOSE)
    assert of.at_tokens(ratios.geometric_mean(d, of)) == pytest.approx([0.3, 0.3, -0.2, 0.3], **CLOSE)
    halves = np.array([1, 2], np.float32), np.array([3, 5], np.float32)
    assert ratios.log_ratios(*halves).dtype == np.float64 and ratios.log_ratios(*halves).tolist() == [-2, -3]


# -- advantages and rewards


def test_advantages_of_groups_by_the_formulas():
    found = {name: getattr(advantages, name)(REWARDS, GROUPS) for name in ("grpo", "dr_grpo", "rloo")}
    for sequence, group in enumerate(GROUPS.index):
        members = REWARDS[GROUPS.index == group]
        others = np.delete(REWARDS, sequence)[np.delete(GROUPS.index, sequence) == group]
        centred = REWARDS[sequence] - members.mean()
        assert found["dr_grpo"][sequence] == pytest.approx(centred, **CLOSE)
        assert found["grpo"][sequence] == pytest.approx(
            centred / (members.std(ddof=1) + 1e-6), rel=FUNCTIONAL_RELATIVE, abs=FUNCTIONAL_RELATIVE
        )
        assert found["rloo"][sequence] == pytest.approx(REWARDS[sequence] - others.mean(), **CLOSE)
    assert all((values[5:] == 0).all() for values in found.values())  # equal rewards: exactly 0
    assert not np.allclose(found["rloo"][:5], found["dr_grpo"][:5])


def test_reinforce_plus_plus_whitens_over_the_tokens_of_the_batch():
    lengths = np.array([3, 1, 0, 2, 5, 1, 4])
    found = advantages.reinforce_plus_plus(REWARDS, lengths)
    tokens = np.repeat(found, lengths)
    assert tokens.mean() == pytest.approx(0, abs=FUNCTIONAL_RELATIVE)
    assert tokens.var(ddof=1) == pytest.approx(1, rel=WHITENED_RELATIVE)
    assert found.mean() != pytest.approx(0, abs=NEAR_POLICIES_RELATIVE)  # not over the sequences
    based = advantages.reinforce_plus_plus_baseline(REWARDS, GROUPS, lengths)
    assert based == pytest.approx(advantages.reinforce_plus_plus(advantages.dr_grpo(REWARDS, GROUPS), lengths), **CLOSE)
    assert based[5] == based[6]


def test_what_has_no_advantage_is_refused_and_not_0():
    alone = Segments(np.array([0, 0, 1]), 2)
    for estimator in (advantages.grpo, advantages.dr_grpo, advantages.rloo):
        with pytest.raises(ValueError, match="group of one"):
            estimator(np.ones(3), alone)
        with pytest.raises(ValueError, match="3 sequences have groups, 2"):
            estimator(np.ones(2), alone)
    with pytest.raises(ValueError, match="no variance"):
        advantages.reinforce_plus_plus(np.ones(2), np.array([1, 0]))
    with pytest.raises(ValueError, match="lengths"):
        advantages.reinforce_plus_plus(np.ones(2), np.ones(3))


def test_soft_overlong_falls_over_the_cache():
    lengths = np.array([0, 80, 90, 95, 100, 101, 5000])
    assert rewards.soft_overlong(lengths, 100, 20).tolist() == [0, 0, -0.5, -0.75, -1, -1, -1]
    for cache in (0, 101):
        with pytest.raises(ValueError, match="cache"):
            rewards.soft_overlong(lengths, 100, cache)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.99, 0.0)])
def test_gae_is_the_sum_of_discounted_deltas(gamma, lam):
    generator = np.random.default_rng(3)
    bounds = np.array([0, 4, 4, 5, 11])
    given, values = generator.normal(size=(2, 11))
    found, returns = gae.gae(given, values, bounds, gamma, lam)
    for begin, end in itertools.pairwise(bounds):
        behind = np.append(values[begin:end], 0.0)
        delta = given[begin:end] + gamma * behind[1:] - behind[:-1]
        for t in range(end - begin):
            wanted = sum((gamma * lam) ** k * delta[t + k] for k in range(end - begin - t))
            assert found[begin + t] == pytest.approx(wanted, **CLOSE)
    assert returns == pytest.approx(found + values, **CLOSE)
    if (gamma, lam) == (1.0, 1.0):  # the reward to go
        assert returns[5:11] == pytest.approx(np.cumsum(given[5:11][::-1])[::-1], rel=FUNCTIONAL_RELATIVE)
    with pytest.raises(ValueError, match="for 12 tokens"):
        gae.gae(given, values, np.array([0, 12]))


# -- corrections


CORRECTED = [
    # name, ratio, weight, below, above
    ("token_truncate", 0.01, 0.01, False, False),
    ("token_truncate", 2.0, 2.0, False, False),
    ("token_truncate", 2.1, 2.0, False, True),
    ("token_mask", 0.49, 0.0, True, False),
    ("token_mask", 0.5, 0.5, False, False),
    ("token_mask", 4.9, 4.9, False, False),
    ("token_mask", 5.1, 0.0, False, True),
    ("sequence_truncate", 3.0, 2.0, False, True),
    ("sequence_mask", 2.9, 2.9, False, False),
    ("sequence_mask", 0.001, 0.001, False, False),
    ("sequence_mask", 3.1, 0.0, False, True),
    ("sequence_reject", 1.9, 1.0, False, False),
    ("sequence_reject", 0.4, 0.0, True, False),
    ("geometric_reject", 1.0005, 1.0, False, False),
    ("geometric_reject", 1.002, 0.0, False, True),
]


@pytest.mark.parametrize(("name", "ratio", "weight", "below", "above"), CORRECTED)
def test_corrections_by_hand(name, ratio, weight, below, above):
    correction = next(each for each in corrections.CORRECTIONS if each.name == name)
    found = correction.weights(np.array([math.log(ratio)]))
    assert math.exp(found.logs[0]) == pytest.approx(weight, **CLOSE)
    assert (bool(found.low[0]), bool(found.high[0])) == (below, above)


def test_a_correction_has_other_bounds_when_told_and_no_senseless_ones():
    mask = corrections.CORRECTIONS[1].with_bounds(0.9, 1.1)
    assert mask.weights(np.log([0.8, 1.0, 1.2])).logs.tolist() == [-math.inf, 0.0, -math.inf]
    for bounds in ((0.0, 1.0), (2.0, 1.0), (1.0, 1.0), (None, 0.0), (None, math.inf), (None, math.nan)):
        with pytest.raises(ValueError, match="token_mask: thresholds"):
            mask.with_bounds(*bounds)
