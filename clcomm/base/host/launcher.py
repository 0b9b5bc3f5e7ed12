"""What a launcher tells a process in its environment, which is there before MPI runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

#: The variables with a process's rank: of MPICH, Open MPI, PMIx, MVAPICH2, Cray PALS, and of Slurm without MPI.
RANK_VARIABLES = (
    "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "SLURM_PROCID",
)  # fmt: skip
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE", "PALS_SIZE")
_LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
#: Identifies a job among those of one Open MPI daemon.
JOB_VARIABLE = "PMIX_NAMESPACE"
#: torchrun's variables, which clcomm sets in ranks.
OF_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: What `clcomm run` tells the ranks of a job, besides the folder by which it finds all that they start.
OF_RUN = ("CLCOMM_MEMORY", "CLCOMM_PROGRESS", "CLCOMM_RESTART")
#: What a rank's job has in its environment besides: beginnings of launchers' variables, and those of `clcomm run`.
_OF_JOB = (
    "PMI_", "PMIX_", "MPI_LOCAL", "OMPI_", "PRTE_", "HYDI_", "PALS_", "MV2_COMM_WORLD_",
    "CLCOMM_RANK_PROCESS", "CLCOMM_JOB_FOLDER", *OF_RUN,
)  # fmt: skip
#: Parts of the names of launchers' variables that a user sets.
_OF_USER = ("_MCA_", "_ALLOW_RUN_AS_ROOT")


def launched_rank() -> int | None:
    """Return this process's rank, or that of the rank that started it; None if no launcher names one."""
    return next(numbers_of(RANK_VARIABLES), None)


def without_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what a job has told its ranks, for processes that do not belong to it."""
    return {name: value for name, value in environment.items() if not _is_of_job(name)}


def _is_of_job(name: str) -> bool:
    if name in (*RANK_VARIABLES, *OF_TORCH):
        return True
    return name.startswith(_OF_JOB) and not any(part in name for part in _OF_USER)


def local_place(local_rank: int | None = None, local_size: int | None = None) -> tuple[int, int]:
    """Return this process's (rank, count) among the job's processes on its host, from the launcher's variables."""
    rank = next(numbers_of(_LOCAL_RANKS), 0) if local_rank is None else local_rank
    size = next(numbers_of(_LOCAL_SIZES), 1) if local_size is None else local_size
    return rank, max(size, rank + 1)


def numbers_of(names: tuple[str, ...]) -> Iterator[int]:
    """Yield the numbers that variables of these names have, in their order."""
    values = (os.environ.get(name, "") for name in names)
    return (int(value) for value in values if value.isdigit())


def launched_rank_in_words() -> str:
    """Return this process's rank for messages; "?" if no launcher names one."""
    rank = launched_rank()
    return "?" if rank is None else str(rank)
