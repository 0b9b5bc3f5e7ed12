"""Recovery from lost ranks, where MPI supports it: Open MPI under `mpiexec --with-ft ulfm`.

User-Level Failure Mitigation (Bland et al., 2013; MPI 5 working group): a call that needs a dead rank raises on its
callers; a rank that gets this error revokes the communicator, so that all others get one too; and the revoked
communicator shrinks to one of the live ranks. Every rank holds the whole model, so the state of one rank with the most
steps is enough to continue: ordinary steps copy nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from clcomm.base.errors import LaunchError
from clcomm.comm.communicator import Communicator
from clcomm.comm.transport import mpi_failures
from clcomm.comm.transport.mpi_communicators import world_ranks
from clcomm.comm.transport.mpi_runtime import process_mpi
from clcomm.comm.watch.job import this_job
from clcomm.sync.model_sync import forget_abandoned

#: Label under which the stats count a recovery's collectives.
RECOVERY = "recovery"


def require_support() -> None:
    """Raise LaunchError if MPI ends the whole job when a rank dies."""
    if not mpi_failures.tolerates_failures():
        raise LaunchError(
            "elastic: expected Open MPI under mpiexec --with-ft ulfm, which goes on when a rank dies; start the job "
            "that way, or let `clcomm run --restarts N -- mpiexec ...` start it again"
        )


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an exception means that another rank has died, or that a survivor has revoked a communicator."""
    return mpi_failures.is_lost_peer(error)


def survivors_of(comm: Communicator) -> Communicator:
    """Return a Communicator of the live ranks, in their old order, and abandon the old one.

    Collective over the survivors. It has the old one's settings and the observers given when that was made; observers
    added later have to be added again. Memory of the old Communicator stays readable until the process ends. This
    process's other Communicators with ranks of the old one are abandoned too: one of them may wait there for a rank
    that has come here.
    """
    old = comm.comm
    for each in [comm, *this_job().communicators.owners_among(() if old is None else world_ranks(old))]:
        each.abandon()
    forget_abandoned()
    old = _origin_of(old)
    while True:
        shrunk = mpi_failures.survivors(old)
        try:
            return Communicator(shrunk, **comm.settings())
        except Exception as error:
            if not is_lost_peer(error):
                raise
            mpi_failures.revoke(shrunk)  # another rank has died meanwhile
            old = shrunk  # as do those that have their Communicator already


def _origin_of(comm: Any) -> Any:
    """Return the communicator that ranks have got from an earlier recovery, if this one is a duplicate of it.

    Shrinking is collective: a rank that lost another while it made its duplicate has the origin alone.
    """
    origin = process_mpi().survivors
    return comm if origin is None or world_ranks(origin) != world_ranks(comm) else origin


def newest(comm: Communicator, step: int) -> int:
    """Return the lowest of the ranks that have completed the most steps; collective."""
    steps = comm.all_gather_object(step, label=RECOVERY)
    return steps.index(max(steps))


def send_arrays(comm: Communicator, arrays: Mapping[str, np.ndarray], root: int) -> dict[str, np.ndarray]:
    """Return root's arrays on every rank, by name; all ranks pass the same names, shapes and dtypes.

    Collective. Text arrays are equal on all ranks and not sent.
    """
    copies = {name: np.array(array) for name, array in arrays.items()}
    for array in copies.values():
        if array.dtype.kind != "U":
            comm.broadcast(array.reshape(-1), root, label=RECOVERY)
    return copies
