"""Knobs by the answers of all ranks of vLLM: where they do not agree, nothing is shown. Pure; no torch, no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from libxd.runtimes.protocol import Observation
from libxd.runtimes.ranks.agreement import agreed


def tensor_parallel(worlds: Sequence[dict[str, Any]]) -> Observation:
    """Knob rollout.tensor_parallel_size, by the ranks' `world`: as many answer as each says that its group has.

    Layers that are split must be split over just as many, and each rank must have a place of its own.
    """
    evidence = {
        "group": [world["tensor"] for world in worlds],
        "ranks": [world["rank"] for world in worlds],
        "layers": sorted({size for world in worlds for size in world["layers"]} - {1}),
    }
    size = agreed(evidence["group"])
    fits = sorted(evidence["ranks"]) == list(range(len(worlds))) and size == len(worlds)
    split = evidence["layers"] == ([size] if size != 1 else [])
    return Observation(size if fits and split else None, evidence)


def context_parallel(worlds: Sequence[dict[str, Any]]) -> Observation:
    """Knob rollout.context_parallel_size: over how many ranks positions are split, in the cache or while prefilling."""
    evidence = {kind: [world[kind] for world in worlds] for kind in ("decode", "prefill")}
    sizes = agreed([max(world["decode"], world["prefill"]) for world in worlds])
    return Observation(sizes, evidence)


def enforce_eager(runs: Sequence[Any], forwards: int, modes: dict[str, Any]) -> Observation:
    """Knob rollout.enforce_eager, by what each rank counted (`compiled.Runs`) while so many forwards ran."""
    evidence = {
        "forwards": forwards,
        "first_layer_calls": [each.layers for each in runs],
        "graph_runs": [each.graphs for each in runs],
        "graph_replays": [each.replays for each in runs],
        **modes,
    }
    return Observation(agreed([each.eager(forwards) for each in runs]), evidence)
