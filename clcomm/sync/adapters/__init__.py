"""Adapters, one for each library with models to synchronise, imported at first use."""

from __future__ import annotations

import sys

from clcomm.base.errors import ArgumentError
from clcomm.sync.adapters.adapter import ModelAdapter


def adapter_of(model: object) -> ModelAdapter:
    """Return the ModelAdapter for a model's library; ArgumentError for an object of an unknown library."""
    if isinstance(model, type):
        raise ArgumentError(f"model: expected a model, got the class {model.__name__}; make one: {model.__name__}(...)")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        from clcomm.sync.adapters.torch import TorchAdapter

        return TorchAdapter(model)
    if hasattr(model, "flat_space"):
        from clcomm.sync.adapters.native import NativeAdapter

        return NativeAdapter(model)
    if hasattr(model, "as_adapter"):
        adapter: ModelAdapter = model.as_adapter()
        return adapter
    netcl = sys.modules.get("netcl.nn")
    if netcl is not None and isinstance(model, netcl.layers.Module):
        from clcomm.sync.adapters.netcl import NetclAdapter

        return NetclAdapter(model)
    if hasattr(model, "named_parameters"):
        from clcomm.sync.adapters.numpy import NumpyAdapter

        return NumpyAdapter(model)
    if "tinygrad" in sys.modules:
        from clcomm.sync.adapters.tinygrad import TinygradAdapter, tensors_of

        if tensors_of(model):
            return TinygradAdapter(model)
    raise ArgumentError(
        f"model: expected a clcomm.engine.Module, a torch.nn.Module, a netcl or tinygrad model, a clcomm.jax.Model or "
        f"an object with named_parameters(), got {type(model).__name__}"
    )
