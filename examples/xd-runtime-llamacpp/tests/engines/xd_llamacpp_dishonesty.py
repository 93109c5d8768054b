"""Runtimes that are llamacpp but for one thing done behind its back, for the chain to catch.

Found by entry point: this folder on PYTHONPATH makes it an installed distribution, in the tools and in the scorers they
start. What their engines show is llamacpp's own read-back.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xd_runtime_llamacpp.runtime import LlamaCpp

WEIGHT = "model.layers.1.mlp.down_proj.weight"


class Dishonest(LlamaCpp):
    """Says what llamacpp says, and opens the engine that `opened` gives for (locations, engine arguments)."""

    def __init__(self, name: str, opened: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
        self.name = name
        self._opened = opened

    def open(self, side: str, plan: dict[str, Any], context: Any) -> Any:
        return self._opened(context.locations, plan["engine"])


def _holds_other_weights(locations: dict[str, Any], engine: dict[str, Any]) -> Any:
    """llama.cpp maps a checkpoint of which one element is another."""
    from safetensors.numpy import load_file, save_file

    from xd_runtime_llamacpp.engine import RolloutEngine

    class Elsewhere(RolloutEngine):
        def _write(self, directory: str) -> None:
            with tempfile.TemporaryDirectory() as place:
                other = Path(shutil.copytree(directory, Path(place, "other")))
                weights = load_file(other / "model.safetensors")
                weights[WEIGHT] = weights[WEIGHT].copy()
                weights[WEIGHT][0, 0] += 1e-3
                save_file(weights, other / "model.safetensors", {"format": "pt"})
                super()._write(str(other))

    return Elsewhere(locations, engine)


def _feeds_other_id(locations: dict[str, Any], engine: dict[str, Any]) -> Any:
    """The first token of every prompt is another one."""
    from xd_runtime_llamacpp.engine import RolloutEngine

    opened = RolloutEngine(locations, engine)
    asked = opened._server.ask
    opened._server.ask = lambda ids, *rest, **options: asked([ids[0] ^ 1, *ids[1:]], *rest, **options)
    return opened


HOLDS_OTHER_WEIGHTS = Dishonest("llamacpp-holds-other-weights", _holds_other_weights)
FEEDS_OTHER_ID = Dishonest("llamacpp-feeds-other-id", _feeds_other_id)
