"""Paged decode of an 8B model's attention: ours beside SDPA over a contiguous cache, and beside gather and pad.

    python dev/bench_kernels_attention.py                the four shapes, and what was asked of them
    python dev/bench_kernels_attention.py --variants     the four shapes under each tiling of VARIANTS

Times are of CUDA graphs that hold a call for each of several caches, so that no call finds its keys in the L2.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from bench_device import Row, Target, extra_bytes, machine, read_bytes_per_s
from xdkernels.paged_attention import TILINGS, Tiling, paged_decode_attention

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
DTYPE = torch.bfloat16
SPLIT = 512
TURNS = 15
#: caches of one shape together, at least: twenty times the L2
ROTATED_BYTES = 2**30
#: calls of a graph at least: what another kernel left in the address caches is the first one's matter alone
GRAPH_CALLS = 8
#: sequences of a shape that float64 computes again
EXACT_ROWS = 3

#: tilings to try at head dimension 128 in 16 bits. Those that share block_n must give the same bits
VARIANTS = {
    f"{keys:3} keys, {warps} warps, {stages} stages, {programs:3} programs, {registers or 'any'} registers": Tiling(
        keys, warps, stages, programs, registers
    )
    for keys, warps, stages, programs, registers in (
        (32, 4, 3, 48, None), (32, 4, 3, 32, None), (32, 4, 3, 32, 96), (32, 4, 3, 64, None), (32, 4, 3, 128, None),
        (32, 4, 3, 5, None), (32, 4, 2, 48, None), (32, 4, 4, 48, None), (32, 2, 4, 48, None), (16, 4, 4, 32, None),
        (64, 4, 3, 32, None), (64, 8, 3, 32, None), (128, 8, 2, 32, None),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Sequences in scattered blocks. q [B, Hq, D]; caches [blocks, page, Hkv, D]; the lengths, on the host, too."""

    lengths: list[int]
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor

    def rows(self, index: list[int]) -> tuple[torch.Tensor, ...]:
        """The arguments for some of the sequences, in that order."""
        return self.q[index], self.k_cache, self.v_cache, self.block_tables[index], self.context_lens[index]

    @property
    def bytes_read(self) -> int:
        """What cannot but move: K and V once, the queries, the outputs."""
        return (sum(self.lengths) * 2 * KV_HEADS + 2 * len(self.lengths) * HEADS) * HEAD_DIM * DTYPE.itemsize


def shapes() -> dict[str, list[int]]:
    """Lengths by name. `spread`: a batch of rollouts, most of a few thousand tokens, four at 32k."""
    spread = torch.randint(1000, 6000, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    for place in (7, 23, 40, 58):
        spread.insert(place, 32768)
    return {"B=64 L=8192": [8192] * 64, "B=16 L=32768": [32768] * 16, "B=16 L=4096": [4096] * 16, "spread": spread}


def batch(lengths: list[int]) -> Batch:
    """A batch of these lengths on the GPU, random all over."""
    counts = [-(-length // PAGE) for length in lengths]
    where = torch.randperm(sum(counts), device="cuda").int().split(counts)
    tables = torch.nn.utils.rnn.pad_sequence(where, batch_first=True)
    shape = (sum(counts), PAGE, KV_HEADS, HEAD_DIM)
    k_cache, v_cache = (torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(2))
    q = torch.randn(len(lengths), HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
    return Batch(lengths, q, k_cache, v_cache, tables, torch.tensor(lengths, dtype=torch.int32, device="cuda"))


def batches(lengths: list[int]) -> list[Batch]:
    """As many as the L2 needs to forget each before its turn comes again."""
    first = batch(lengths)
    return [first] + [batch(lengths) for _ in range(ROTATED_BYTES // first.bytes_read)]


def ours(data: Batch) -> torch.Tensor:
    """The kernel under its own tiling."""
    return paged_decode_attention(*data.rows(slice(None)), split_tokens=SPLIT, check=False)


def under(tiling: Tiling) -> Callable[[Batch], torch.Tensor]:
    """The kernel under another tiling."""
    from xdkernels.jit.paged_attention import launch

    def call(data: Batch) -> torch.Tensor:
        options = {"split_tokens": SPLIT, "scale": HEAD_DIM**-0.5, "softcap": None, "window": None}
        return launch(*data.rows(slice(None)), **options, tiling=tiling)

    return call


def gather_and_pad(data: Batch) -> torch.Tensor:
    """Without a kernel: each sequence gathered into a strip, copied into a zeroed rectangle; then one masked SDPA."""
    longest = max(data.lengths)
    padded = []
    for cache in (data.k_cache, data.v_cache):
        rectangle = torch.zeros(len(data.lengths), longest, KV_HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
        for row, length in enumerate(data.lengths):
            strip = cache[data.block_tables[row, : -(-length // PAGE)]].flatten(0, 1)
            rectangle[row, :length] = strip[:length]
        padded.append(rectangle.transpose(1, 2))
    mask = torch.arange(longest, device="cuda") < data.context_lens[:, None]
    mask = mask[:, None, None, :].expand(-1, KV_HEADS, HEADS // KV_HEADS, -1)
    return _grouped(data.q, *padded, mask)


def contiguous_sdpa(data: Batch) -> Callable[[], torch.Tensor]:
    """SDPA over caches that lie contiguously, [B, Hkv, L, D]: what paging is held against. Equal lengths: one call."""
    groups: list[tuple[list[int], int]] = [
        ([row for row, found in enumerate(data.lengths) if found == length], length) for length in set(data.lengths)
    ]
    parts = [
        (data.q[rows], *(torch.randn(len(rows), KV_HEADS, length, HEAD_DIM, dtype=DTYPE, device="cuda") for _ in "kv"))
        for rows, length in groups
    ]
    return lambda: [_grouped(*part) for part in parts][-1]


def _grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """SDPA with the query heads of one key-value head as its rows: K and V are not repeated, nor read twice."""
    rows = q.unflatten(1, (KV_HEADS, -1))  # [B, Hkv, G, D]
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=mask).flatten(1, 2)


def captured(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """The calls one after the other as one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replayed_ms(calls: dict[str, list[Callable[[], object]]], turns: int = TURNS) -> dict[str, float]:
    """Median time of one call of each name: a replay over the number of its calls, the names in turns.

    calls: a call for each of several caches. They are gone through until a graph holds GRAPH_CALLS of them.
    """
    calls = {name: found * -(-GRAPH_CALLS // len(found)) for name, found in calls.items()}
    graphs = {name: captured(found) for name, found in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(turns):
        for name, graph in graphs.items():
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / len(calls[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def exact(data: Batch, row: int) -> torch.Tensor:
    """One sequence in float64: [Hq, D]."""
    length = data.lengths[row]
    blocks = data.block_tables[row, : -(-length // PAGE)]
    k, v = (cache[blocks].flatten(0, 1)[:length].double().transpose(0, 1) for cache in (data.k_cache, data.v_cache))
    x = data.q[row].double().unflatten(0, (KV_HEADS, -1)) @ k.mT * HEAD_DIM**-0.5
    return (torch.softmax(x, dim=-1) @ v).flatten(0, 1)


def error(data: Batch, out: torch.Tensor) -> float:
    """The greatest difference from float64 over the first sequences."""
    return max(float((out[row].double() - exact(data, row)).abs().max()) for row in range(EXACT_ROWS))


def same_bits(data: Batch) -> bool:
    """Alone, in part of the batch, permuted, beside a 32k neighbour, and with all blocks elsewhere."""

    def found(index: list[int]) -> torch.Tensor:
        return paged_decode_attention(*data.rows(index), split_tokens=SPLIT)

    size = len(data.lengths)
    everything, half = list(range(size)), list(range(size // 2))
    out = found(everything)
    permuted = torch.randperm(size, generator=torch.Generator().manual_seed(1)).tolist()
    same = [torch.equal(found(index), out[index]) for index in (permuted, half, *([row] for row in range(size)))]

    longer = batch([*data.lengths[:2], 32768])  # other data in the third row; the first two are copied in
    pairs = [(data.k_cache, longer.k_cache), (data.v_cache, longer.v_cache)]
    for row, length in enumerate(data.lengths[:2]):
        entries = -(-length // PAGE)
        for source, target in pairs:
            target[longer.block_tables[row, :entries]] = source[data.block_tables[row, :entries]]
    q = torch.cat([data.q[:2], longer.q[2:]])
    beside = paged_decode_attention(
        q, longer.k_cache, longer.v_cache, longer.block_tables, longer.context_lens, split_tokens=SPLIT
    )
    same.append(torch.equal(beside[:2], out[:2]))

    moved = torch.randperm(len(data.k_cache), device="cuda")
    k_cache, v_cache = torch.empty_like(data.k_cache), torch.empty_like(data.v_cache)
    k_cache[moved], v_cache[moved] = data.k_cache, data.v_cache
    tables = moved[data.block_tables.long()].int()
    elsewhere = paged_decode_attention(data.q, k_cache, v_cache, tables, data.context_lens, split_tokens=SPLIT)
    same.append(torch.equal(elsewhere, out))

    other = paged_decode_attention(*data.rows(everything), split_tokens=2 * SPLIT)
    return all(same) and not torch.equal(other, out)  # negative control: another split must show


def measure(say: Callable[[str], None], read: float | None = None) -> tuple[list[Row], list[Target]]:
    """Rows of the table, and what was asked. read: bytes a second of this run's device, measured here if not given."""
    torch.manual_seed(0)
    read = read_bytes_per_s() if read is None else read
    rows, shares = [], {}
    for shape, lengths in shapes().items():
        say(f"paged decode: {shape}")
        data = batches(lengths)
        contiguous = [contiguous_sdpa(one) for one in data]
        times = replayed_ms(
            {
                "ours": [lambda one=one: ours(one) for one in data],
                "contiguous": contiguous,
                "gather": [lambda one=one: gather_and_pad(one) for one in data],
            }
        )
        floor = data[0].bytes_read / read * 1e3
        shares[shape] = floor / times["ours"]
        out, padded = ours(data[0]), gather_and_pad(data[0])
        rows += [
            Row("paged_decode_attention", shape, times["ours"], floor, error(data[0], out), same_bits(data[0]),
                extra_bytes(lambda one=data[0]: ours(one))),
            Row("SDPA, contiguous cache", shape, times["contiguous"], floor),
            Row("gather and pad, SDPA", shape, times["gather"], floor, error(data[0], padded), None,
                extra_bytes(lambda one=data[0]: gather_and_pad(one))),
        ]  # fmt: skip
        del data, contiguous
        torch.cuda.empty_cache()
    invariant = all(row.invariant for row in rows if row.invariant is not None)
    targets = [
        Target(f"paged decode {shape}: share of the read bandwidth", shares[shape], bound, "", at_least=True)
        for shape, bound in {"B=64 L=8192": 0.85, "B=16 L=32768": 0.85, "B=16 L=4096": 0.60}.items()
    ] + [
        Target("paged decode, spread lengths / their bytes' floor", 1 / shares["spread"], 1.15, "x"),
        Target("paged decode rows with the same bits in any company", float(invariant), 1, "", at_least=True),
    ]
    return rows, targets


def variants(say: Callable[[str], None]) -> list[str]:
    """Each tiling of VARIANTS over the four shapes, as lines: share of this run's read bandwidth, and whether the bits
    are those of the first variant with the same block_n."""
    torch.manual_seed(0)
    read = read_bytes_per_s()
    shares: dict[str, list[str]] = {name: [] for name in VARIANTS}
    for shape, lengths in shapes().items():
        say(f"variants: {shape}")
        data = batches(lengths)
        floor = data[0].bytes_read / read * 1e3
        bits: dict[int, torch.Tensor] = {}
        for name, tiling in VARIANTS.items():
            call = under(tiling)
            out = call(data[0])
            same = torch.equal(bits.setdefault(tiling.block_n, out), out)
            time_ms = replayed_ms({name: [lambda one=one, call=call: call(one) for one in data]}, 9)[name]
            shares[name].append(f"{time_ms:7.3f} ms {floor / time_ms:4.0%}{' ' if same else ' OTHER BITS'}")
        del data
        torch.cuda.empty_cache()
    width = max(map(len, VARIANTS))
    head = f"{'':{width}}  " + "  ".join(f"{shape:>16}" for shape in shapes())
    chosen = TILINGS[DTYPE.itemsize, HEAD_DIM]
    return [f"read {read / 1e12:.2f} TB/s", head] + [
        f"{name:{width}}  " + "  ".join(f"{cell:>16}" for cell in cells) + ("  (chosen)" * (VARIANTS[name] == chosen))
        for name, cells in shares.items()
    ]


def main(arguments: list[str]) -> int:
    """Print the table, or that of the variants; 1 when something is not met, 69 without a GPU."""
    if not torch.cuda.is_available():
        print("bench: no CUDA device here, and paged attention is measured on nothing else", file=sys.stderr)
        return 69

    def say(what: str) -> None:
        print(f"bench: {what}", file=sys.stderr, flush=True)

    print(machine())
    if arguments == ["--variants"]:
        print("\n".join(variants(say)))
        return 0
    rows, targets = measure(say)
    print(f"{'':46} time ms  share    error same bits   GiB")
    for row in rows:
        print(row.line(44))
    for target in targets:
        print(f"{target.what}: {target.measured:.3g} {target.unit} {'met' if target.met else 'NOT MET'}")
    return 0 if all(target.met for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
