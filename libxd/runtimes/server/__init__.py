"""Runtime `server`: the frozen tokens' prompt logprobs from a running OpenAI-compatible server, as rollout."""

from libxd.runtimes.server.runtime import Server

RUNTIME = Server()
