"""A packed, ragged policy batch, and the objectives once more: token by token, in float64, left to autograd.

Nothing here comes from `xdkernels.objectives`: the loops follow the papers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEVELS = ("token", "turn", "sequence")
#: (ratio level, advantage level) by objective: which a trainer may ask for
ADMITTED = {
    "cispo": "token/token token/turn token/sequence turn/turn turn/sequence sequence/sequence",
    "grpo": "token/token token/turn token/sequence turn/turn turn/sequence",
    "dapo": "token/token token/turn token/sequence turn/turn turn/sequence sequence/sequence",
    "dr_grpo": "token/token token/turn token/sequence turn/turn turn/sequence sequence/sequence",
    "gspo": "sequence/sequence",
}
EVERY = [(name, *pair.split("/")) for name, pairs in ADMITTED.items() for pair in pairs.split()]
#: how each objective is run in the tests
SETTINGS = {
    "cispo": {"eps_high": 0.3},
    "grpo": {"eps_high": 0.2},
    "dapo": {"eps_low": 0.2, "eps_high": 0.28},
    "dr_grpo": {"eps_low": 0.2, "eps_high": 0.2, "denominator": 40.0},
    "gspo": {"eps_low": 0.03, "eps_high": 0.04},
}
#: each objective at its own levels
OWN = [(name, *pairs.split()[0].split("/")) for name, pairs in ADMITTED.items()]
#: heads at their edges, as arguments of `Head`
SCENES = {
    "peaked": {"scale": 20.0},
    "far below zero": {"bias": -300.0},
    "ragged vocabulary": {"vocab": 53},
    "softcap and temperature": {"softcap": 3.0, "temperature": 0.7, "bias": 0.0, "scale": 3.0},
}
#: sequences' lengths; the fourth has no active row
LENGTHS = (9, 1, 14, 3, 6)
N = sum(LENGTHS)
H, V = 16, 61


@dataclass
class Batch:
    """N rows. Sequence i has the rows cu_seqlens[i] to cu_seqlens[i + 1]; a turn is up to four rows of a sequence."""

    labels: torch.Tensor
    mask: torch.Tensor
    sequence_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    turn_ids: torch.Tensor
    advantages: dict[str, torch.Tensor]
    old_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor

    @property
    def structure(self) -> dict[str, torch.Tensor]:
        return {"mask": self.mask, "cu_seqlens": self.cu_seqlens, "turn_ids": self.turn_ids}


def make_batch(logprobs_of, vocab: int, *, likely: torch.Tensor | None = None) -> Batch:
    """logprobs_of(labels) -> [N]: the policy's; old and reference ones are near by, so that some ratios are clipped.

    likely [N]: what every second label is. The others are drawn from the whole vocabulary.
    """
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(vocab, (N,), generator=generator)
    if likely is not None:
        labels[::2] = likely[::2]
    sequence_ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    turns, turn_ids = -1, []
    for length in LENGTHS:
        for place in range(length):
            turns += place % 4 == 0
            turn_ids.append(turns)
    mask = torch.rand(N, generator=generator) < 0.8
    mask[sequence_ids == 1] = True
    mask[sequence_ids == 3] = False
    logprobs = logprobs_of(labels).detach().double()

    def near() -> torch.Tensor:
        return (logprobs + 0.3 * torch.randn(N, generator=generator)).float()

    counts = {"token": N, "turn": turns + 1, "sequence": len(LENGTHS)}
    return Batch(
        labels, mask, sequence_ids, torch.tensor([0, *LENGTHS]).cumsum(0), torch.tensor(turn_ids),
        {level: torch.randn(count, generator=generator) for level, count in counts.items()}, near(), near(),
    )  # fmt: skip


def oracle_loss(
    logprobs: torch.Tensor,
    batch: Batch,
    objective: str,
    ratio_level: str,
    advantage_level: str,
    *,
    eps_high: float,
    eps_low: float | None = None,
    denominator: float | None = None,
    beta: float = 0.0,
) -> torch.Tensor:
    """The loss over the active rows, one token after another. logprobs: float64 [N], with their graph."""
    segment = {
        "token": list(range(N)), "turn": batch.turn_ids.tolist(), "sequence": batch.sequence_ids.tolist()
    }  # fmt: skip
    active = [row for row in range(N) if batch.mask[row]]
    old, reference = batch.old_logprobs.double(), batch.reference_logprobs.double()
    high = 1 + eps_high
    low = -float("inf") if objective == "cispo" and eps_low is None else 1 - (eps_high if eps_low is None else eps_low)

    def term(row: int) -> torch.Tensor:
        ids = segment[ratio_level]
        members = [other for other in active if ids[other] == ids[row]]
        ratio = (sum(logprobs[other] - old[other] for other in members) / len(members)).exp()
        advantage = batch.advantages[advantage_level].double()[segment[advantage_level][row]]
        clipped = min(max(float(ratio.detach()), low), high)
        if objective == "cispo":
            gain = clipped * advantage * logprobs[row]
        else:
            free = ratio * advantage
            gain = free if float(free.detach()) <= clipped * float(advantage) else clipped * advantage
        drift = reference[row] - logprobs[row]
        return -gain + beta * (drift.exp() - drift - 1)

    sequences = {segment["sequence"][row] for row in active}
    if objective in ("grpo", "gspo"):
        means = []
        for sequence in sorted(sequences):
            terms = [term(row) for row in active if segment["sequence"][row] == sequence]
            means.append(sum(terms) / len(terms))
        return sum(means) / (len(sequences) if denominator is None else denominator)
    return sum(term(row) for row in active) / (len(active) if denominator is None else denominator)


def oracle_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    vocab: int | None = None,
) -> torch.Tensor:
    """The head in float64 and a log-softmax, at the labels: [N]."""
    logits = hidden.double() @ weight.double().mT
    if bias is not None:
        logits = logits + bias.double()
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logprobs = torch.log_softmax(logits[:, :vocab] / temperature, dim=-1)
    return logprobs.gather(1, labels.unsqueeze(1)).squeeze(1)


class Head:
    """hidden [N, H], weight [V, H] and the other arguments of the head, with a batch whose old logprobs fit."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, scale: float = 1.0, bias: float | None = None, **options: object
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(N, H, generator=generator).to(dtype)
        self.weight = (scale * torch.randn(V, H, generator=generator) / H**0.5).to(dtype)
        self.options = options
        if bias is not None:
            self.options["bias"] = bias + torch.randn(V, generator=generator)
        vocab = options.get("vocab") or V
        best = (self.hidden.float() @ self.weight.float().mT)[:, :vocab].argmax(dim=1)
        self.batch = make_batch(
            lambda labels: oracle_logprobs(self.hidden, self.weight, labels, **self.options), vocab, likely=best
        )

    def leaves(self, *, frozen: bool = False) -> tuple[torch.Tensor | None, ...]:
        """Copies that gather gradients: hidden, weight, bias (or none)."""
        bias = self.options.get("bias")
        return (
            self.hidden.clone().requires_grad_(),
            self.weight.clone().requires_grad_(not frozen),
            None if bias is None else bias.clone().requires_grad_(not frozen),
        )

    def oracle(
        self, leaves: tuple[torch.Tensor | None, ...], name: str, ratio_level: str, advantage_level: str, *, beta: float
    ) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """The loss of the leaves' values, and float64 leaves that gather its gradients."""
        doubles = tuple(None if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves)
        hidden, weight, bias = doubles
        logprobs = oracle_logprobs(hidden, weight, self.batch.labels, **{**self.options, "bias": bias})
        settings = {**SETTINGS[name], "beta": beta}
        return oracle_loss(logprobs, self.batch, name, ratio_level, advantage_level, **settings), doubles
