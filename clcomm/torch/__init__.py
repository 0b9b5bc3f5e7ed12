"""PyTorch's collectives through clcomm: `torch.distributed.init_process_group("clcomm")` in a script under mpiexec.

Importing this module registers the backend, and sets RANK, WORLD_SIZE and their local equals from the launcher's
variables, where they are not set. Under mpiexec it is also the backend of groups for which none is named. MPI starts
with the first group: `env://` then finds the store by MASTER_ADDR and MASTER_PORT, which MPI's ranks agree on.
"""

from __future__ import annotations

from clcomm.base.errors import needed

with needed("torch"):
    import torch

from clcomm.comm.tensors.arrays import DEVICES
from clcomm.comm.tensors.private_torch import backend_plugins
from clcomm.torch.interruptions import GroupTimeoutError
from clcomm.torch.launch import prepare_environment
from clcomm.torch.memory import communicator, empty, group_of_store, share
from clcomm.torch.process_group import ClcommProcessGroup

__all__ = ["ClcommProcessGroup", "GroupTimeoutError", "communicator", "empty", "group_of_store", "share"]

if torch.distributed.is_available() and "CLCOMM" not in backend_plugins:
    torch.distributed.Backend.register_backend(
        "clcomm", ClcommProcessGroup.of_options, extended_api=True, devices=list(DEVICES)
    )
    prepare_environment()
