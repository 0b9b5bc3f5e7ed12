"""One small class for each library whose models can be synchronised; none is imported before it is needed."""

from __future__ import annotations

import sys
from typing import Any

from clcomm.errors import ArgumentError
from clcomm.replica import Replica


def replica_of(model: Any) -> Replica:
    """Return the Replica of a model, by the library it comes from; ArgumentError for anything else."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        from clcomm.adapters.torch import TorchReplica

        return TorchReplica(model)
    if hasattr(model, "flat_space"):
        from clcomm.adapters.native import NativeReplica

        return NativeReplica(model)
    if hasattr(model, "as_replica"):
        return model.as_replica()
    netcl = sys.modules.get("netcl.nn")
    if netcl is not None and isinstance(model, netcl.layers.Module):
        from clcomm.adapters.netcl import NetclReplica

        return NetclReplica(model)
    if hasattr(model, "named_parameters"):
        from clcomm.adapters.numpy import NumpyReplica

        return NumpyReplica(model)
    raise ArgumentError(
        f"model: expected a clcomm.engine.Module, a torch.nn.Module, a netcl model or an object with "
        f"named_parameters(), got {type(model).__name__}"
    )
