"""Losses and coefficients of the policy objectives against autograd in float64, and at the edges of the clip."""

from __future__ import annotations

import math

import pytest
from tolerances import POLICY_FLOAT64, POLICY_K3_RELATIVE, SEQUENCE_SUM_RELATIVE

torch = pytest.importorskip("torch")

from policy_fixtures import ADMITTED, EVERY, LENGTHS, LEVELS, SETTINGS, N, make_batch, oracle_loss  # noqa: E402
from xdkernels import objectives  # noqa: E402
from xdkernels.segments import Segments  # noqa: E402


@pytest.fixture(scope="module")
def logprobs():
    return -3 * torch.rand(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.1


@pytest.fixture(scope="module")
def batch(logprobs):
    return make_batch(lambda labels: logprobs, vocab=50)


def evaluate(logprobs, batch, name, ratio_level, advantage_level, *, beta=0.0, denominator=None, **epsilons):
    """`objectives.evaluate` over the active rows."""
    objective = objectives.find(name)
    rows = batch.mask.nonzero().squeeze(1)
    of = {"token": torch.arange(N), "turn": batch.turn_ids, "sequence": batch.sequence_ids}
    segments = {level: Segments(ids[rows], N) for level, ids in of.items()}
    advantages = batch.advantages[advantage_level][of[advantage_level]]
    found = objectives.evaluate(
        objective, logprobs[rows], batch.old_logprobs[rows], advantages[rows],
        objectives.clip_bounds(objective, epsilons.get("eps_low"), epsilons["eps_high"]),
        ratio_segments=None if ratio_level == "token" else segments[ratio_level], sequences=segments["sequence"],
        denominator=denominator, beta=beta, reference_logprobs=batch.reference_logprobs[rows],
    )  # fmt: skip
    return rows, found


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("denominator", [None, 37.0])
@pytest.mark.parametrize(("name", "ratio_level", "advantage_level"), EVERY)
def test_loss_and_coefficients_are_autograds(logprobs, batch, name, ratio_level, advantage_level, denominator, beta):
    settings = {**SETTINGS[name], "beta": beta}
    if denominator:
        settings["denominator"] = denominator
    leaf = logprobs.clone().requires_grad_()
    wanted = oracle_loss(leaf, batch, name, ratio_level, advantage_level, **settings)
    wanted.backward()
    rows, found = evaluate(logprobs, batch, name, ratio_level, advantage_level, **settings)
    assert float(found.loss) == pytest.approx(wanted.item(), abs=POLICY_FLOAT64)
    assert float((found.coefficients - leaf.grad[rows]).abs().max()) < POLICY_FLOAT64
    assert float(leaf.grad[~batch.mask].abs().max()) == 0
    assert float(found.terms.sum()) == pytest.approx(wanted.item(), abs=POLICY_FLOAT64)
    # the other sign, the one for ascent, would be seen
    assert float((found.coefficients + leaf.grad[rows]).abs().max()) > 1e3 * POLICY_FLOAT64


@pytest.mark.parametrize("name", ["cispo", "dapo"])
def test_the_comparison_above_meets_every_region_of_the_clip(logprobs, batch, name):
    _, found = evaluate(logprobs, batch, name, "token", "token", **{"eps_low": 0.2, "eps_high": 0.28})
    rows = batch.mask.nonzero().squeeze(1)
    ratios, advantages = found.log_ratios.exp(), batch.advantages["token"][rows]
    for region in (ratios < 0.8, (ratios > 0.8) & (ratios < 1.28), ratios > 1.28):
        assert bool((region & (advantages > 0)).any())
        assert bool((region & (advantages < 0)).any())


# eps_low 0.25 and eps_high 0.5: exact in binary, so are the bounds 0.75 and 1.5
SURROGATE = [
    # ratio, advantage, loss, derivative in the logprob, clipped low, clipped high
    (0.5, 2.0, -1.0, -1.0, False, False),
    (0.5, -2.0, 1.5, 0.0, True, False),
    (1.0, 2.0, -2.0, -2.0, False, False),
    (1.0, -2.0, 2.0, 2.0, False, False),
    (2.0, 2.0, -3.0, 0.0, False, True),
    (2.0, -2.0, 4.0, 4.0, False, False),
    # at a bound the derivative from inside
    (1.5, 2.0, -3.0, -3.0, False, False),
    (1.5, -2.0, 3.0, 3.0, False, False),
    (0.75, -2.0, 1.5, 1.5, False, False),
    (0.75, 2.0, -1.5, -1.5, False, False),
    # one step beyond it
    (math.nextafter(1.5, 2), 2.0, -3.0, 0.0, False, True),
    (math.nextafter(0.75, 0), -2.0, 1.5, 0.0, True, False),
    (2.0, 0.0, 0.0, 0.0, False, False),
    (math.inf, 0.0, 0.0, 0.0, False, False),
    (math.inf, 2.0, -3.0, 0.0, False, True),
    (math.inf, -2.0, math.inf, math.inf, False, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "slope", "low", "high"), SURROGATE)
def test_clipped_surrogate_by_hand(ratio, advantage, loss, slope, low, high):
    found = objectives.clipped_surrogate(*torch.tensor([[ratio], [advantage]], dtype=torch.float64), 0.75, 1.5)
    assert [part.item() for part in found] == [loss, slope, low, high]


WEIGHT = [
    # ratio, advantage, lower bound, weight, clipped low, clipped high
    (0.5, 2.0, 0.75, 0.75, True, False),
    (0.5, -2.0, 0.75, 0.75, True, False),
    (0.5, 2.0, -math.inf, 0.5, False, False),
    (1.0, -2.0, 0.75, 1.0, False, False),
    (1.5, 2.0, 0.75, 1.5, False, False),
    (0.75, 2.0, 0.75, 0.75, False, False),
    (2.0, 2.0, 0.75, 1.5, False, True),
    (2.0, -2.0, -math.inf, 1.5, False, True),
    (2.0, 0.0, 0.75, 1.5, False, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "lower", "weight", "low", "high"), WEIGHT)
def test_clipped_weight_by_hand(ratio, advantage, lower, weight, low, high):
    lp, ratios, advantages = torch.tensor([[-0.5], [ratio], [advantage]], dtype=torch.float64)
    found = objectives.clipped_weight(lp, ratios, advantages, lower, 1.5)
    assert [part.item() for part in found] == [0.5 * weight * advantage, -weight * advantage, low, high]


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "gspo"])
def test_a_first_step_on_policy_has_its_full_gradient_even_at_epsilon_0(batch, logprobs, name):
    on_policy = batch.old_logprobs.double()
    settings = {**SETTINGS[name], "eps_high": 0.0, "eps_low": 0.0}
    pair = ADMITTED[name].split()[0].split("/")
    _, found = evaluate(on_policy, batch, name, *pair, **settings)
    assert bool((found.coefficients != 0).all())
    assert not bool((found.clipped_low | found.clipped_high).any())


def test_a_nan_is_not_hidden_by_an_advantage_of_0():
    found = objectives.clipped_surrogate(torch.tensor([math.nan]), torch.tensor([0.0]), 0.8, 1.2)
    assert found.values.isnan()


def test_a_logprob_of_minus_infinity_with_an_advantage_of_0_adds_nothing():
    terms = objectives.clipped_weight(*(torch.tensor([x]).double() for x in (-math.inf, 0.0, 0.0)), 0.0, 1.3)
    assert (terms.values.item(), terms.slopes.item()) == (0, 0)


def test_k3_of_tiny_differences_does_not_cancel():
    """exp(x) - 1 - x = x^2 / 2 (1 + x / 3 + ...)."""
    tiny = 1e-7
    value, slope = objectives.k3_new_reference(*torch.tensor([[0.0], [tiny]], dtype=torch.float64))
    assert value.item() == pytest.approx(tiny**2 / 2, rel=POLICY_K3_RELATIVE, abs=0)
    assert slope.item() == pytest.approx(-math.expm1(tiny), rel=POLICY_K3_RELATIVE, abs=0)
    as_written = math.exp(tiny) - tiny - 1
    assert as_written != pytest.approx(tiny**2 / 2, rel=POLICY_K3_RELATIVE, abs=0)


def test_a_mean_of_sequences_weighs_a_short_one_as_much_as_a_long_one():
    sequences = Segments(torch.tensor([0, 1, 1, 1]), 4)
    zeros = torch.zeros(4)
    arguments = (zeros, zeros, torch.ones(4), (0.8, 1.2))
    found = objectives.evaluate(objectives.find("grpo"), *arguments, sequences=sequences)
    assert found.coefficients.tolist() == pytest.approx([-1 / 2, -1 / 6, -1 / 6, -1 / 6], abs=POLICY_FLOAT64)
    found = objectives.evaluate(objectives.find("dapo"), *arguments)
    assert found.coefficients.tolist() == [-1 / 4] * 4


@pytest.mark.parametrize("name", list(ADMITTED))
def test_pairs_that_are_not_in_the_table_are_refused(name):
    objective = objectives.find(name)
    for ratio in LEVELS:
        for advantage in LEVELS:
            if f"{ratio}/{advantage}" in ADMITTED[name].split():
                assert objectives.levels(objective, ratio, advantage) == (ratio, advantage)
                continue
            with pytest.raises(ValueError, match=f"{name} does not admit .* {ratio}/{advantage}"):
                objectives.levels(objective, ratio, advantage)
    with pytest.raises(ValueError, match="does not admit"):
        objectives.levels(objective, "word", None)


def test_an_objective_has_levels_of_its_own():
    own = {name: objectives.levels(objectives.find(name), None, None) for name in ADMITTED}
    assert own.pop("gspo") == ("sequence", "sequence")
    assert set(own.values()) == {("token", "token")}


def test_no_table_lets_a_ratio_be_coarser_than_its_advantage():
    for objective in objectives.OBJECTIVES.values():
        assert all(LEVELS.index(ratio) <= LEVELS.index(advantage) for ratio, advantage in objective.pairs)


def test_with_a_coarser_ratio_the_credit_of_single_tokens_would_be_lost():
    """Why such pairs are refused: the derivative is the mean advantage for each token."""
    lp = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([3.0, 0.0, 0.0])
    (-(lp.mean().exp() * advantages).mean()).backward()
    assert lp.grad.tolist() == pytest.approx([-1 / 3] * 3, abs=POLICY_FLOAT64)


def test_an_unknown_objective_is_answered_with_those_there_are():
    with pytest.raises(ValueError, match=r"one of cispo, grpo, dapo, dr_grpo, gspo: 'ppo'"):
        objectives.find("ppo")


@pytest.mark.parametrize(
    ("name", "low", "high", "what"),
    [
        ("cispo", None, None, "needs eps_high"),
        ("cispo", 0.2, None, "needs eps_high"),
        ("grpo", 0.2, 0.3, "symmetrically"),
        ("dapo", None, 0.28, "needs eps_low"),
        ("dr_grpo", None, 0.2, "needs eps_low"),
        ("gspo", None, 4e-4, "needs eps_low"),
        ("dapo", -0.1, 0.2, "eps_low must be"),
        ("dapo", 0.1, -0.2, "eps_high must be"),
        ("dapo", 0.1, math.nan, "eps_high must be"),
        ("dapo", 0.1, math.inf, "eps_high must be"),
        ("dapo", True, 0.2, "eps_low must be"),
        ("dapo", "0.1", 0.2, "eps_low must be"),
    ],
)
def test_epsilons_that_are_missing_or_wrong_are_refused(name, low, high, what):
    with pytest.raises(ValueError, match=what):
        objectives.clip_bounds(objectives.find(name), low, high)


def test_bounds():
    assert objectives.clip_bounds(objectives.find("cispo"), None, 4.0) == (-math.inf, 5.0)
    assert objectives.clip_bounds(objectives.find("cispo"), 0.25, 4.0) == (0.75, 5.0)
    assert objectives.clip_bounds(objectives.find("grpo"), None, 0.25) == (0.75, 1.25)
    assert objectives.clip_bounds(objectives.find("gspo"), 0.25, 0.5) == (0.75, 1.5)


# -- sums over segments


@pytest.fixture(scope="module")
def long():
    """Values of segments of 1 to 130 rows, packed."""
    lengths = torch.tensor([1, 2, 3, 7, 64, 65, 130, 31])
    index = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return index, torch.randn(len(index), generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def test_means_of_segments(long):
    index, values = long
    means = Segments(index, 9).mean(values)
    for segment in range(8):
        own = values[index == segment].tolist()
        assert means[index == segment].tolist() == pytest.approx(
            [math.fsum(own) / len(own)] * len(own), rel=SEQUENCE_SUM_RELATIVE
        )
    assert int(Segments(index, 9).present) == 8


def test_a_segments_mean_does_not_depend_on_its_neighbours(long):
    index, values = long
    together = Segments(index, 8).mean(values)
    shuffled = torch.randperm(8, generator=torch.Generator().manual_seed(2))[index]
    order = torch.argsort(shuffled, stable=True)
    assert torch.equal(Segments(shuffled[order], 8).mean(values[order]), together[order])
    differs = False
    for segment in range(8):
        own = index == segment
        alone = Segments(torch.zeros(int(own.sum()), dtype=torch.int64), 1).mean(values[own])
        assert torch.equal(alone, together[own])
        ends = values.cumsum(0)[own.nonzero().max()] - values.cumsum(0)[own.nonzero().min()] + values[own][0]
        differs |= bool(ends / own.sum() != alone[0])
    assert differs  # differences of a running sum do depend on what comes before


def test_rows_of_a_segment_need_not_be_adjacent(long):
    index, values = long
    order = torch.randperm(len(index), generator=torch.Generator().manual_seed(4))
    apart, packed = Segments(index[order], 8).mean(values[order]), Segments(index, 8).mean(values)
    assert apart.tolist() == pytest.approx(packed[order].tolist(), rel=SEQUENCE_SUM_RELATIVE)


def test_no_rows_have_no_mean():
    none = Segments(torch.empty(0, dtype=torch.int64), 3)
    assert none.mean(torch.empty(0)).shape == (0,)
    assert int(none.present) == 0


def test_within():
    turns, sequences = Segments(torch.tensor([0, 0, 1, 2]), 5), Segments(torch.tensor([0, 0, 0, 1]), 5)
    assert bool(turns.within(sequences))
    assert not bool(sequences.within(turns))


def test_the_fixture_has_a_sequence_without_active_rows(batch):
    assert not bool(batch.mask[batch.sequence_ids == 3].any())
    assert LENGTHS[3] > 0
