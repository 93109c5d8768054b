"""What the answers of all ranks come to: where they do not agree, nothing is shown. Pure; no torch, no vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from libxd.runtimes.protocol import Observation


def agreed(values: Sequence[Any]) -> Any:
    """What all say; None when they do not say the same."""
    return values[0] if all(value == values[0] for value in values) else None


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


def state(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """In training where any rank is; with an optimizer where any rank has one."""
    training = any(each["mode"] == "train" for each in states)
    return {"mode": "train" if training else "eval", "optimizer": any(each["optimizer"] for each in states)}


def buffers(held: Sequence[Sequence[tuple[Any, ...]]]) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
    """Of buffers that all ranks have, one each: as one holds it, or, where they differ, what all hold."""
    for copies in zip(*held, strict=True):
        name, dtype, shape, _ = copies[0]
        if agreed(copies):
            yield copies[0]
        else:
            yield name, dtype, (len(copies), *shape), b"".join(raw for *_, raw in copies)


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
