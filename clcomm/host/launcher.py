"""What a launcher tells a process in its environment, before MPI runs, and which process it tells it.

What a rank starts inherits its variables, and is no rank: MPI would take it for the rank, and end the job with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache

#: The variables with a process's rank: of MPICH, Open MPI, PMIx, MVAPICH2, Cray PALS, and of Slurm without MPI.
RANK_VARIABLES = (
    "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "SLURM_PROCID",
)  # fmt: skip
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE", "PALS_SIZE")
_LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
#: Identifies a job among those of one Open MPI daemon.
JOB_VARIABLE = "PMIX_NAMESPACE"
#: torchrun's variables, which clcomm sets in ranks.
OF_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Set by a rank for what it starts: its process, that one's start time, and what the launcher told it.
RANK_PROCESS = "CLCOMM_RANK_PROCESS"
#: What a rank's job has in its environment besides: beginnings of launchers' variables, and those of `clcomm run`.
_OF_JOB = (
    "PMI_", "PMIX_", "MPI_LOCAL", "OMPI_", "PRTE_", "HYDI_", "PALS_", "MV2_COMM_WORLD_", RANK_PROCESS,
    "CLCOMM_MEMORY", "CLCOMM_PROGRESS", "CLCOMM_RESTART",
)  # fmt: skip
#: Parts of the names of launchers' variables that a user sets.
_OF_USER = ("_MCA_", "_ALLOW_RUN_AS_ROOT")
#: Launchers' executables: those of MPICH, Open MPI and Slurm.
LAUNCHERS = (
    "hydra_pmi_proxy", "pmi_proxy", "prted", "prterun", "orted", "orterun", "mpirun", "mpiexec", "mpiexec.hydra",
    "mpiexec.gforker", "slurmstepd",
)  # fmt: skip


def launched_rank() -> int | None:
    """Return this process's rank, or that of the rank that started it; None if no launcher names one."""
    return next(_numbers(RANK_VARIABLES), None)


def launched_ranks() -> int:
    """Return the number of ranks according to the launcher's environment variables; 1 in what is no rank."""
    return 1 if rank_above() else max(_numbers(_SIZES), default=1)


def rank_above() -> int:
    """Return the rank's process that has started this one, directly or not; 0: this one is a rank, or none has."""
    return 0 if launched_rank() is None else _rank_above(os.getpid(), _told())


@cache  # for each process that is forked
def _rank_above(pid: int, told: str) -> int:
    """Return what `rank_above` does, and mark a rank, once, for what it starts."""
    from clcomm.host import variables  # here, as it imports this module

    between, launcher = ancestors(pid)
    own = f"{pid}@{start_time(pid)}"
    marked, _, then = variables.text(RANK_PROCESS).partition(" ")
    if (between or not launcher) and marked not in ("", own) and then == told:
        rank = int(marked.partition("@")[0])
        if rank in between or not launcher:
            return rank
    if launcher and marked != own and (programs := list(filter(_may_use_mpi, between))):
        return programs[-1]  # a rank that has not imported clcomm; others are shells that started one
    os.environ[RANK_PROCESS] = f"{own} {told}"
    return 0


def _told() -> str:
    return "/".join(os.environ.get(name, "") for name in (*RANK_VARIABLES, *_SIZES, JOB_VARIABLE, "SLURM_STEP_ID"))


def _may_use_mpi(pid: int) -> bool:
    """Return whether a process runs this Python, or has loaded an MPI library."""
    with suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        return os.path.samefile(f"/proc/{pid}/exe", "/proc/self/exe") or b"/libmpi" in file.read()
    return False


def without_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what a job has told its ranks, for processes that do not belong to it."""
    return {name: value for name, value in environment.items() if not _is_of_job(name)}


def _is_of_job(name: str) -> bool:
    if name in (*RANK_VARIABLES, *OF_TORCH):
        return True
    return name.startswith(_OF_JOB) and not any(part in name for part in _OF_USER)


# --- processes ---


def ancestors(pid: int) -> tuple[list[int], int]:
    """Return the processes between a process and its launcher, the nearest first, and the launcher; 0: there is none.

    The last of them, or the process itself, is the launcher's child: the rank, if only a shell that started it.
    """
    between: list[int] = []
    while (pid := _parent(pid)) > 0:
        if _is_launcher(pid):
            return between, pid
        between.append(pid)
    return between, 0


def launch_of(pid: int) -> str:
    """Return what a process's launch is known by on this host, by no other process; "" without a known launcher."""
    job, launcher = os.environ.get(JOB_VARIABLE, ""), ancestors(pid)[1]
    return job or (f"{launcher}@{start_time(launcher)}" if launcher else "")


def start_time(pid: int) -> int:
    """Return when a process started, in the kernel's ticks; 0 for one that is gone."""
    return int((_fields(pid) or ["0"] * 20)[19])


def _parent(pid: int) -> int:
    return int((_fields(pid) or ["0"] * 2)[1])


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command's name."""
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
    return []


def _is_launcher(pid: int) -> bool:
    """Return whether a process runs a launcher's executable; another user's, such as Slurm's, is known by its name."""
    name = ""
    with suppress(OSError):
        try:
            name = os.path.basename(os.readlink(f"/proc/{pid}/exe")).removesuffix(" (deleted)")
        except PermissionError:
            with open(f"/proc/{pid}/comm") as file:
                name = file.read().strip()
    return name in LAUNCHERS


# --- places ---


def local_place(local_rank: int | None = None, local_size: int | None = None) -> tuple[int, int]:
    """Return this process's (rank, count) among the job's processes on its host, from the launcher's variables."""
    rank = next(_numbers(_LOCAL_RANKS), 0) if local_rank is None else local_rank
    size = next(_numbers(_LOCAL_SIZES), 1) if local_size is None else local_size
    return rank, max(size, rank + 1)


def _numbers(names: tuple[str, ...]) -> Iterator[int]:
    values = (os.environ.get(name, "") for name in names)
    return (int(value) for value in values if value.isdigit())


def launched_rank_in_words() -> str:
    """Return this process's rank for messages; "?" if no launcher names one."""
    rank = launched_rank()
    return "?" if rank is None else str(rank)
