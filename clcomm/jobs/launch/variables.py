"""The environment variables of torchrun's scripts, from MPI."""

from __future__ import annotations

import socket

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
