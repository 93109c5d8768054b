"""libxd.functional.objectives against the kernels' objectives, finite differences, and the edges of the clip."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tolerances import FINITE_DIFFERENCE, NEAR_POLICIES_RELATIVE, POLICY_FLOAT64

from libxd.functional import kl, objectives, ratios
from libxd.functional.segments import Segments

torch = pytest.importorskip("torch")

from policy_fixtures import SETTINGS, N, make_batch  # noqa: E402
from xdkernels import objectives as kernel_objectives  # noqa: E402
from xdkernels.policy_metrics import policy_metrics  # noqa: E402
from xdkernels.segments import Segments as KernelSegments  # noqa: E402

BY_NAME = {each.name: each for each in objectives.OBJECTIVES}
#: the kernels' name and epsilons; ppo is their dapo with one epsilon, and gspo's are so small that something is clipped
TWIN = {
    **{name: (name, SETTINGS[name]) for name in SETTINGS},
    "ppo": ("dapo", {"eps_low": 0.2, "eps_high": 0.2}),
    "gspo": ("gspo", {"eps_low": 3e-4, "eps_high": 4e-4}),
}


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(1)
    logprobs = -3 * torch.rand(N, generator=generator, dtype=torch.float64) - 0.1
    made = make_batch(lambda labels: logprobs, vocab=50)
    rows = made.mask.nonzero().squeeze(1)
    return made, logprobs[rows], rows


def told(name: str) -> objectives.Objective:
    """Ours, with the twin's epsilons."""
    epsilons = TWIN[name][1]
    low = epsilons.get("eps_low", None if name == "cispo" else epsilons["eps_high"])
    return BY_NAME[name].with_epsilons(low, epsilons["eps_high"])


def ours(name: str, batch, logprobs: np.ndarray | None = None, weight_ratios: np.ndarray | None = None):
    """loss, coefficients, clipped low and high. weight_ratios: what a constant weight stays at."""
    made, own, rows = batch
    objective, lp = told(name), own.numpy() if logprobs is None else logprobs
    old, of = made.old_logprobs[rows].numpy(), Segments(made.sequence_ids[rows].numpy(), 5)
    d = ratios.log_ratios(lp, old)
    if objective.ratio == "sequence":
        d = of.at_tokens(ratios.geometric_mean(d, of))
    advantages = made.advantages["sequence"][made.sequence_ids[rows]].numpy()
    found = objectives.terms(objective, lp, d if weight_ratios is None else weight_ratios, advantages)
    weights = objectives.weights(objective, of, 40.0 if name == "dr_grpo" else None)
    return (found.values * weights).sum(), found.slopes * weights, found.clipped_low, found.clipped_high, d


@pytest.mark.parametrize("name", list(BY_NAME))
def test_loss_and_coefficients_are_those_of_the_kernels(batch, name):
    made, logprobs, rows = batch
    twin, epsilons = TWIN[name]
    objective = kernel_objectives.find(twin)
    sequences = KernelSegments(made.sequence_ids[rows], N)
    wanted = kernel_objectives.evaluate(
        objective, logprobs, made.old_logprobs[rows], made.advantages["sequence"][made.sequence_ids[rows]],
        kernel_objectives.clip_bounds(objective, epsilons.get("eps_low"), epsilons["eps_high"]),
        ratio_segments=sequences if name == "gspo" else None, sequences=sequences,
        denominator=epsilons.get("denominator"),
    )  # fmt: skip
    loss, coefficients, low, high, d = ours(name, batch)
    assert loss == pytest.approx(wanted.loss.item(), abs=POLICY_FLOAT64)
    np.testing.assert_allclose(coefficients, wanted.coefficients.numpy(), rtol=0, atol=POLICY_FLOAT64)
    np.testing.assert_allclose(d, wanted.log_ratios.numpy(), rtol=0, atol=POLICY_FLOAT64)
    assert low.tolist() == wanted.clipped_low.tolist() and high.tolist() == wanted.clipped_high.tolist()
    assert low.any() or high.any(), "nothing was clipped, so nothing of it was compared"
    other = ours("ppo" if name != "ppo" else "grpo", batch)[1]
    if name not in ("ppo", "dapo"):
        assert not np.allclose(coefficients, other, rtol=0, atol=1e-3 * np.abs(other).max())  # the control


@pytest.mark.parametrize("name", list(BY_NAME))
def test_coefficients_are_the_finite_differences_of_the_loss(batch, name):
    own = batch[1].numpy()
    _, coefficients, _, _, d = ours(name, batch)
    weight = d if name == "cispo" else None  # a stop-gradient keeps its value
    step = 1e-6
    for row in range(len(own)):
        apart = np.zeros(len(own))
        apart[row] = step
        above, below = (ours(name, batch, own + sign * apart, weight)[0] for sign in (1, -1))
        assert (above - below) / (2 * step) == pytest.approx(coefficients[row], abs=FINITE_DIFFERENCE)
    assert np.abs(coefficients).max() > 1e-3


def test_the_penaltys_slope_is_its_finite_difference():
    lp, reference, step = np.array([-1.0, -2.0, -0.5]), np.array([-1.5, -1.9, -0.5]), 1e-6
    values, slopes = objectives.k3_penalty(lp, reference)
    above, below = (objectives.k3_penalty(lp + sign * step, reference)[0] for sign in (1, -1))
    np.testing.assert_allclose((above - below) / (2 * step), slopes, rtol=0, atol=FINITE_DIFFERENCE)
    wanted = kernel_objectives.k3_new_reference(torch.tensor(lp), torch.tensor(reference))
    np.testing.assert_allclose(values, wanted[0].numpy(), rtol=0, atol=POLICY_FLOAT64)
    np.testing.assert_allclose(slopes, wanted[1].numpy(), rtol=0, atol=POLICY_FLOAT64)
    assert values[2] == slopes[2] == 0 and (values[:2] > 0).all()


@pytest.mark.parametrize("made", ["clipped_surrogate", "clipped_weight"])
def test_the_edges_of_the_clip_are_the_kernels(made):
    at = [0.5, 0.75, math.nextafter(0.75, 0), 1.0, 1.5, math.nextafter(1.5, 2), 2.0, math.inf]
    r, a = (each.ravel() for each in np.meshgrid(at, [-2.0, 0.0, 2.0]))
    lp = np.full_like(r, -0.5)
    given, bounds = ((lp, r, a) if made == "clipped_weight" else (r, a)), (0.75, 1.5)
    wanted = getattr(kernel_objectives, made)(*map(torch.tensor, given), *bounds)
    for ours_, theirs in zip(getattr(objectives, made)(*given, *bounds), wanted, strict=True):
        np.testing.assert_array_equal(ours_, theirs.numpy())
    moved = getattr(objectives, made)(*given, 0.7, 1.5)
    assert not np.array_equal(moved.clipped_low, wanted.clipped_low.numpy())  # the control


def test_a_first_step_on_policy_has_its_full_gradient_even_at_epsilon_0():
    for objective in objectives.OBJECTIVES:
        tight = objective.with_epsilons(0.0, 0.0)
        found = objectives.terms(tight, np.full(2, -1.0), np.zeros(2), np.array([1.0, -3.0]))
        assert found.slopes.tolist() == [-1.0, 3.0]
        assert not (found.clipped_low | found.clipped_high).any()


def test_what_an_objective_cannot_be_told():
    for low, high in ((None, 0.2), (-0.1, 0.2), (0.2, math.inf), (0.2, math.nan)):
        with pytest.raises(ValueError, match="ppo: an epsilon"):
            BY_NAME["ppo"].with_epsilons(low, high)
    assert BY_NAME["cispo"].with_epsilons(None, 3.0).bounds == (-math.inf, 4.0)
    with pytest.raises(ValueError, match="dr_grpo needs a denominator"):
        objectives.weights(BY_NAME["dr_grpo"], Segments(np.zeros(1, np.int64), 1))


def test_kl_and_effective_sample_size_are_those_of_the_kernels_metrics(batch):
    made, logprobs, rows = batch
    old = made.old_logprobs[rows]
    none = torch.zeros(len(rows), dtype=torch.bool)
    wanted = policy_metrics(logprobs, old, logprobs - old, none, none)
    d = ratios.log_ratios(logprobs.numpy(), old.numpy())
    found = {name: term(d).mean() for name, term in kl.ESTIMATORS["rollout_training"].items()}
    assert found == pytest.approx({name: wanted[f"kl_old_new_{name}"].item() for name in found}, abs=POLICY_FLOAT64)
    assert ratios.ess_fraction(d) == pytest.approx(wanted["ess_fraction"].item(), abs=POLICY_FLOAT64)
    assert ratios.ess_fraction(2 * d) != pytest.approx(wanted["ess_fraction"].item(), rel=NEAR_POLICIES_RELATIVE)
    assert kl.k3_training_rollout(d).mean() != pytest.approx(found["k3"], rel=NEAR_POLICIES_RELATIVE)
