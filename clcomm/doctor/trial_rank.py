"""A rank of the trial: `mpiexec -n 2 python -m clcomm.doctor.trial_rank`; rank 0 prints what MPI says, as JSON."""

from __future__ import annotations

import json

from clcomm.transport import mpi_communicators, mpi_runtime


def main() -> None:
    """Meet the other ranks and make a window with them; collective."""
    world = mpi_runtime.load_mpi().COMM_WORLD
    host = mpi_communicators.host_of(world)
    found = {"size": world.Get_size(), "window": mpi_communicators.shares_memory(host)}
    host.Free()
    if world.Get_rank() == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
