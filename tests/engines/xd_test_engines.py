"""Runtimes that break one promise each, for the chain to catch: cpu-smoke, with one thing done behind its back.

They are found by entry point, as any plugin is: this folder on PYTHONPATH makes it an installed distribution, in the
tools and in the scorers they start. What their engines show is cpu-smoke's own read-back, of what really ran (but for
the one that lies there, too): each of them is caught by evidence, not by confession. `hf-holds-other-buffer` does the
same to the runtime hf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from libxd.runtimes.cpu_smoke.runtime import CpuSmoke
from libxd.runtimes.hf.runtime import Hf

#: for each knob, what an engine that ignores it uses whatever is asked
IGNORED: dict[str, Any] = {
    "batch.size": 8,
    "rollout.tensor_parallel_size": 1,
    "rollout.context_parallel_size": 1,
    "rollout.dtype": "float32",
    "rollout.enable_prefix_caching": True,
    "rollout.enforce_eager": True,
    "training.attention_backend": "sdpa",
    "training.compute_dtype": "float32",
    "logp.backend": "native",
    "training.sharding": "unsharded",
}
#: what makes a scoring one of something else: a verdict
VIOLATIONS = (
    "alters-id", "alters-selected-id", "alters-mask", "shifts-positions", "holds-other-weight", "changes-weight",
    "holds-other-buffer", "changes-buffer", "trains", "ends-training", "owns-optimizer", "uses-cache", "prefills",
    "other-temperature", "masks-logits",
)  # fmt: skip
#: what makes it no scoring of the case at all: nothing is published
REFUSED = ("ignores-submission", "counts-the-schedule", "calls-operator-once", "corrects-operator", "sets-numerics")


class Dishonest(CpuSmoke):
    """Says what cpu-smoke says and opens the engine that `opened` gives for (honest runtime, side, plan, context)."""

    def __init__(self, name: str, opened: Callable[[Any, str, dict[str, Any], Any], Any]) -> None:
        self.name = name
        self._opened = opened

    def open(self, side: str, plan: dict[str, Any], context: Any) -> Any:
        return self._opened(super(), side, plan, context)


def ignores(knob: str) -> Dishonest:
    """Accepts a knob and then does what it always did."""

    def opened(honest: CpuSmoke, side: str, plan: dict[str, Any], context: Any) -> Any:
        from xd_dishonesty import fixed_batch_size, own_operator

        name = {"training.compute_dtype": "dtype", "training.attention_backend": "attention"}.get(
            knob, knob.partition(".")[2]
        )
        if knob not in ("batch.size", "logp.backend"):
            return honest.open(side, {**plan, "engine": {**plan["engine"], name: IGNORED[knob]}}, context)
        wrap = fixed_batch_size if knob == "batch.size" else own_operator
        return wrap(honest.open(side, plan, context), side, IGNORED[knob])

    return Dishonest(f"ignores-{knob}", opened)


def violates(violation: str) -> Dishonest:
    """Scores something else than the identity pins, or under a state that it forbids."""

    def opened(honest: CpuSmoke, side: str, plan: dict[str, Any], context: Any) -> Any:
        import xd_dishonesty

        return getattr(xd_dishonesty, violation.replace("-", "_"))(honest.open(side, plan, context))

    return Dishonest(violation, opened)


class DishonestHf(Hf):
    """hf, with a table of rotary frequencies that went through bfloat16."""

    name = "hf-holds-other-buffer"

    def open(self, side: str, plan: dict[str, Any], context: Any) -> Any:
        import torch

        engine = super().open(side, plan, context)
        frequencies = dict(engine.model.named_buffers())["model.rotary_emb.inv_freq"]
        frequencies.copy_(frequencies.to(torch.bfloat16))
        return engine


RUNTIMES = {
    runtime.name: runtime
    for runtime in (*map(ignores, IGNORED), *map(violates, (*VIOLATIONS, *REFUSED)), DishonestHf())
}


def __getattr__(name: str) -> Dishonest | DishonestHf:
    """Entry points name attributes: `ignores_batch_size`, `alters_id`."""
    for runtime in RUNTIMES.values():
        if attribute(runtime.name) == name:
            return runtime
    raise AttributeError(name)


def attribute(name: str) -> str:
    return name.replace("-", "_").replace(".", "_")
