"""Large runs without an engine: planned and materialised by the tools, scored by a generator, the same for a seed.

Tokens, masks and lengths are drawn once a run; both sides' logprobs are the run's, each with noise of the case's own
seed. What is published is what a faithful scorer of cpu-smoke leaves, by the library's own publishing, so that every
tool takes it for an attempt like any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from comparison_fixtures import score

from libxd import sequences as frozen
from libxd import shards
from libxd.rundir import SIDES, Attempt
from libxd.sequences import Sequences

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENT = "scale"
POLICY = ("--runtime", "cpu-smoke")
RESPONSE_TOKENS = (300, 700)  # of a sequence, prompt and all
PROMPT_TOKENS = 100
_VOCABULARY = 320
_NOISE = np.float32(1e-6)  # nats, a side: some tokens are mismatches under ws1's 1e-5 of float32
#: what a tool may need beside the tokens: an interpreter, numpy, two threads' buffers
ENVIRONMENT = {**os.environ, "XD_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
               "PYTHONDONTWRITEBYTECODE": ""}  # fmt: skip


def tool(name: str, *arguments: object) -> list[str]:
    """A tool as a user calls it."""
    return [str(ROOT / "tools" / name), *map(str, arguments)]


def output(command: Sequence[str], stdin: bytes = b"") -> bytes:
    """The stdout of a process that must succeed."""
    return subprocess.run(command, input=stdin, stdout=subprocess.PIPE, env=ENVIRONMENT, check=True).stdout


@dataclass(frozen=True)
class Spent:
    """Of one process: its exit status, seconds of wall time, the most bytes that were resident, its stderr."""

    status: int
    wall_s: float
    peak_bytes: int
    said: str


def spend(command: Sequence[str], data_bytes: int | None = None) -> Spent:
    """Run a command to its end; data_bytes: the most that its private memory may reach (RLIMIT_DATA).

    Score files are read through memory maps that are shared with the page cache. Those are no private memory, and an
    address space (ulimit -v) would count them by the files' size; what of them is resident is in `peak_bytes`.
    """
    import time

    def limit() -> None:
        if data_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))

    with tempfile.TemporaryFile() as said:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
                                   env=ENVIRONMENT, preexec_fn=limit)  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        text = said.read().decode(errors="replace")
    return Spent(process.returncode, wall_s, usage.ru_maxrss * 1024, text)


def tokens_of(tokens: int, seed: int) -> Sequences:
    """T tokens in sequences of drawn lengths, whose prompts are not active."""
    draw = np.random.default_rng(seed)
    low, high = RESPONSE_TOKENS
    lengths = draw.integers(low, high, 2 * tokens // (low + high) + 2 + tokens // low // 8, np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    bounds = np.append(bounds[bounds <= tokens - low], tokens) if tokens > low else np.array([0, tokens])
    sizes = np.diff(bounds)
    prompts = np.minimum(PROMPT_TOKENS, sizes - 1).clip(1).astype(np.int32)
    positions = np.arange(tokens, dtype=np.int32)
    positions -= np.repeat(bounds[:-1], sizes).astype(np.int32)
    return Sequences(
        token_ids=draw.integers(3, _VOCABULARY, tokens, np.int32),
        cu_seqlens=bounds,
        active_mask=positions >= np.repeat(prompts, sizes),
        attention_mask=np.ones(tokens, bool),
        positions=positions,
        prompt_lens=prompts,
        prompt_index=np.arange(sizes.size, dtype=np.int32),
        logprobs=np.full(tokens, np.nan, np.float32),
    )


def plan(place: Path, cases: int, tokens: int, seed: int = 0) -> list[Attempt]:
    """A run of `cases` cases under `place`/runs, planned and materialised: its attempts, which nothing has scored."""
    place.mkdir(parents=True, exist_ok=True)
    frozen.write(place / "sequences.safetensors", tokens_of(tokens, seed))
    config: dict[str, Any] = json.loads((ROOT / "experiments" / "s0.json").read_text())
    config["experiment_id"] = EXPERIMENT
    config["identity"]["sequences"]["path"] = "sequences.safetensors"
    sizes = [{"path": "batch.size", "values": [size + 16 for size in range(1, cases)]}]
    config["interventions"] = sizes if cases > 1 else []
    if cases == 1:
        config["strategy"] = "pairwise"
    (place / "scale.json").write_text(json.dumps(config))
    runs = place / "runs"
    rows = output(tool("xd-plan", "-q", place / "scale.json", "--runs", runs))
    paths = output(tool("xd-materialize", "-q", "--runs", runs, *POLICY), rows)
    return [Attempt(path) for path in paths.decode().splitlines()]


def score_all(attempts: Sequence[Attempt], seed: int = 0, shard_tokens: int = shards.SHARD_TOKENS) -> None:
    """Both sides of every attempt, as a faithful scorer of the frozen tokens would leave them."""
    first = attempts[0].requested()
    held = frozen.read(first["locations"]["sequences"])
    arrays = {name: getattr(held, name) for name in ("cu_seqlens", "token_ids", "active_mask")}
    drawn = np.random.default_rng([seed, 1]).standard_exponential(held.num_tokens, np.float32)
    for number, attempt in enumerate(attempts):
        materialized, identity = attempt.materialized(), attempt.identity()
        for place, side in enumerate(SIDES):
            draw = np.random.default_rng([seed, 2, number, place])
            logprobs = draw.standard_normal(held.num_tokens, np.float32)
            logprobs *= _NOISE
            logprobs -= drawn
            np.minimum(logprobs, 0, out=logprobs)
            logprobs[held.cu_seqlens[:-1]] = np.nan  # nothing comes before a first token
            score(attempt, side, logprobs, arrays, materialized, identity, shard_tokens)


@contextlib.contextmanager
def made(place: Path, *arguments: object) -> Iterator[list[str]]:
    """The attempts of a run that a process of its own has made (`python scale_fixtures.py PLACE CASES TOKENS …`)."""
    yield output([sys.executable, __file__, str(place), *map(str, arguments)]).decode().splitlines()


def main() -> None:
    place, cases, tokens, *rest = sys.argv[1:]
    attempts = plan(Path(place), int(cases), int(tokens))
    score_all(attempts, shard_tokens=int(rest[0]) if rest else shards.SHARD_TOKENS)
    for attempt in attempts:
        print(attempt)


if __name__ == "__main__":
    main()
