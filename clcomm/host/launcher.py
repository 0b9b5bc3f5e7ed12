"""What a launcher tells a process in its environment, which is there before MPI runs."""

from __future__ import annotations

import os

#: The variables with a process's rank: of MPICH, Open MPI, PMIx, MVAPICH2, Cray PALS, and of Slurm without MPI.
RANK_VARIABLES = (
    "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "SLURM_PROCID",
)  # fmt: skip
_LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


def launched_rank() -> int | None:
    """Return this process's rank; None if no launcher names one."""
    values = (os.environ.get(name, "") for name in RANK_VARIABLES)
    return next((int(value) for value in values if value.isdigit()), None)


def launched_ranks() -> int:
    """Return the number of ranks according to the launcher's environment variables; 1 without them."""
    names = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE", "PALS_SIZE")
    values = [os.environ.get(name, "") for name in names]
    return max([int(value) for value in values if value.isdigit()], default=1)


def local_place(local_rank: int | None = None, local_size: int | None = None) -> tuple[int, int]:
    """Return this process's (rank, count) among the job's processes on its host, from the launcher's variables."""
    rank = _first_integer(_LOCAL_RANKS, 0) if local_rank is None else local_rank
    size = _first_integer(_LOCAL_SIZES, 1) if local_size is None else local_size
    return rank, max(size, rank + 1)


def _first_integer(names: tuple[str, ...], otherwise: int) -> int:
    for name in names:
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return otherwise


def launched_rank_in_words() -> str:
    """Return this process's rank for messages; "?" if no launcher names one."""
    rank = launched_rank()
    return "?" if rank is None else str(rank)
