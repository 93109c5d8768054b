"""Mistakes that no read-back shows: hf with one thing computed otherwise inside its model.

What goes into the model, the parameters it holds and the operator it calls are as the case says, and are shown so: a
forward hook puts the mistake where nobody looks. Only the numbers tell, and of them only those that do not shrink with
the unit roundoff. Each function takes an open hf engine of either side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def temperature(engine: Any, value: float = 0.99) -> None:
    """Logits divided by a temperature where the semantics are raw."""
    _output(engine.head, lambda logits: logits / value)


def weight(engine: Any) -> None:
    """One matrix of the middle layer larger by a thousandth."""
    layers = engine.base.layers
    _multiplies_with(layers[len(layers) // 2].mlp.down_proj, lambda held: held * 1.001)


def stale_weights(engine: Any) -> None:
    """Every matrix a step of 1e-6 an element behind: an optimizer's first step at a small learning rate."""
    for number, module in enumerate(m for m in engine.base.modules() if isinstance(m, nn.Linear)):
        draw = torch.Generator().manual_seed(number)
        sign = torch.randint(0, 2, module.weight.shape, generator=draw, dtype=torch.int8) * 2 - 1
        _multiplies_with(module, lambda held, sign=sign: held + 1e-6 * sign)


def positions_shifted(engine: Any) -> None:
    """From the sixteenth token on, each stands one place later than it does."""

    def shifted(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "position_ids": kwargs["position_ids"] + (kwargs["position_ids"] >= 16)}

    engine.base.rotary_emb.register_forward_pre_hook(shifted, with_kwargs=True)


def all_positions_shifted(engine: Any) -> None:
    """Every token one place later: no mistake, for rotary attention knows distances alone."""

    def shifted(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "position_ids": kwargs["position_ids"] + 1}

    engine.base.rotary_emb.register_forward_pre_hook(shifted, with_kwargs=True)


def attention_unscaled(engine: Any) -> None:
    """Scores of the attention not divided by the root of the head's width."""
    for layer in engine.base.layers:
        layer.self_attn.scaling = 1.0


def padded_vocabulary(engine: Any) -> None:
    """The sum over the vocabulary runs over padding, whose logits are zero, too."""
    _output(engine.head, lambda logits: torch.cat([logits, logits.new_zeros(logits.shape[0], 16384)], dim=1))


def label_shift(engine: Any) -> None:
    """Each token's logprob is read where the token before it should be."""
    _input(engine.head, lambda hidden: hidden.roll(1, 0))


def top_p(engine: Any) -> None:
    """Renormalised over the likeliest tokens of 95 percent, where the semantics are raw."""

    def nucleus(logits: Tensor) -> Tensor:
        ordered, order = logits.float().softmax(-1).sort(dim=-1, descending=True)
        outside = torch.zeros_like(logits, dtype=torch.bool)
        outside.scatter_(1, order, ordered.cumsum(-1) - ordered > 0.95)
        return torch.where(outside, logits - 20, logits)

    _output(engine.head, nucleus)


def half_cache(engine: Any) -> None:
    """Keys and values go through float16, whatever the dtype."""
    for layer in engine.base.layers:
        for module in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            _output(module, lambda out: out.half().to(out.dtype))


def norm_epsilon(engine: Any) -> None:
    """Norms add a tenth of the epsilon that the config names."""
    for module in engine.base.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon *= 0.1


def rotary_bfloat16(engine: Any) -> None:
    """Cosine and sine of positions go through bfloat16, whatever the dtype."""
    _output(engine.base.rotary_emb, lambda pair: tuple(each.bfloat16().to(each.dtype) for each in pair))


def logits_bfloat16(engine: Any) -> None:
    """Logits go through bfloat16, whatever the dtype."""
    _output(engine.head, lambda logits: logits.bfloat16().to(logits.dtype))


def other_id(engine: Any) -> None:
    """The embedding looks another token up for the fourth one of each prompt."""

    def looked_up(ids: Tensor) -> Tensor:
        if ids.shape[1] > 4:
            ids = ids.clone()
            ids[:, 3] ^= 1
        return ids

    _input(engine.base.embed_tokens, looked_up)


def one_token(engine: Any) -> None:
    """A single logprob of a scoring is of logits that are a hundredth larger."""
    spoilt: list[bool] = []

    def first(logits: Tensor) -> Tensor:
        if spoilt:
            return logits
        spoilt.append(True)
        return torch.cat([logits[:1] * 1.01, logits[1:]])

    _output(engine.head, first)


def _output(module: nn.Module, change: Callable[[Any], Any]) -> None:
    module.register_forward_hook(lambda _module, _inputs, out: change(out))


def _input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    module.register_forward_pre_hook(lambda _module, inputs: (change(inputs[0]), *inputs[1:]))


def _multiplies_with(module: nn.Linear, changed: Callable[[Tensor], Tensor]) -> None:
    """A linear layer that holds its weight and computes with another one, cast to the dtype once."""
    other: list[Tensor] = []

    def forward(states: Tensor) -> Tensor:
        if not other:
            other.append(changed(module.weight.float()).to(module.weight.dtype))
        return nn.functional.linear(states, other[0], module.bias)

    module.forward = forward
