"""Large runs without an engine: planned and materialised by the tools, scored by a generator, the same for a seed.

Tokens, masks and lengths are drawn once a run; both sides' logprobs are the run's, each with noise of the case's own
seed. What is published is what a faithful scorer of cpu-smoke leaves, by the library's own publishing, so that every
tool takes it for an attempt like any other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from comparison_fixtures import score

from libxd import sequences as frozen
from libxd import shards, tensors
from libxd.rundir import SIDES, Attempt
from libxd.sequences import Sequences
from libxd.tensors import TensorFile

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENT = "scale"
POLICY = ("--runtime", "cpu-smoke")
RESPONSE_TOKENS = (300, 700)  # of a sequence, prompt and all
PROMPT_TOKENS = 100
_VOCABULARY = 320
_NOISE = np.float32(3e-6)  # nats, a side: some tokens are mismatches under ws1's 1e-5 of float32
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
    """Of one process: its exit status, seconds of wall time and of processors, the most bytes resident, its stderr."""

    status: int
    wall_s: float
    cpu_s: float
    peak_bytes: int
    said: str


#: forks and waits. The most that was ever resident goes from a process to what it forks, beyond exec, too: it must not
#: be that of a whole test run
_STARTER = """
import json, os, resource, sys, time
report, most = int(sys.argv[1]), int(sys.argv[2])
began = time.perf_counter()
if not (child := os.fork()):
    if most:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    os.execv(sys.argv[3], sys.argv[3:])
_, status, usage = os.wait4(child, 0)
spent = time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
os.write(report, json.dumps([os.waitstatus_to_exitcode(status), *spent]).encode())
"""


def spend(command: Sequence[str], data_bytes: int | None = None) -> Spent:
    """Run a command to its end; data_bytes: the most that its private memory may reach (RLIMIT_DATA).

    Score files are read through memory maps that are shared with the page cache. Those are no private memory, and an
    address space (ulimit -v) would count them by the files' size; what of them is resident is in `peak_bytes`.
    """
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as report:
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _STARTER, str(report.fileno()), str(data_bytes or 0), *command],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, env=ENVIRONMENT, check=True,
            pass_fds=(report.fileno(),),
        )  # fmt: skip
        for file in (said, report):
            file.seek(0)
        status, wall_s, cpu_s, peak_bytes = json.load(report)
        return Spent(status, wall_s, cpu_s, peak_bytes, said.read().decode(errors="replace"))


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


def plan(place: Path, cases: int, tokens: int, seed: int = 0, first: int = 0) -> list[Attempt]:
    """A run of `cases` cases under `place`/runs, planned and materialised: its attempts, which nothing has scored.

    The baseline, and one batch size after another from the `first` on: runs of another first share the baseline alone.
    """
    place.mkdir(parents=True, exist_ok=True)
    held = tokens_of(tokens, seed)  # xd-plan looks at it
    tensors.write(place / "sequences.safetensors", {name: getattr(held, name) for name in frozen.LAYOUT}, held.metadata)
    config: dict[str, Any] = json.loads((ROOT / "experiments" / "s0.json").read_text())
    config["experiment_id"] = EXPERIMENT
    config["identity"]["sequences"]["path"] = "sequences.safetensors"
    sizes = [first + 16 + number for number in range(1, cases)]
    config["interventions"] = [{"path": "batch.size", "values": sizes}] if sizes else []
    (place / "scale.json").write_text(json.dumps(config))
    runs = place / "runs"
    rows = output(tool("xd-plan", "-q", place / "scale.json", "--runs", runs))
    paths = output(tool("xd-materialize", "-q", "--runs", runs, *POLICY), rows)
    return [Attempt(path) for path in paths.decode().splitlines()]


def score_all(attempts: Sequence[Attempt], seed: int = 0, shard_tokens: int = shards.SHARD_TOKENS) -> None:
    """Both sides of every attempt, as a faithful scorer of the frozen tokens would leave them."""
    with TensorFile(attempts[0].requested()["locations"]["sequences"]) as file:
        arrays = {name: file.array(name) for name in ("cu_seqlens", "token_ids", "active_mask")}
    tokens = arrays["token_ids"].size
    drawn = np.random.default_rng([seed, 1]).standard_exponential(tokens, np.float32)
    for attempt in attempts:
        materialized, identity = attempt.materialized(), attempt.identity()
        for place, side in enumerate(SIDES):
            draw = np.random.default_rng([seed, 2, int(attempt.case_id[2:], 16), place])
            logprobs = draw.standard_normal(tokens, np.float32)
            logprobs *= _NOISE
            logprobs -= drawn
            np.minimum(logprobs, 0, out=logprobs)
            logprobs[arrays["cu_seqlens"][:-1]] = np.nan  # nothing comes before a first token
            score(attempt, side, logprobs, arrays, materialized, identity, shard_tokens)


def make(place: Path, cases: int, tokens: int, shard_tokens: int = shards.SHARD_TOKENS, first: int = 0) -> list[str]:
    """`plan` and `score_all` by a process of its own: a child's peak counts what its parent held. Paths of attempts."""
    command = [sys.executable, __file__, place, cases, tokens, shard_tokens, first]
    return output(list(map(str, command))).decode().splitlines()


#: a stage of a run's life -> its command, of the run's place and its attempts
STAGES: dict[str, Callable[[Path, list[str]], list[str]]] = {
    "compare": lambda place, paths: tool("xd-compare", "-q", *paths),
    "seal": lambda place, paths: tool("xd-seal", "-q", *paths),
    "verify": lambda place, paths: tool("xd-seal", "--verify", *paths),
    "resume": lambda place, paths: tool("xd-resume", "-q", "--exit-code", "--runs", place / "runs", *POLICY,
                                        place / "runs" / EXPERIMENT / "plan.jsonl"),
    "table": lambda place, paths: tool("xd-compare", "-q", "--table", *paths),
    "report": lambda place, paths: tool("xd-report", "-q", "--out", place / f"{time.time_ns()}.html", *paths),
    "impact": lambda place, paths: tool("xd-impact", "-q", paths[0]),
    "doctor": lambda place, paths: tool("xd-doctor", "-q", *[each for side in SIDES
                                                           for each in Attempt(paths[0]).scores(side)]),
}  # fmt: skip
#: what a tool must not do, under the same bound: lay both sides out in memory
WHOLE = """
import sys
import numpy as np
from libxd import pairs
from libxd.rundir import Attempt
pair = pairs.of_attempt(Attempt(sys.argv[1]))
held = [np.array(array, np.float64) for side in (pair.rollout, pair.training)
        for array in (side.logprobs, side.token_ids)]
"""


def control(paths: list[str]) -> list[str]:
    """The command of it."""
    return [sys.executable, "-P", "-c", WHOLE, paths[0]]


def main() -> None:
    cases, tokens, shard_tokens, first = map(int, sys.argv[2:])
    attempts = plan(Path(sys.argv[1]), cases, tokens, first=first)
    score_all(attempts, shard_tokens=shard_tokens)
    for attempt in attempts:
        print(attempt)


if __name__ == "__main__":
    main()
