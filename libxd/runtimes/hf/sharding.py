"""FSDP2: every parameter sharded over the ranks, and gathered before the layer that uses it.

Every rank scores every batch, so what is measured is the sharding, and no other batch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from libxd.errors import Status, XdError

_GATHERED = "_with_parameters"


def shard(model: Any, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard a causal language model in place: a unit a decoder layer, and one of all else (embedding, norm, head).

    Gathered parameters are of `dtype`; gradients, of which there are none here, would be reduced in float32. XdError 69
    for a model whose decoder layers transformers does not name.
    """
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise XdError("does not say which modules are its layers", status=Status.REFUSED, code="unsupported-model",
                      where=type(model).__name__)  # fmt: skip
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    setattr(model, _GATHERED, MethodType(lambda _model, run: run(), model))
    register_fsdp_forward_method(model, _GATHERED)


def gathered(model: Any, run: Callable[[], None]) -> None:
    """Run with the root unit's parameters gathered: base model and head are called one by one, not by the model."""
    if isinstance(model, FSDPModule):
        getattr(model, _GATHERED)(run)
    else:
        run()


def units(model: Any) -> list[FSDPModule]:
    """The live units; none where nothing is sharded."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
