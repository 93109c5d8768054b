"""torch.compile, with evidence: how many graphs were compiled and how often they really ran.

Kernels are chosen by the sizes that a graph is first compiled for. So that a scoring's numbers depend on no scoring
before it, graphs live as long as one scoring, and none is taken from inductor's cache on disk, whose key leaves the
sizes out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported

from libxd.errors import Status, XdError


@contextlib.contextmanager
def nothing_stored() -> Iterator[None]:
    """Compile meanwhile without the caches on disk."""
    with (
        torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
    ):
        yield


class Compiled:
    """A module behind torch.compile: whole forwards, one graph each, or a refusal.

    `graphs` were compiled and `runs` of them made since `forget`.
    """

    def __init__(self, module: Any) -> None:
        self.graphs = 0
        self.runs = 0
        # dynamic: one graph serves every row count and cache length, as a serving engine's would. fullgraph: a break
        # would leave a part to the interpreter, and so would the limit on recompilations: both are errors then
        self.module = torch.compile(module, backend=self._compile, dynamic=True, fullgraph=True)

    def forget(self) -> None:
        """Give all graphs back and count anew."""
        if self.graphs:
            # those of all engines of a process count against one limit
            torch.compiler.reset()
        self.graphs = self.runs = 0

    def _compile(self, graph: Any, inputs: list[Any], **options: Any) -> Any:
        with nothing_stored():
            compiled = lookup_backend("inductor")(graph, inputs, **options)
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            self.runs += 1
            return compiled(*arguments)

        return run


def cannot_compile(error: Unsupported | FailOnRecompileLimitHit, model: str) -> XdError:
    """The refusal, 69, with the first line of torch's reason."""
    return XdError(f"a decoding step is not one graph: {str(error).strip().splitlines()[0]}", status=Status.REFUSED,
                   code="cannot-compile", where=model)  # fmt: skip
