"""What a policy update looks like from outside: clipping, importance ratios, KL estimates, entropy."""

from __future__ import annotations

import math

import torch

#: quantiles of the ratio that are reported
QUANTILES = {"p01": 0.01, "p50": 0.50, "p99": 0.99, "min": 0.0, "max": 1.0}


def policy_metrics(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    log_ratios: torch.Tensor,
    clipped_low: torch.Tensor,
    clipped_high: torch.Tensor,
    *,
    reference_logprobs: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Over n active tokens, float64 0-d tensors without gradient, left on the device (reading one waits for it).

    logprobs, old_logprobs, reference_logprobs, entropy: [n], nats. log_ratios: [n], log r at the level of the ratio.
    clipped_low, clipped_high: bool [n], tokens whose term a bound of the clip changed.

    active_tokens: n.
    clip_fraction, clip_fraction_low, clip_fraction_high: share of the n tokens; the first is the sum of the others.
    ratio_p01, _p50, _p99, _min, _max: of r, not clipped; quantiles interpolate linearly.
    ess_fraction: (sum r)^2 / (n sum r^2), Kish's effective sample size over n, in (0, 1]. A segment's ratio counts
        once a token.
    kl_old_new_k1, _k2, _k3: with d = lp - old, the means of -d, d^2 / 2 and exp(d) - 1 - d: estimates of
        KL(old || new) a token, as old sampled the tokens (k1, k3 without bias). Always of the tokens' own ratios.
    kl_new_reference_k1, _k2, _k3: the same with d = ref - lp: of KL(new || reference), as far as new would have
        sampled the same tokens; k3 is the mean of the penalty.
    mean_logprob_nats, mean_entropy_nats.

    What is not defined is NaN, never 0: all but active_tokens for n = 0, a KL without its reference, an entropy
    that was not given. A NaN among the values shows in what is made of them.
    """
    logprobs, old_logprobs, log_ratios = (x.detach().to(torch.float64) for x in (logprobs, old_logprobs, log_ratios))
    undefined = logprobs.new_full((), math.nan)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.float64).mean()  # NaN of none

    metrics = {
        "active_tokens": logprobs.new_full((), len(logprobs)),
        "clip_fraction": mean(clipped_low | clipped_high),
        "clip_fraction_low": mean(clipped_low),
        "clip_fraction_high": mean(clipped_high),
        **{f"ratio_{name}": value for name, value in _quantiles(log_ratios).items()},
        "ess_fraction": _ess_fraction(log_ratios),
    }
    differences = {
        "kl_old_new": logprobs - old_logprobs,
        "kl_new_reference": None if reference_logprobs is None else reference_logprobs.detach().double() - logprobs,
    }
    for name, difference in differences.items():
        estimates = (undefined,) * 3 if difference is None else map(mean, _kl_terms(difference))
        metrics.update(zip((f"{name}_k1", f"{name}_k2", f"{name}_k3"), estimates, strict=True))
    metrics["mean_logprob_nats"] = mean(logprobs)
    metrics["mean_entropy_nats"] = undefined if entropy is None else mean(entropy.detach())
    return metrics


def _kl_terms(difference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k1, k2, k3 of each d = log p - log q: of KL(q || p), sampled from q (Schulman, Approximating KL Divergence)."""
    return -difference, difference.square() / 2, torch.expm1(difference) - difference


def _quantiles(log_ratios: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantiles of exp(log_ratios), interpolated between ratios. (torch.quantile refuses more than 2^24 values.)"""
    if not len(log_ratios):
        return dict.fromkeys(QUANTILES, log_ratios.new_full((), math.nan))
    ratios = log_ratios.sort().values.exp()  # NaN goes last
    last = len(ratios) - 1
    found = {}
    for name, probability in QUANTILES.items():
        below = math.floor(probability * last)
        above, fraction = min(below + 1, last), probability * last - below
        value = ratios[below]
        if fraction:  # two infinite ones have no difference
            between = value + (ratios[above] - value) * fraction
            value = torch.where(value == ratios[above], value, between)
        found[name] = torch.where(ratios[-1].isnan(), math.nan, value)
    return found


def _ess_fraction(log_ratios: torch.Tensor) -> torch.Tensor:
    if not len(log_ratios):
        return log_ratios.new_full((), math.nan)
    scaled = (log_ratios - log_ratios.max()).exp()  # the scale cancels: no overflow
    return scaled.sum().square() / (len(scaled) * scaled.square().sum())
