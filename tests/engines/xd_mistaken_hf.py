"""Runtimes that are hf with a mistake in the middle, which no read-back shows: `xd_mistakes` says what each does."""

from __future__ import annotations

from typing import Any

from libxd.runtimes.hf.runtime import Hf

MISTAKES = (
    "temperature", "weight", "stale_weights", "positions_shifted", "attention_unscaled", "padded_vocabulary",
    "label_shift", "top_p", "half_cache", "norm_epsilon", "rotary_bfloat16", "logits_bfloat16", "other_id", "one_token",
)  # fmt: skip
#: what looks like one and changes nothing but the rounding
HARMLESS = ("all_positions_shifted",)


class Mistaken(Hf):
    """Says what hf says, and opens an engine that computes one thing otherwise."""

    def __init__(self, mistake: str) -> None:
        self.name = runtime_name(mistake)
        self._mistake = mistake

    def open(self, side: str, plan: dict[str, Any], context: Any) -> Any:
        import xd_mistakes

        engine = super().open(side, plan, context)
        getattr(xd_mistakes, self._mistake)(engine)
        return engine


def runtime_name(mistake: str) -> str:
    return "hf-mistakes-" + mistake.replace("_", "-")


def __getattr__(name: str) -> Mistaken:
    """Entry points name attributes: `temperature`, `weight`."""
    if name in (*MISTAKES, *HARMLESS):
        return Mistaken(name)
    raise AttributeError(name)
