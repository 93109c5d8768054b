"""Runtime `llamacpp`: the frozen tokens through llama.cpp's server, a token a request, as rollout."""

from xd_runtime_llamacpp.runtime import LlamaCpp

RUNTIME = LlamaCpp()
