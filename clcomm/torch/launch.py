"""Rendezvous by `env://` for the ranks of an MPI job: torchrun's variables, from MPI."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from clcomm.errors import LaunchError
from clcomm.host.launcher import OF_TORCH, launched_rank, local_place
from clcomm.host.rank_process import launch_of, rank_above
from clcomm.launch.variables import torch_variables
from clcomm.tensors.private_torch import default_backends, rendezvous_handlers
from clcomm.transport import mpi_communicators, mpi_runtime
from clcomm.transport.mpi_runtime import Intracomm

_INSTEAD = "start it with `clcomm run -n N script.py` or `mpiexec -n N python script.py`"
_ENV = "env"


def prepare_environment() -> None:
    """Set torchrun's variables that the launcher names, where they are not set, and let `env://` set the others.

    Under mpiexec "clcomm" becomes the CPU's default backend, so that groups that are made without a backend's name, as
    by `init_device_mesh`, are its own. Variables of the user's own stay, and so do torchrun's, where MPI has one rank.
    """
    if not is_torchrun():
        size = mpi_runtime.launched_ranks()
        if size > 1:
            default_backends["cpu"] = "clcomm"
        if size > 1 or launched_rank() is None:
            is_left_over = os.environ.get("WORLD_SIZE", str(size)) != str(size)  # from another job, for all ranks alike
            for name, value in zip(OF_TORCH, (launched_rank() or 0, size, *local_place()), strict=False):
                if is_left_over or name not in os.environ:
                    os.environ[name] = str(value)
    inherited = {name: os.environ.get(name) for name in OF_TORCH}
    original: Callable[..., Any] = rendezvous_handlers[_ENV]

    def rendezvous(*arguments: Any, **options: Any) -> Any:
        _complete_environment(inherited)
        return original(*arguments, **options)

    rendezvous_handlers[_ENV] = rendezvous


def _complete_environment(inherited: dict[str, str | None]) -> None:
    """Set what is missing, by MPI; collective under mpiexec.

    inherited: the variables that this process had at first: where a rank has started it, and it has set no others since
    for a group of its own, LaunchError is raised.
    """
    is_own = any(os.environ.get(name) != value for name, value in inherited.items())
    if mpi_runtime.processes_without_mpi() == 1 and not (rank_above() and is_own) and not is_torchrun():
        from clcomm.job.exits import hook_job  # here, as an import needs none of these
        from clcomm.job.startup_watchdog import StartWatch
        from clcomm.job.time_limits import Limits

        hook_job()  # an error is one line
        with StartWatch(Limits.of(10.0, 300.0)):
            variables = torch_variables(_world())
        for name, value in variables.items():
            os.environ.setdefault(name, value)


def _world() -> Intracomm | None:
    try:
        return mpi_runtime.world()
    except ImportError:  # no MPI: a world of one
        return None


def own_place() -> tuple[str, str, int]:
    """Return this host, what this launch is known by on it, and this rank's number."""
    if is_torchrun():
        raise LaunchError(f"torchrun: expected ranks of MPI for backend 'clcomm', got torchrun's; {_INSTEAD}")
    world = _world()
    return socket.gethostname(), launch_of(os.getpid()), 0 if world is None else world.Get_rank()


def is_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and mpi_runtime.launched_ranks() == 1


def require_same_world(rank: int, size: int) -> None:
    """Raise LaunchError unless PyTorch's rank and world size, -1 for not given, are MPI's."""
    if is_torchrun():
        raise LaunchError(f"torchrun: expected ranks of MPI for backend 'clcomm', got torchrun's; {_INSTEAD}")
    place = mpi_communicators.place_of(_world())
    if (rank, size) != (place.rank, place.size):
        raise LaunchError(
            f"init_process_group: expected MPI's rank {place.rank} of {place.size}, got rank {rank} of {size} from its "
            f"arguments or RANK and WORLD_SIZE; leave them out, and {_INSTEAD}"
        )
