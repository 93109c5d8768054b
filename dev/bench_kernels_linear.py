"""The head of an 8B model over 8192 tokens: ours beside the products alone, torch, cut-cross-entropy and Liger."""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
import warnings
from collections.abc import Callable

import torch
from bench_device import Row, Target, extra_bytes, in_turns, median_ratio
from xdkernels.jit import head as kernels
from xdkernels.linear_logprob import linear_selected_logprob

N, H, V = 8192, 4096, 151936
SHAPE = f"[{N}, {H}] x [{V}, {H}]"
TURNS = 15
#: rows whose float64 logits are made to tell the error
EXACT_ROWS = 512
BATCHES = (1, 7, 8, 64, 1000, 8192)


def measure(say: Callable[[str], None], read: float | None = None) -> tuple[list[Row], list[Target]]:
    """Rows of the table, and what was asked."""
    torch.manual_seed(0)
    hidden = torch.randn(N, H, device="cuda").bfloat16()
    weight = (torch.randn(V, H, device="cuda") * 0.02).bfloat16()
    ids = torch.randint(0, V, (N,), device="cuda")
    upstream = torch.randn(N, device="cuda")
    leaf = hidden.clone().requires_grad_()
    trained = weight.clone().requires_grad_()

    def ours() -> torch.Tensor:
        return linear_selected_logprob(hidden, weight, ids, check=False)

    def ours_with_entropy() -> object:
        return linear_selected_logprob(hidden, weight, ids, entropy=True, check=False)

    def ours_both(head: torch.Tensor = weight) -> object:
        logprobs = linear_selected_logprob(leaf, head, ids, check=False)
        wanted = (leaf,) if head is weight else (leaf, head)
        return torch.autograd.grad(logprobs, wanted, upstream)

    say("head: ours beside the products alone")
    floor = beside_the_products(
        hidden, weight,
        {"ours": ours, "entropy": ours_with_entropy, "both": ours_both, "trained": lambda: ours_both(trained)},
    )  # fmt: skip
    median = {name: statistics.median(times) for name, times in floor.items()}

    say("head: errors, bits, memory")
    exact = _exact(hidden[:EXACT_ROWS], weight, ids[:EXACT_ROWS])
    error = float((ours()[:EXACT_ROWS].double() - exact).abs().max())
    same = _same_bits(hidden, weight, ids)
    same_gradient = _same_gradient_bits(hidden, weight, ids, upstream)
    of_hidden = max(_gradient_errors(hidden, weight, ids, upstream))
    of_trained = max(_gradient_errors(hidden, trained, ids, upstream))
    same_trained = _same_gradient_bits(hidden, trained, ids, upstream)
    memory = {"ours": extra_bytes(ours), "both": extra_bytes(ours_both), "trained": extra_bytes(
        lambda: ours_both(trained))}  # fmt: skip

    one, two = median["product"], median["products"]
    rows = [
        Row("torch.mm(out_dtype=float32)", SHAPE, one, one),
        Row("that and the product back", SHAPE, two, two),
        Row("linear_selected_logprob", "forward", median["ours"], one, error, same, memory["ours"]),
        Row("linear_selected_logprob", "forward, entropy", median["entropy"], one),
        Row("linear_selected_logprob", "forward + backward, frozen", median["both"], two, of_hidden, same_gradient,
            memory["both"]),
        Row("linear_selected_logprob", "forward + backward, trained", median["trained"], 2 * two - one, of_trained,
            same_trained, memory["trained"]),
    ]  # fmt: skip
    peers = _peers(hidden, weight, ids, leaf, exact, say)
    rows += peers
    liger = next((row.time_ms for row in peers if row.kernel.startswith("Liger")), float("nan"))
    targets = [
        Target("head forward / torch.mm(out_dtype=float32)", median_ratio(floor["ours"], floor["product"]), 1.1, "x"),
        Target("head forward + backward, frozen / two products",
               median_ratio(floor["both"], floor["products"]), 1.1, "x"),
        Target("head forward + backward, frozen / Liger", median["both"] / liger, 1.0, "x"),
        Target("head forward + backward, frozen: extra memory", memory["both"] / 2**30, 0.5, "GiB"),
        Target("head logprob against float64", error, 5e-5, "nats"),
        Target("head rows with the same bits, M in 1 7 8 64 1000 8192, permuted", float(same), 1, "", at_least=True),
        Target("head gradient rows likewise", float(same_gradient), 1, "", at_least=True),
    ]  # fmt: skip
    return rows, targets


def beside_the_products(
    hidden: torch.Tensor, weight: torch.Tensor, functions: dict[str, Callable[[], object]]
) -> dict[str, list[float]]:
    """Times of the functions in turns with the head's product, float32 out, and with that and the product back."""
    exponentials = torch.randn(N, V, device="cuda", dtype=torch.bfloat16)
    logits = torch.empty(N, V, device="cuda", dtype=torch.float32)
    sums = torch.empty(N, H, device="cuda", dtype=torch.float32)

    def product() -> None:
        torch.mm(hidden, weight.T, out_dtype=torch.float32, out=logits)

    def products() -> None:
        product()
        torch.mm(exponentials, weight, out_dtype=torch.float32, out=sums)

    return in_turns({"product": product, "products": products, **functions}, TURNS)


def _exact(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    logits = hidden.double() @ weight.double().T
    return torch.log_softmax(logits, dim=1).gather(1, ids[:, None]).squeeze(1)


def _same_bits(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> bool:
    def found(rows: slice | torch.Tensor) -> torch.Tensor:
        return linear_selected_logprob(hidden[rows], weight, ids[rows])

    whole = found(slice(None))
    batches = [slice(0, count) for count in BATCHES] + [slice(5000, 5007), torch.randperm(N, device="cuda")]
    tiling = dataclasses.replace(kernels.TILING, block_n=128)
    into = kernels.Swept.empty(hidden[:64], entropy=False, direction=False)
    kernels.sweep(hidden[:64], kernels.Head(weight, None, 1.0, None, V, tiling), ids[:64], into, product_rows=64)
    shows = not torch.equal(into.logprobs, whole[:64])  # negative control: another tile, another order of sums
    return shows and all(torch.equal(found(rows), whole[rows]) for rows in batches)


def _gradient_errors(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, upstream: torch.Tensor
) -> list[float]:
    """The largest difference from float64 of the first rows' gradient, and of their part in a trained head's."""
    rows = slice(64)
    leaf = hidden[rows].clone().requires_grad_()
    leaves = (leaf, weight) if weight.requires_grad else (leaf,)
    logprobs = linear_selected_logprob(leaf, weight, ids[rows])
    by_hidden, *by_weight = torch.autograd.grad(logprobs, leaves, upstream[rows])
    head, tokens = weight.detach(), hidden[rows].double()
    slope = torch.empty(64, V, dtype=torch.float64, device="cuda")
    blocks = torch.arange(V, device="cuda").split(16384)
    for columns in blocks:
        slope[:, columns] = tokens @ head[columns].double().mT
    slope = torch.softmax(slope, dim=1).neg_()
    slope[torch.arange(64, device="cuda"), ids[rows]] += 1
    slope *= upstream[rows].double()[:, None]
    want = sum(slope[:, columns] @ head[columns].double() for columns in blocks)
    errors = [float((by_hidden.double() - want).abs().max())]
    for found in by_weight:
        parts = ((found[columns].double() - slope[:, columns].mT @ tokens).abs().max() for columns in blocks)
        errors.append(float(max(parts)))
    return errors


def _same_gradient_bits(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, upstream: torch.Tensor
) -> bool:
    """Of hidden's rows; a trained head's own gradient is a sum over them."""

    def found(rows: slice | torch.Tensor) -> torch.Tensor:
        leaf = hidden[rows].clone().requires_grad_()
        logprobs = linear_selected_logprob(leaf, weight, ids[rows])
        wanted = (leaf, weight) if weight.requires_grad else (leaf,)
        return torch.autograd.grad(logprobs, wanted, upstream[rows])[0]

    whole = found(slice(None))
    batches = [slice(0, count) for count in BATCHES] + [slice(5000, 5007), torch.randperm(N, device="cuda")]
    other = whole.clone()  # negative control: one element, by its last bit
    other.view(torch.int16)[0, 0] ^= 1
    return not torch.equal(other, whole) and all(torch.equal(found(rows), whole[rows]) for rows in batches)


def _peers(hidden, weight, ids, leaf, exact, say) -> list[Row]:
    """Other ways to the same numbers, where they are installed."""

    def chunked() -> torch.Tensor:
        found = []
        for h, i in zip(hidden.split(2048), ids.split(2048), strict=True):
            logits = torch.mm(h, weight.T, out_dtype=torch.float32)
            found.append(logits.gather(1, i[:, None]).squeeze(1) - logits.logsumexp(1))
        return torch.cat(found)

    def rounded(h, w, i):
        logits = (h @ w.T).float()
        return logits.gather(1, i[:, None]).squeeze(1) - logits.logsumexp(1)

    compiled = torch.compile(rounded)
    forwards: dict[str, Callable[[], torch.Tensor]] = {
        "torch, float32 logits in chunks of 2048": chunked,
        "torch.compile, bfloat16 logits": lambda: torch.cat(
            [compiled(h, weight, i) for h, i in zip(hidden.split(2048), ids.split(2048), strict=True)]
        ),
    }
    both: dict[str, Callable[[], object]] = {}
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        forwards["cut-cross-entropy"] = lambda: -linear_cross_entropy(hidden, weight, ids, reduction="none")
        both["cut-cross-entropy"] = lambda: torch.autograd.grad(
            linear_cross_entropy(leaf, weight, ids, reduction="mean"), leaf
        )
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        both["Liger fused linear cross entropy"] = lambda: torch.autograd.grad(liger(weight, leaf, ids), leaf)
    rows = []
    for group, what in ((forwards, "forward"), (both, "forward + backward, frozen")):
        for name, function in group.items():
            say(f"head: {name}, {what}")
            try:
                error = None
                if group is forwards:
                    error = float((function()[:EXACT_ROWS].double() - exact).abs().max())
                time_ms = statistics.median(in_turns({name: function}, 3)[name])
                rows.append(Row(name, what, time_ms, None, error, None, extra_bytes(function)))
            except Exception as failure:  # a peer that does not run here is a line, not the end of the bench
                warnings.warn(f"{name}: {type(failure).__name__}: {failure}", stacklevel=1)
    return rows
