"""What a launcher tells a process in its environment, which is there before MPI runs."""

from __future__ import annotations

import os

#: The variables with a process's rank: of MPICH, Open MPI, PMIx, MVAPICH2, Cray PALS, and of Slurm without MPI.
RANK_VARIABLES = (
    "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "SLURM_PROCID",
)  # fmt: skip


def launched_rank() -> int | None:
    """Return this process's rank; None if no launcher names one."""
    values = (os.environ.get(name, "") for name in RANK_VARIABLES)
    return next((int(value) for value in values if value.isdigit()), None)


def launched_rank_in_words() -> str:
    """Return this process's rank for messages; "?" if no launcher names one."""
    rank = launched_rank()
    return "?" if rank is None else str(rank)
