"""The environment variables of torchrun's scripts, from MPI, and each rank's share of the cores as threads."""

from __future__ import annotations

import os
import socket

from clcomm.base.host import usable_cores
from clcomm.base.host.launcher import OF_TORCH
from clcomm.comm.transport import mpi_communicators
from clcomm.comm.transport.mpi_runtime import Intracomm


def torch_variables(world: Intracomm | None) -> dict[str, str]:
    """Return the variables of this rank; collective.

    MASTER_ADDR and MASTER_PORT are rank 0's host, and a port that is free on it now.

    Args:
        world: an mpi4py communicator; None: a world of one.
    """
    place = mpi_communicators.place_of(world)
    address = mpi_communicators.from_first(world, lambda: _address(place.hosts))
    values = place.rank, place.size, place.local_rank, place.local_size, *address
    return {name: str(value) for name, value in zip(OF_TORCH, values, strict=True)}


def _address(hosts: int) -> tuple[str, int]:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = listener.getsockname()[1]
    return ("127.0.0.1" if hosts == 1 else socket.gethostname()), port


# --- The number of threads of a rank's numeric libraries. ---

#: Launchers' variables for the number of ranks on this host, before MPI runs.
_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


def share_cores() -> None:
    """Limit this rank's threads to its share of the host's cores, unless OMP_NUM_THREADS is set.

    Call it before NumPy is loaded: its BLAS starts a thread for each core, and each of these polls for a while.
    """
    ranks = next((int(os.environ[name]) for name in _LOCAL_SIZES if os.environ.get(name, "").isdigit()), 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(usable_cores()) // max(1, ranks))))
