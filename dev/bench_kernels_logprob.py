"""Selected logprob of logits that are there: share of the bandwidth, error, bits, and more than 2^31 elements."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from bench_device import Row, Target, in_turns, median_ratio, read_bytes_per_s
from xdkernels.logprob import selected_logprob, selected_logprob_partials
from xdkernels.logsumexp import Partials, default_vocab_block, logprob_of_partials, merge_logsumexp

N, V = 8192, 151936
SHAPE = f"[{N}, {V}] bfloat16"
TURNS = 15
SHARDS = 4
EXACT_ROWS = 256
BATCHES = (1, 7, 8, 64, 1000)


def measure(say: Callable[[str], None], read: float | None = None) -> tuple[list[Row], list[Target]]:
    """Rows of the table, and what was asked. read: bytes a second; measured where none."""
    read = read or read_bytes_per_s()
    torch.manual_seed(0)
    logits = torch.randn(N, V, device="cuda", dtype=torch.bfloat16) * 4
    ids = torch.randint(0, V, (N,), device="cuda")
    say("logprob: forward, entropy, backward")
    times = _timed(logits, ids)
    median = {name: statistics.median(found) for name, found in times.items()}
    floor_ms = logits.numel() * 2 / read * 1e3

    say("logprob: error, bits, large tensors")
    want = torch.log_softmax(logits[:EXACT_ROWS].double(), dim=1).gather(1, ids[:EXACT_ROWS, None]).squeeze(1)
    found = selected_logprob(logits, ids)
    error = float((found[:EXACT_ROWS].double() - want).abs().max())
    same = _same_bits(logits, ids, found)
    of_logits, same_gradient = _gradient(logits, ids)
    shards = _same_over_shards(logits[:64], ids[:64], found[:64])
    shard_rows = _timed_shards(logits, ids, found, floor_ms, read)
    large = _large(ids)
    rows = [
        Row("selected_logprob", f"{SHAPE}, forward", median["forward"], floor_ms, error, same),
        Row("selected_logprob", "forward, entropy", median["entropy"], floor_ms),
        Row("selected_logprob", "backward (against a copy)", median["backward"], median["copy"], of_logits,
            same_gradient),
        *shard_rows,
        Row("torch.compile of log_softmax and gather", "forward", median["compiled"], floor_ms),
    ]
    targets = [
        Target("selected_logprob forward: share of the read bandwidth",
               statistics.median(floor_ms / found for found in times["forward"]), 0.85, "x", at_least=True),
        Target("selected_logprob backward / a copy", median_ratio(times["backward"], times["copy"]), 1.2, "x"),
        Target("selected_logprob rows with the same bits alone, among others, permuted, strided", float(same), 1, "",
               at_least=True),
        Target("1, 2 and 4 vocabulary shards with the same bits", float(shards), 1, "", at_least=True),
        Target("[16384, 151936], over 2^31 elements, against float64", large, 1e-5, "nats"),
    ]  # fmt: skip
    return rows, targets


def _timed(logits: torch.Tensor, ids: torch.Tensor) -> dict[str, list[float]]:
    leaf = logits.detach().requires_grad_()
    upstream = torch.randn(N, device="cuda")
    logprobs = selected_logprob(leaf, ids, check=False)
    compiled = torch.compile(lambda z, i: torch.log_softmax(z.float(), dim=1).gather(1, i[:, None]).squeeze(1))
    return in_turns(
        {
            "forward": lambda: selected_logprob(logits, ids, check=False),
            "entropy": lambda: selected_logprob(logits, ids, entropy=True, check=False),
            "backward": lambda: torch.autograd.grad(logprobs, leaf, upstream, retain_graph=True),
            "copy": lambda: torch.empty_like(logits).copy_(logits),
            "compiled": lambda: compiled(logits, ids),
        },
        TURNS,
    )


def _same_bits(logits: torch.Tensor, ids: torch.Tensor, whole: torch.Tensor) -> bool:
    batches = [slice(0, count) for count in BATCHES] + [slice(5000, 5007), torch.randperm(N, device="cuda")[:512]]
    alone = all(torch.equal(selected_logprob(logits[rows], ids[rows]), whole[rows]) for rows in batches)
    wide = torch.empty(64, V + 3, dtype=logits.dtype, device="cuda")  # rows that begin off 16 bytes
    wide[:, 3:] = logits[:64]
    columns = logits[:64].mT.contiguous().mT
    other = selected_logprob(logits[:64], ids[:64], vocab_block=V)  # negative control: another order of sums shows
    return (
        alone
        and all(torch.equal(selected_logprob(strided, ids[:64]), whole[:64]) for strided in (wide[:, 3:], columns))
        and not torch.equal(other, whole[:64])
    )


def _gradient(logits: torch.Tensor, ids: torch.Tensor) -> tuple[float, bool]:
    """Of the first rows: the largest difference from float64, and whether their bits are those of rows alone."""
    upstream = torch.randn(EXACT_ROWS, device="cuda")

    def found(rows: slice) -> torch.Tensor:
        leaf = logits[rows].detach().requires_grad_()
        return torch.autograd.grad(selected_logprob(leaf, ids[rows]), leaf, upstream[rows])[0]

    whole = found(slice(EXACT_ROWS))
    want = torch.softmax(logits[:EXACT_ROWS].double(), dim=1).neg_()
    want[torch.arange(EXACT_ROWS, device="cuda"), ids[:EXACT_ROWS]] += 1
    error = float((whole.double() - want * upstream.double()[:, None]).abs().max())
    return error, all(torch.equal(found(rows), whole[rows]) for rows in (slice(0, 1), slice(7, 15), slice(200, 201)))


def _same_over_shards(logits: torch.Tensor, ids: torch.Tensor, whole: torch.Tensor) -> bool:
    def merged(count: int, vocab_block: int = default_vocab_block(V)) -> torch.Tensor:
        width = V // count
        shards = [
            selected_logprob_partials(
                logits[:, first : first + width].contiguous(), ids, vocab=V, first=first,
                vocab_block=vocab_block,
            )
            for first in range(0, V, width)
        ]  # fmt: skip
        return logprob_of_partials(*map(list, zip(*shards, strict=True)))

    other = merged(1, V)  # negative control
    return all(torch.equal(merged(count), whole) for count in (1, 2, 4)) and not torch.equal(other, whole)


def _timed_shards(
    logits: torch.Tensor, ids: torch.Tensor, whole: torch.Tensor, floor_ms: float, read: float
) -> list[Row]:
    """Four shards one after the other, as a rank each would hold them, and their merge."""
    width = V // SHARDS
    shards = [logits[:, first : first + width].contiguous() for first in range(0, V, width)]
    block = default_vocab_block(V)

    def partials(shard: int) -> tuple[Partials, torch.Tensor]:
        return selected_logprob_partials(
            shards[shard], ids, vocab=V, first=shard * width, vocab_block=block, check=False
        )

    parts = [partials(shard) for shard in range(SHARDS)]
    sums, selected = map(list, zip(*parts, strict=True))
    times = in_turns(
        {
            "shards": lambda: [partials(shard) for shard in range(SHARDS)],
            "logprobs": lambda: logprob_of_partials(sums, selected),
            "merge": lambda: merge_logsumexp(sums),
        },
        TURNS,
    )
    median = {name: statistics.median(found) for name, found in times.items()}
    merged = logprob_of_partials(sums, selected)
    same = torch.equal(merged, whole)
    merge_ms = sum(each.numel() for part in sums for each in part[:2]) * 4 / read * 1e3
    return [
        Row("selected_logprob_partials", f"{SHARDS} shards, one after the other", median["shards"], floor_ms),
        Row("logprob_of_partials", f"{SHARDS} shards' blocks, {V // block} in all", median["logprobs"], merge_ms, None,
            same),
        Row("merge_logsumexp", f"{SHARDS} shards' blocks, {V // block} in all", median["merge"], merge_ms,
            _merge_error(logits, sums)),
    ]  # fmt: skip


def _merge_error(logits: torch.Tensor, sums: list[Partials]) -> float:
    """Of the first rows' log-sum-exps, against float64."""
    merged = merge_logsumexp(sums)
    found = merged.maximum[:EXACT_ROWS].double() + merged.log_total[:EXACT_ROWS].double()
    return float((found - logits[:EXACT_ROWS].double().logsumexp(dim=1)).abs().max())


def _large(ids: torch.Tensor) -> float:
    """The last rows of a tensor whose elements 32 bits cannot count."""
    logits = torch.empty(2 * N, V, dtype=torch.bfloat16, device="cuda")
    for part in logits.split(1024):
        part.normal_()
    twice = torch.cat([ids, ids])
    found = selected_logprob(logits, twice)
    want = torch.log_softmax(logits[-64:].double(), dim=1).gather(1, twice[-64:, None]).squeeze(1)
    return float((found[-64:].double() - want).abs().max())
