"""torch.compile, with evidence: how many graphs were compiled and how often they really ran."""

from __future__ import annotations

from typing import Any

from torch._dynamo.backends.registry import lookup_backend


class CountingBackend:
    """Inductor behind a counter. `graphs` over the engine's life, `runs` since the last scoring began."""

    def __init__(self) -> None:
        self.graphs = 0
        self.runs = 0

    def __call__(self, graph: Any, inputs: list[Any], **options: Any) -> Any:
        compiled = lookup_backend("inductor")(graph, inputs, **options)
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            self.runs += 1
            return compiled(*arguments)

        return run
