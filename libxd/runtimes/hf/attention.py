"""Attention as transformers calls it: counted where it runs, and masks that are always written out.

Shapes: M rows, L columns fed, S columns of the cache.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

#: where an implementation of transformers' attention interface takes its mask
_MASK_ARGUMENT = 4
_SOFTMAX = (torch.softmax, torch.special.softmax, torch.Tensor.softmax, torch.nn.functional.softmax)


class AttentionCalls:
    """Which attention really ran, a call a layer and forward, and how many of its calls were given a mask.

    Implementations of transformers' attention interface are counted as they are called. The eager one is not in it: it
    shows by the softmax over [M, heads, L, S] that no other one writes out.
    """

    def __init__(self) -> None:
        self.by_name: Counter[str] = Counter()
        self.masked: Counter[str] = Counter()

    @property
    def names(self) -> list[str]:
        return sorted(self.by_name)

    def evidence(self) -> dict[str, dict[str, int]]:
        """{"calls", "masked"}, each by name; for the eager one a mask cannot be seen."""
        return {"calls": dict(self.by_name), "masked": dict(self.masked)}

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what runs meanwhile; transformers is left as it was."""
        with _replaced(ALL_ATTENTION_FUNCTIONS) as local, _SoftmaxCounter(self.by_name):
            for name in ALL_ATTENTION_FUNCTIONS.valid_keys():
                local[name] = self._counted(name, ALL_ATTENTION_FUNCTIONS[name])
            yield

    def _counted(self, name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            mask = arguments[_MASK_ARGUMENT] if len(arguments) > _MASK_ARGUMENT else options.get("attention_mask")
            self.by_name[name] += 1
            self.masked[name] += mask is not None
            return function(*arguments, **options)

        return call


@contextlib.contextmanager
def explicit_masks() -> Iterator[None]:
    """Have sdpa given a mask in every forward meanwhile.

    Left alone, transformers gives none to an eager forward without padding, and then other kernels run. Whether there
    is padding depends on a row's neighbours, and a compiled forward always gets a mask: without this rule batch size,
    prefix caching and the compiled path would each change that, too.
    """
    with _replaced(ALL_MASK_ATTENTION_FUNCTIONS) as local:
        local["sdpa"] = _written_out
        yield


@contextlib.contextmanager
def replaced_attention(name: str, function: Any) -> Iterator[None]:
    """Have transformers find an attention by this name meanwhile, and give it a mask in every forward."""
    # a mask is made for names alone that are registered for good
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, _written_out)
    with _replaced(ALL_ATTENTION_FUNCTIONS) as local:
        local[name] = function
        yield


def _written_out(**options: Any) -> torch.Tensor | None:
    return sdpa_mask(**{**options, "allow_is_causal_skip": False})


@contextlib.contextmanager
def _replaced(interface: Any) -> Iterator[dict[str, Any]]:
    """The entries of one of transformers' registries that stand before the global ones; afterwards as they were."""
    local = interface._local_mapping
    before = dict(local)
    try:
        yield local
    finally:
        local.clear()
        local.update(before)


class _SoftmaxCounter(TorchFunctionMode):
    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _SOFTMAX and (args[0] if args else kwargs["input"]).dim() == 4:
            self._calls["eager"] += 1
        return function(*args, **kwargs)
