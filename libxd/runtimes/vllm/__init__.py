"""Runtime `vllm`: the frozen tokens through vLLM's own scheduler, decode loop, cache and attention, as rollout."""

from libxd.runtimes.vllm.runtime import Vllm

RUNTIME = Vllm()
