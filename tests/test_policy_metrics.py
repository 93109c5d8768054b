"""Metrics of a policy update: figures by hand, their direction, and NaN where there is nothing to say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tolerances import POLICY_FLOAT64

torch = pytest.importorskip("torch")

from xdkernels.policy_metrics import policy_metrics  # noqa: E402

NAMES = {
    "active_tokens", "clip_fraction", "clip_fraction_low", "clip_fraction_high",
    "ratio_p01", "ratio_p50", "ratio_p99", "ratio_min", "ratio_max", "ess_fraction",
    "kl_old_new_k1", "kl_old_new_k2", "kl_old_new_k3",
    "kl_new_reference_k1", "kl_new_reference_k2", "kl_new_reference_k3",
    "mean_logprob_nats", "mean_entropy_nats",
}  # fmt: skip
OF_REFERENCE = {name for name in NAMES if "reference" in name}


def close(value):
    return pytest.approx(value, abs=POLICY_FLOAT64)


def measure(lp, old, *, ratios=None, low=None, high=None, **more):
    lp, old = torch.as_tensor(lp, dtype=torch.float64), torch.as_tensor(old, dtype=torch.float64)
    none = torch.zeros(len(lp), dtype=torch.bool)
    log_ratios = lp - old if ratios is None else torch.as_tensor(ratios, dtype=torch.float64).log()
    low, high = (none if part is None else torch.tensor(part) for part in (low, high))
    return {name: value.item() for name, value in policy_metrics(lp, old, log_ratios, low, high, **more).items()}


def test_figures_by_hand():
    found = measure(
        [-1.0, -2.0, -3.0, -4.0], [-1.0, -2.5, -3.0, -3.0], ratios=[1.0, 2.0, 3.0, 4.0],
        low=[True, False, False, False], high=[False, True, True, False],
        entropy=torch.tensor([0.5, 0.5, 1.0, 2.0]), reference_logprobs=torch.tensor([-1.0, -2.0, -2.0, -4.0]),
    )  # fmt: skip
    assert found.keys() == NAMES
    assert found["active_tokens"] == 4
    assert [found[f"clip_fraction{side}"] for side in ("_low", "_high", "")] == [0.25, 0.5, 0.75]
    assert found["ess_fraction"] == close(10**2 / (4 * 30))
    assert (found["mean_logprob_nats"], found["mean_entropy_nats"]) == (-2.5, 1.0)
    assert found["kl_old_new_k1"] == close(0.5 / 4)  # d = 0, 0.5, 0, -1
    assert found["kl_old_new_k2"] == close((0.125 + 0.5) / 4)
    assert found["kl_old_new_k3"] == close((math.exp(0.5) - 1.5 + math.exp(-1)) / 4)
    assert found["kl_new_reference_k1"] == close(-1 / 4)  # d = 0, 0, 1, 0
    assert found["kl_new_reference_k2"] == close(0.5 / 4)
    assert found["kl_new_reference_k3"] == close((math.e - 2) / 4)


@pytest.mark.parametrize("count", [1, 2, 99, 101, 1000])
def test_quantiles_of_the_ratio_are_numpys(count):
    lp = torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = measure(lp, torch.zeros(count))
    wanted = np.quantile(lp.exp().numpy(), [0.01, 0.5, 0.99, 0.0, 1.0])
    assert [found[f"ratio_{name}"] for name in ("p01", "p50", "p99", "min", "max")] == close(wanted.tolist())


# every token of a three-token vocabulary, as often as its distribution samples it
OLD = [math.log(x) for x in (1 / 2, 1 / 4, 1 / 4)]
NEW = [math.log(x) for x in (1 / 4, 1 / 4, 1 / 2)]
REFERENCE = [math.log(x) for x in (1 / 8, 1 / 8, 3 / 4)]


def kl(p, q):
    return sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def test_the_kl_of_old_and_new_has_the_direction_of_its_name():
    sampled = [0, 0, 1, 2]  # by old
    found = measure([REFERENCE[i] for i in sampled], [OLD[i] for i in sampled])
    assert found["kl_old_new_k1"] == close(kl(OLD, REFERENCE))
    assert found["kl_old_new_k3"] == close(kl(OLD, REFERENCE))
    assert kl(REFERENCE, OLD) != close(kl(OLD, REFERENCE))


def test_the_kl_of_new_and_reference_has_the_direction_of_its_name():
    sampled = [0, 1, 2, 2]  # by new
    new = [NEW[i] for i in sampled]
    found = measure(new, new, reference_logprobs=torch.tensor([REFERENCE[i] for i in sampled], dtype=torch.float64))
    assert found["kl_new_reference_k1"] == close(kl(NEW, REFERENCE))
    assert found["kl_new_reference_k3"] == close(kl(NEW, REFERENCE))
    assert kl(REFERENCE, NEW) != close(kl(NEW, REFERENCE))


def test_effective_sample_size():
    assert measure([-1.0] * 5, [-1.0] * 5)["ess_fraction"] == 1.0
    assert measure([0.0] * 4, [0.0] * 4, ratios=[1.0, 0.0, 0.0, 0.0])["ess_fraction"] == 0.25
    huge = measure([0.0, 0.0], [-2e3, -2e3])  # exp(2000) is beyond float64, the share is not
    assert huge["ess_fraction"] == 1.0


def test_infinite_ratios_are_no_nan():
    found = measure([0.0] * 4, [-1.0, -800.0, -800.0, -800.0])
    assert [found[f"ratio_{name}"] for name in ("p50", "p99", "max")] == [math.inf] * 3
    assert found["ratio_min"] == close(math.e)


def test_what_is_not_defined_is_nan():
    found = measure([-1.0], [-1.0])
    assert {name for name, value in found.items() if math.isnan(value)} == OF_REFERENCE | {"mean_entropy_nats"}
    found = measure([], [], reference_logprobs=torch.empty(0), entropy=torch.empty(0))
    assert {name for name, value in found.items() if math.isnan(value)} == NAMES - {"active_tokens"}
    assert found["active_tokens"] == 0


def test_a_nan_logprob_shows():
    found = measure([-1.0, math.nan, -1.0, -1.0], [-1.0] * 4)
    for name in ("ratio_min", "ratio_p01", "ratio_p50", "ratio_max", "ess_fraction", "kl_old_new_k3"):
        assert math.isnan(found[name])


def test_metrics_carry_no_gradient():
    lp = torch.zeros(3, requires_grad=True)
    entropy = torch.ones(3, requires_grad=True)
    none = torch.zeros(3, dtype=torch.bool)
    found = policy_metrics(lp, lp, lp, none, none, reference_logprobs=lp, entropy=entropy)
    assert not any(value.requires_grad for value in found.values())
    assert all(value.dtype == torch.float64 and value.ndim == 0 for value in found.values())
