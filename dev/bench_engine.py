"""The training engine of `hf` beside a bare loop over transformers, and what reading its weights back costs.

    python -P dev/bench_engine.py MODEL [--device cuda] [--sequences 64] [--tokens 1024] [--batch 16]

One process, the same model, the same tokens: random ids, a quarter of each sequence its prompt.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]  # the tests' fixtures materialise and open engines

from bench_timing import Result  # noqa: E402

THROUGHPUT_LIMIT, READ_BACK_LIMIT, TURNS = 1.1, 0.05, 3
DTYPE = "bfloat16"


def measure(
    model: Path, device: str = "cpu", sequences: int = 8, tokens: int = 96, batch: int = 4
) -> tuple[Result, Result]:
    """Scoring against the bare loop, and two read-backs (before and after, as each case has them) against scoring."""
    import torch
    from hf_fixtures import Bench

    from libxd.runtimes.protocol import Request
    from libxd.scoring.evidence import Snapshot

    engine = Bench(model).open(
        "training", device=device, training__compute_dtype=DTYPE, training__attention_backend="sdpa"
    )
    frozen = _sequences(engine.model.config.get_text_config().vocab_size, sequences, tokens)
    request = Request(batch, "teacher_forced", "canonical", {"logprobs": "raw", "temperature": 1.0})
    gc.freeze()  # as the scorer's child does
    timed = _in_turns(
        {
            "score": lambda: engine.score(frozen, request),
            "bare": lambda: _bare(engine.model, frozen, batch),
            "read-back": lambda: (Snapshot.take(engine), Snapshot.take(engine)),
        },
        torch.cuda.synchronize if device == "cuda" else lambda: None,
    )
    score_s, bare_s, read_s = (statistics.median(timed[name]) for name in ("score", "bare", "read-back"))
    size = f"{sequences} x {tokens} tokens, {sum(p.numel() for p in engine.model.parameters()) / 1e9:.2f}e9 parameters"
    return (
        Result("hf teacher forcing / a bare transformers loop", _ratio(timed["score"], timed["bare"]),
               THROUGHPUT_LIMIT, f"{score_s:.2f} s; {bare_s:.2f} s ({size}, {device})"),
        Result("weights read back twice / scoring", _ratio(timed["read-back"], timed["score"]), READ_BACK_LIMIT,
               f"{read_s:.3f} s; {score_s:.2f} s"),
    )  # fmt: skip


def _sequences(vocabulary: int, count: int, tokens: int) -> Any:
    import numpy as np

    from libxd.sequences import Sequences

    total, prompt = count * tokens, tokens // 4
    positions = np.tile(np.arange(tokens, dtype=np.int32), count)
    return Sequences(
        token_ids=np.random.default_rng(0).integers(0, vocabulary, total).astype(np.int32),
        cu_seqlens=np.arange(0, total + 1, tokens, dtype=np.int64),
        prompt_lens=np.full(count, prompt, np.int32), prompt_index=np.arange(count, dtype=np.int32),
        active_mask=positions >= prompt, attention_mask=np.ones(total, np.bool_), positions=positions,
        logprobs=np.full(total, np.nan, np.float32),
    )  # fmt: skip


def _bare(model: Any, frozen: Any, batch: int) -> Any:
    """What a trainer does: whole logits, a float32 log-softmax, the chosen column."""
    import torch

    length = int(frozen.cu_seqlens[1])
    ids = torch.from_numpy(frozen.token_ids.astype("int64")).view(-1, length)
    prompt = int(frozen.prompt_lens[0])
    found = []
    with torch.inference_mode():
        for rows in ids.split(batch):
            rows = rows.to(model.device)
            logits = model(input_ids=rows, attention_mask=torch.ones_like(rows), use_cache=False).logits
            for row, chosen in zip(logits, rows, strict=True):
                logprobs = torch.log_softmax(row[prompt - 1 : -1].float(), dim=-1)
                found.append(logprobs.gather(1, chosen[prompt:, None]).squeeze(1).cpu())
    return found


def _in_turns(functions: dict[str, Callable[[], object]], wait: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of each function, one after the other in every turn, after one call each to warm up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(TURNS + 1):
        for name, function in functions.items():
            wait()
            start = time.perf_counter()
            function()
            wait()
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def _ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def main() -> int:
    """Print both; 1 when one is not met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a checkpoint directory")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    for name, default in (("sequences", 8), ("tokens", 96), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    results = measure(given.model, given.device, given.sequences, given.tokens, given.batch)
    for r in results:
        print(f"{r.what:46}  {r.ratio:6.3f}  {r.limit:5.2f}  {r.verdict:7}  {r.detail}")
    return 1 if any(r.failed for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
