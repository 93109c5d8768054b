"""The catalog of knobs is the contract's allowlist."""

from __future__ import annotations

from libxd import knobs


def test_lifecycles_are_the_contracts():
    """The least that a change takes, from the allowlist of the drift contract."""
    request, construction, process = "request", "construction", "process"
    assert {path: knob.lifecycle for path, knob in knobs.CATALOG.items()} == {
        "batch.size": request,
        "rollout.tensor_parallel_size": process,
        "rollout.context_parallel_size": process,
        "rollout.dtype": construction,
        "rollout.enable_prefix_caching": construction,
        "rollout.enforce_eager": construction,
        "training.attention_backend": construction,
        "training.compute_dtype": construction,
        "logp.backend": construction,
        "training.sharding": process,
    }
