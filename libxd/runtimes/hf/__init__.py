"""Runtime `hf`: transformers, KV-cache decode as rollout, teacher forcing as training; CPU and CUDA."""

from libxd.runtimes.hf.runtime import Hf

RUNTIME = Hf()
