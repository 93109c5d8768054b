"""Whether vLLM's forwards ran compiled: layers called one by one, and graphs that ran, counted.

A compiled model calls no module: hooks on its layers, set when it has been compiled, do not run. Its graphs do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import nn
from torch._inductor.output_code import CompiledFxGraph


class Runs:
    """`layers`: calls of the model's first decoder layer; `graphs`: calls of inductor's graphs."""

    def __init__(self) -> None:
        self.layers = 0
        self.graphs = 0

    @contextlib.contextmanager
    def counting(self, model: Any) -> Iterator[None]:
        """Count what runs meanwhile."""
        call = CompiledFxGraph.__call__

        def counted(graph: CompiledFxGraph, *arguments: Any, **given: Any) -> Any:
            self.graphs += 1
            return call(graph, *arguments, **given)

        hook = _first_layer(model).register_forward_pre_hook(self._layer)
        try:
            with mock.patch.object(CompiledFxGraph, "__call__", counted):
                yield
        finally:
            hook.remove()

    def _layer(self, *_: Any) -> None:
        self.layers += 1

    def eager(self, forwards: int) -> bool | None:
        """Whether all forwards went module by module; None when it cannot be said of all alike."""
        if self.layers == forwards and not self.graphs:
            return True
        return False if not self.layers and self.graphs >= forwards else None


def _first_layer(model: Any) -> nn.Module:
    return next(module[0] for module in model.modules() if isinstance(module, nn.ModuleList) and len(module))
