"""PyTorch's collectives through clcomm: `torch.distributed.init_process_group("clcomm")` in a script under mpiexec.

Importing this module registers the backend, and sets the environment variables by which `env://` finds rank, world size
and store, where they are not set. Under mpiexec it is also the backend of groups for which none is named.
"""

from __future__ import annotations

from clcomm.errors import needed

with needed("torch"):
    import torch

from clcomm.tensors.arrays import DEVICES
from clcomm.tensors.private_torch import backend_plugins
from clcomm.torch.interruptions import GroupTimeoutError
from clcomm.torch.launch import prepare_environment
from clcomm.torch.memory import communicator, empty, share
from clcomm.torch.process_group import ClcommProcessGroup
from clcomm.torch.regroup import group_of_store

__all__ = ["ClcommProcessGroup", "GroupTimeoutError", "communicator", "empty", "group_of_store", "share"]

if torch.distributed.is_available() and "CLCOMM" not in backend_plugins:
    torch.distributed.Backend.register_backend(
        "clcomm", ClcommProcessGroup.of_options, extended_api=True, devices=list(DEVICES)
    )
    prepare_environment()
