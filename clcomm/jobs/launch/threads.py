"""The number of threads of a rank's numeric libraries."""

from __future__ import annotations

import os

from clcomm.base.host import usable_cores

#: Launchers' variables for the number of ranks on this host, before MPI runs.
_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


def share_cores() -> None:
    """Limit this rank's threads to its share of the host's cores, unless OMP_NUM_THREADS is set.

    Call it before NumPy is loaded: its BLAS starts a thread for each core, and each of these polls for a while.
    """
    ranks = next((int(os.environ[name]) for name in _LOCAL_SIZES if os.environ.get(name, "").isdigit()), 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(usable_cores()) // max(1, ranks))))
