"""A runtime of the tests whose engine does what a script says: keep its promises, or break one of them.

The script is the name of the synthetic checkpoint, a word an act: "ignores:batch.size", "raises". No torch; the model
is two parameters, and a token's logprob is a function of its id.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from materialize_fixtures import FakeRuntime

from libxd import canon, knobs
from libxd.errors import Status, XdError
from libxd.operators.descriptor import OperatorDescriptor
from libxd.runtimes.protocol import Observation, Piece, Scores, submission_batches
from libxd.scoring.observer import Observer

VOCABULARY = 96
BACKEND = "test.scripted"
#: another value than the one asked for, a knob
OTHER: dict[str, Any] = {
    "batch.size": 3, "rollout.tensor_parallel_size": 2, "rollout.context_parallel_size": 2, "rollout.dtype": "float16",
    "rollout.enable_prefix_caching": True, "rollout.enforce_eager": False, "training.attention_backend": "sdpa",
    "training.compute_dtype": "float16", "logp.backend": "native", "training.sharding": "fsdp",
}  # fmt: skip
#: what only running shows
SEEN_RUNNING = ("batch.size", "rollout.enable_prefix_caching", "logp.backend")

DESCRIPTOR = OperatorDescriptor(
    operation="selected_logprob", backend=BACKEND, targets=frozenset(knobs.SIDES), devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset(knobs.DTYPES), inputs="hidden", factory="scripted_engine:make", version="1",
)  # fmt: skip


class Values:
    """Enough of a tensor for an operator: shape, dtype, numbers."""

    def __init__(self, values: Any, dtype: str) -> None:
        self.values = values
        self.shape = values.shape
        self.dtype = dtype

    def detach(self) -> Values:
        return self

    def cpu(self) -> Values:
        return self

    def numpy(self) -> Any:
        return self.values


def make(side: str, options: dict[str, Any]):
    """The operator: minus an eighth of the id modulo eight, in nats, and on top of it what stands first in hidden."""

    def scripted(hidden: Values, weight: None, ids: Values, temperature: float) -> Values:
        return Values(-((ids.values % 8).astype("float32")) / 8 + hidden.values[:, 0], "torch.float32")

    return scripted


class ScriptedRuntime(FakeRuntime):
    """Materialises everything as asked; tensor parallelism is a matter of the process."""

    def __init__(self) -> None:
        super().__init__("scripted")

    def materialize(self, side, row, environment, allow_fallback):
        plan = super().materialize(side, row, environment, allow_fallback)
        plan.engine["script"] = script = row["identity"]["checkpoint"]["synthetic"]["name"]
        for act in script.split():
            if act.startswith("gpus:"):  # it computes on none, but is given some
                plan.engine.update(device="cuda", devices=int(act.removeprefix("gpus:")))
        plan.process["tensor_parallel_size"] = row["values"]["rollout.tensor_parallel_size"]
        return plan

    def estimate_bytes(self, side, engine, locations):
        return 2**60 if "huge" in engine["script"].split() else 1024

    def synthetic_parameters(self, synthetic, dtype):
        from libxd.checkpoint import parameter_digest

        return {name: parameter_digest(dtype, shape, [raw]) for name, dtype, shape, raw in weights(dtype)}

    def open(self, side, plan, context):
        if "refuses-to-open" in plan["engine"]["script"].split():
            raise XdError("the device has no such mode", status=Status.REFUSED, code="unsupported")
        if place := os.environ.get("SCRIPTED_WITNESS"):
            sit_on_devices(Path(place))
        write_log(f"{side} opens", plan["engine"])
        return ScriptedEngine(side, plan, context)


def sit_on_devices(place: Path) -> None:
    """RuntimeError when another engine that lives is on one of this one's devices; kept until this process ends."""
    for name in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
        seat = os.open(place / f"seat-{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(seat, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"two engines on device {name}") from None


def write_log(what: str, engine: dict[str, Any]) -> None:
    """A line in $SCRIPTED_LOG; of an engine on GPUs with those it sees."""
    if log := os.environ.get("SCRIPTED_LOG"):
        on = f" on {os.environ['CUDA_VISIBLE_DEVICES']}" if engine["device"] == "cuda" else ""
        with open(log, "a") as file:
            file.write(f"{what}{on}\n")


def weights(dtype: str) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """Name, dtype, shape and bytes of the two parameters."""
    width = {"float32": 4}.get(dtype, 2)
    return [(name, dtype, (2, 3), bytes([value]) * 6 * width) for name, value in (("embedding", 1), ("head", 2))]


class ScriptedEngine:
    """Shows what its plan says, but for what the script says."""

    def __init__(self, side, plan, context) -> None:
        self.side = side
        self.engine = plan["engine"]
        self.script = self.engine["script"].split()
        self.knobs = {record["knob"]: record["materialized"] for record in plan["knobs"]}
        self.place = Path(context.locations["sequences"]).parent
        dtype = self.knobs["rollout.dtype" if side == "rollout" else "training.compute_dtype"]
        self.held = weights(dtype)
        self.mode = "eval"
        self.request = None

    def does(self, act: str) -> bool:
        return act in self.script

    def bind(self, operator) -> None:
        self.operator = operator

    def shown(self, names) -> dict[str, Observation]:
        found = {}
        for name in names:
            value = OTHER[name] if self.does(f"ignores:{name}") else self.knobs[name]
            found[name] = Observation(None if self.does(f"hides:{name}") else value, {"live": value})
        return {name: seen for name, seen in found.items() if not self.does(f"forgets:{name}")}

    def settings(self):
        return self.shown(name for name in self.knobs if name not in SEEN_RUNNING)

    def behaviour(self):
        self.knobs = {**self.knobs, "batch.size": self.request.batch_size}
        return self.shown(name for name in self.knobs if name in SEEN_RUNNING)

    def state(self):
        return {"mode": self.mode, "optimizer": self.does("optimizer")}

    def parameters(self):
        yield from self.held

    def buffers(self):
        yield from ()

    def not_parameters(self):
        return []

    def score(self, sequences, request) -> Scores:
        import numpy as np

        self.request = request
        self.misbehave()
        total = sequences.num_tokens
        ids = sequences.token_ids.copy()
        if self.does("alters-an-id"):
            ids[-1] = (ids[-1] + 1) % VOCABULARY
        logprobs = np.full(total, np.nan, np.float32)
        observer = Observer(sequences.cu_seqlens)
        shift = np.inf if self.does("infinite") else int(os.environ["WOBBLE"]) if self.does("wobbles") else 0
        for batch in submission_batches(sequences.num_sequences, request.submission, request.batch_size):
            self.feed(observer, sequences, batch, ids)
            for sequence in batch:
                span = sequences.span(sequence)
                cells = np.arange(span.start + sequences.prompt_lens[sequence], span.stop)
                hidden = Values(np.full((len(cells), 2), shift, np.float32), "torch.float32")
                given = Values(ids[cells], "torch.int64")
                if not self.does("avoids-operator"):
                    observer.selected(cells, ids[cells])
                    logprobs[cells] = self.operator(hidden, None, given, temperature=1.0).values
        if self.does("one-score-short"):
            logprobs = logprobs[:-1]
        observed = observer.observed(kept=self.side == "rollout")
        return Scores(logprobs, observed, None)

    def feed(self, observer, sequences, batch, ids) -> None:
        """What a model would be fed: prompts and then a token a step, or whole sequences."""
        ends = {s: (sequences.span(s).stop - sequences.span(s).start) for s in batch}
        fed = dict.fromkeys(batch, 0)
        while left := [s for s in batch if fed[s] < ends[s]]:
            pieces = []
            for s in left:
                first = int(sequences.prompt_lens[s]) if self.request.mode == "decode" else ends[s]
                pieces.append(Piece(s, fed[s], 1 if fed[s] else first))
                fed[s] += pieces[-1].count
            cells = [sequences.span(p.sequence).start + p.start + i for p in pieces for i in range(p.count)]
            observer.forward(pieces, ids[cells], sequences.positions[cells], sequences.attention_mask[cells])

    def misbehave(self) -> None:
        once = self.place / "tried"
        if self.does("prints"):
            print("the engine prints")
            os.write(1, b"straight to the descriptor\n")
            sys.stderr.write("and complains\n")
        if self.does("reads-stdin"):
            assert sys.stdin.read() == ""
        if self.does("raises"):
            raise RuntimeError("the kernel\ndid not launch")
        if self.does("raises-once") and not once.exists():
            once.touch()
            raise RuntimeError("not yet")
        if self.does("fills-memory"):
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if self.does("refuses-to-score"):
            raise XdError("no kernel for this shape", status=Status.REFUSED, code="unsupported")
        if self.does("dies-once") and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.does("exits"):
            os._exit(3)
        if self.does("waits-at-the-gate") and "GATE_IS_OPEN" not in os.environ:  # a FIFO: until there is a byte in it
            with open(self.place / "gate", "rb", buffering=0) as gate:
                write_log(f"{self.side} waits", self.engine)
                gate.read(1)
        if self.does("sleeps"):
            (self.place / "pid").write_text(str(os.getpid()))
            time.sleep(120)
        if self.does("trains"):
            self.held = [(name, dtype, shape, raw[::-1] if name != "head" else bytes(len(raw)))
                         for name, dtype, shape, raw in self.held]  # fmt: skip
        if self.does("leaves-train-mode"):
            self.mode = "train"

    def describe(self):
        return {"class": type(self).__name__, "digest_of_script": canon.digest(self.script)}

    def close(self) -> None:
        write_log(f"{self.side} closes", self.engine)
