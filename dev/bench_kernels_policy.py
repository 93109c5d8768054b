"""Every objective of the fused policy loss over the head of an 8B model, beside the two products it needs."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from bench_device import Row, Target, extra_bytes, median_ratio
from bench_kernels_linear import H, N, V, beside_the_products
from xdkernels.policy_loss import fused_policy_loss

TOKENS = 512  # of a sequence
SEQUENCES = N // TOKENS
#: rows, in sequences of EXACT_TOKENS, whose gradient float64 autograd gives
EXACT_ROWS, EXACT_TOKENS = 512, 64
SETTINGS: dict[str, dict[str, float]] = {
    "cispo": {"eps_high": 4.0},
    "grpo": {"eps_high": 0.2},
    "dapo": {"eps_low": 0.2, "eps_high": 0.28},
    "dr_grpo": {"eps_low": 0.2, "eps_high": 0.2, "denominator": float(SEQUENCES * TOKENS)},
    "gspo": {"eps_low": 0.03, "eps_high": 0.04},
}
#: a denominator that is the same for a batch and its parts, so that their gradients can be told equal
DENOMINATOR = 1000.0
#: as a share of the largest gradient: direction and gradient are each rounded to 8 bits (2^-9), the probabilities too
GRADIENT_BOUND = 2**-7


def measure(say: Callable[[str], None], read: float | None = None) -> tuple[list[Row], list[Target]]:
    """Rows of the table, and what was asked. Errors are of the gradient, as a share of its largest element."""
    torch.manual_seed(1)
    hidden = torch.randn(N, H, device="cuda").bfloat16()
    weight = (torch.randn(V, H, device="cuda") * 0.02).bfloat16()
    batch = Batch(hidden, weight)
    say("policy loss: the objectives beside the products")
    times = beside_the_products(
        hidden, weight, {name: lambda name=name: batch.gradient(weight, name, check=False) for name in SETTINGS}
    )
    products = statistics.median(times["products"])
    rows, targets = [], []
    for name in SETTINGS:
        say(f"policy loss: error, bits, memory of {name}")
        error, same = batch.error(weight, name), batch.same_bits(weight, name)
        memory = extra_bytes(lambda name=name: batch.gradient(weight, name))
        rows.append(
            Row(f"fused_policy_loss {name}", "forward + backward, frozen", statistics.median(times[name]), products,
                error, same, memory)
        )  # fmt: skip
        targets += [
            Target(f"{name} forward + backward / two products", median_ratio(times[name], times["products"]), 1.1, "x"),
            Target(f"{name} gradient against float64 autograd", error, GRADIENT_BOUND, "of its largest"),
            Target(f"{name} sequences with the same gradient bits, alone or among others", float(same), 1, "",
                   at_least=True),
        ]  # fmt: skip
    return rows, targets


class Batch:
    """N rows in SEQUENCES equal sequences, one active row in ten left out; the old logprobs lie near the policy's."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        from xdkernels.linear_logprob import linear_selected_logprob

        self.hidden = hidden
        self.ids = torch.randint(0, V, (N,), device="cuda")
        self.old = linear_selected_logprob(hidden, weight, self.ids) + 0.1 * torch.randn(N, device="cuda")
        self.mask = torch.rand(N, device="cuda") < 0.9
        self.advantages = {"token": torch.randn(N, device="cuda"), "sequence": torch.randn(SEQUENCES, device="cuda")}

    def gradient(
        self, weight: torch.Tensor, name: str, rows: slice = slice(N), length: int = TOKENS,
        denominator: float | None = None, check: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """d loss / d hidden [rows, H], of sequences of `length` rows."""
        leaf = self.hidden[rows].detach().requires_grad_()
        count = len(leaf) // length
        first = rows.start // length if rows.start else 0
        level = "sequence" if name == "gspo" else "token"
        within = slice(first, first + count) if level == "sequence" else rows
        settings = dict(SETTINGS[name])
        if denominator is not None:
            settings["denominator"] = denominator
        loss, _ = fused_policy_loss(
            leaf, weight, self.ids[rows], self.advantages[level][within], self.old[rows], objective=name,
            mask=self.mask[rows], cu_seqlens=torch.arange(0, len(leaf) + 1, length, device="cuda"), check=check,
            **settings,
        )  # fmt: skip
        return torch.autograd.grad(loss, leaf)[0]

    def error(self, weight: torch.Tensor, name: str) -> float:
        """Of EXACT_ROWS rows: the gradient's largest difference from float64 autograd, over its largest element."""
        rows = slice(EXACT_ROWS)
        found = self.gradient(weight, name, rows, EXACT_TOKENS)
        leaf = self.hidden[rows].double().requires_grad_()
        logits = leaf @ weight.double().mT
        logprobs = torch.log_softmax(logits, dim=1).gather(1, self.ids[rows, None]).squeeze(1)
        shape = (-1, EXACT_TOKENS)
        level = "sequence" if name == "gspo" else "token"
        advantages = self.advantages[level][: EXACT_ROWS if level == "token" else EXACT_ROWS // EXACT_TOKENS]
        loss = _loss(
            name, logprobs.view(shape), self.old[rows].double().view(shape), self.mask[rows].view(shape),
            advantages.double().view(-1, EXACT_TOKENS if level == "token" else 1),
        )  # fmt: skip
        (want,) = torch.autograd.grad(loss, leaf)
        return float((found.double() - want).abs().max() / want.abs().max())

    def same_bits(self, weight: torch.Tensor, name: str) -> bool:
        """Whether each of some sequences has the gradient alone that it has among the others, bit for bit."""
        whole = self.gradient(weight, name, denominator=DENOMINATOR)
        places = [slice(first * TOKENS, (first + count) * TOKENS) for first, count in ((0, 1), (3, 1), (9, 4))]
        other = self.gradient(weight, name, places[0], denominator=2 * DENOMINATOR)  # negative control
        return not torch.equal(other, whole[places[0]]) and all(
            torch.equal(self.gradient(weight, name, rows, denominator=DENOMINATOR), whole[rows]) for rows in places
        )


def _loss(
    name: str, logprobs: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """The objective of float64 [sequences, tokens] as its paper writes it, for autograd."""
    settings = SETTINGS[name]
    counts = mask.sum(dim=1, keepdim=True)
    ratio = (logprobs - old).exp()
    if name == "gspo":
        ratio = (((logprobs - old) * mask).sum(dim=1, keepdim=True) / counts).exp().expand_as(logprobs)
    low = 1 - settings.get("eps_low", float("inf") if name == "cispo" else settings["eps_high"])
    clipped = ratio.clamp(low, 1 + settings["eps_high"])
    if name == "cispo":
        gains = clipped.detach() * advantages * logprobs
    else:
        gains = torch.minimum(ratio * advantages, clipped * advantages)
    gains = gains * mask
    if name in ("grpo", "gspo"):
        return -(gains.sum(dim=1, keepdim=True) / counts).mean()
    return -gains.sum() / settings.get("denominator", mask.sum())
