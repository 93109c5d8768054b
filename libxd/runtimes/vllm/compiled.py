"""Whether vLLM's forwards ran compiled: layers called one by one, and graphs that ran, counted.

A compiled model calls no module: hooks on its layers, set when it has been compiled, do not run. Its graphs do, or the
CUDA graphs that were captured of them. What vLLM compiles whatever it is asked for, the masking of ids in an embedding
that is split over ranks, runs inside a module that is called, and counts for neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._inductor.output_code import CompiledFxGraph
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


class Runs:
    """`layers`: calls of the model's first decoder layer; `graphs`: calls of inductor's graphs, `replays` of CUDA's."""

    def __init__(self) -> None:
        self.layers = 0
        self.graphs = 0
        self.replays = 0
        self._embedding = False

    @contextlib.contextmanager
    def counting(self, model: Any) -> Iterator[None]:
        """Count what runs meanwhile."""
        call, replay = CompiledFxGraph.__call__, torch.cuda.CUDAGraph.replay

        def counted(graph: CompiledFxGraph, *arguments: Any, **given: Any) -> Any:
            self.graphs += not self._embedding
            return call(graph, *arguments, **given)

        def replayed(graph: torch.cuda.CUDAGraph) -> None:
            self.replays += 1
            replay(graph)

        with contextlib.ExitStack() as stack:
            stack.callback(_first_layer(model).register_forward_pre_hook(self._layer).remove)
            for module in model.modules():
                if isinstance(module, VocabParallelEmbedding):
                    stack.callback(module.register_forward_pre_hook(self._embed).remove)
                    stack.callback(module.register_forward_hook(self._embedded).remove)
            stack.enter_context(mock.patch.object(CompiledFxGraph, "__call__", counted))
            stack.enter_context(mock.patch.object(torch.cuda.CUDAGraph, "replay", replayed))
            yield

    def _layer(self, *_: Any) -> None:
        self.layers += 1

    def _embed(self, *_: Any) -> None:
        self._embedding = True

    def _embedded(self, *_: Any) -> None:
        self._embedding = False

    def eager(self, forwards: int) -> bool | None:
        """Whether all forwards went module by module; None when it cannot be said of all alike."""
        ran = self.graphs + self.replays
        if self.layers == forwards and not ran:
            return True
        return False if not self.layers and ran >= forwards else None


def _first_layer(model: Any) -> nn.Module:
    return next(module[0] for module in model.modules() if isinstance(module, nn.ModuleList) and len(module))
