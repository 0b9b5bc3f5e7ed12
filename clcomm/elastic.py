"""Going on without ranks that died, where MPI can: Open MPI under `mpiexec --with-ft ulfm`.

User-Level Failure Mitigation (Bland et al., 2013; MPI 5 working group): a call that needs a dead rank raises on those
that make it; whoever learns of the death revokes the communicator, so that all others learn of it too; and what is
left of it shrinks to a communicator of the living. Every rank holds the whole model, so what one rank that is ahead
knows is enough to go on from: nothing is copied in ordinary steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clcomm.communicator import Communicator
from clcomm.errors import LaunchError
from clcomm.transport import mpi

#: Label under which the stats count what a recovery moves.
RECOVERY = "recovery"


def require_support() -> None:
    """Raise LaunchError where MPI ends the whole job with the first rank that dies."""
    if not mpi.tolerates_failures():
        raise LaunchError(
            "elastic: expected Open MPI under mpiexec --with-ft ulfm, which goes on when a rank dies; start the job "
            "that way, or let `clcomm run --restarts N -- mpiexec ...` start it again"
        )


def is_lost_peer(error: BaseException) -> bool:
    """Say whether an exception means that another rank died, or that a survivor has told this one so."""
    return mpi.is_lost_peer(error)


def survivors_of(comm: Communicator) -> Communicator:
    """Return a Communicator of the ranks that still live, in their old order, and give the old one up.

    Collective over the survivors. Memory of the old Communicator stays readable: it is freed by the process's end.
    """
    old = comm.comm
    comm.abandon()
    while True:
        shrunk = mpi.survivors(old)
        try:
            return Communicator(
                shrunk, bucket_size=comm.bucket_size, use_bucketing=comm.use_bucketing, transport=comm.transport,
                stall_warning_s=comm.limits.stall_warning_s, timeout_s=comm.limits.timeout_s,
            )  # fmt: skip
        except Exception as error:
            if not is_lost_peer(error):
                raise
            mpi.revoke(shrunk)  # one more died meanwhile


def newest(comm: Communicator, step: int) -> int:
    """Return the lowest of the ranks that have completed the most steps; collective."""
    steps = comm.all_gather_object(step, label=RECOVERY)
    return steps.index(max(steps))


def send_arrays(comm: Communicator, arrays: Mapping[str, np.ndarray], root: int) -> dict[str, np.ndarray]:
    """Return root's arrays on every rank, by name; each brings its own, of the same names, shapes and dtypes.

    Collective. Texts are alike on all ranks and stay what they are.
    """
    copies = {name: np.array(array) for name, array in arrays.items()}
    for array in copies.values():
        if array.dtype.kind != "U":
            comm.broadcast(array.reshape(-1), root, label=RECOVERY)
    return copies
