"""Rendezvous by `env://` for the ranks of an MPI job: torchrun's variables, from MPI."""

from __future__ import annotations

import os
import uuid

from clcomm.errors import LaunchError
from clcomm.launch.variables import torch_variables
from clcomm.tensors.private_torch import default_backends
from clcomm.transport import mpi_communicators, mpi_runtime

_launch = ""
_INSTEAD = "start it with `clcomm run -n N script.py` or `mpiexec -n N python script.py`"


def prepare_environment() -> None:
    """Set torchrun's variables where they are not set, and under mpiexec make "clcomm" the CPU's default backend.

    So groups that are made without a backend's name, as by `init_device_mesh`, are its own. Collective under mpiexec.
    Variables of the user's own stay, and so do torchrun's, where MPI has one rank.
    """
    if is_torchrun():
        return
    if mpi_runtime.launched_ranks() > 1:
        default_backends["cpu"] = "clcomm"
    try:
        world = mpi_runtime.world()
    except ImportError:  # no MPI: a world of one
        world = None
    for name, value in torch_variables(world).items():
        os.environ.setdefault(name, value)
    global _launch
    _launch = mpi_communicators.from_first(world, lambda: uuid.uuid4().hex)


def own_place() -> tuple[str, int]:
    """Return what this launch is known by, the same on all of its ranks and no other's, and this rank's number."""
    if is_torchrun():
        raise LaunchError(f"torchrun: expected ranks of MPI for backend 'clcomm', got torchrun's; {_INSTEAD}")
    try:
        return _launch, mpi_runtime.world().Get_rank()
    except ImportError:
        return _launch, 0


def is_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and mpi_runtime.launched_ranks() == 1


def require_same_world(rank: int, size: int) -> None:
    """Raise LaunchError unless PyTorch's rank and world size, -1 for not given, are MPI's."""
    if is_torchrun():
        raise LaunchError(f"torchrun: expected ranks of MPI for backend 'clcomm', got torchrun's; {_INSTEAD}")
    try:
        place = mpi_communicators.place_of(mpi_runtime.world())
    except ImportError:
        place = mpi_communicators.place_of(None)
    if (rank, size) != (place.rank, place.size):
        raise LaunchError(
            f"init_process_group: expected MPI's rank {place.rank} of {place.size}, got rank {rank} of {size} from its "
            f"arguments or RANK and WORLD_SIZE; leave them out, and {_INSTEAD}"
        )
