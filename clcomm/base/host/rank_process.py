"""Which process is a rank: what a rank starts inherits its launcher's variables, and is none.

MPI would take it for the rank, and end the job with it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import FrameType

from clcomm.base.host import variables
from clcomm.base.host.host_processes import stat_fields
from clcomm.base.host.launcher import JOB_VARIABLE, OF_RUN, RANK_VARIABLES, SIZES, launched_rank, numbers_of

#: Set by a rank for what it starts: its process, that one's start time, and what the launcher told it.
RANK_PROCESS = "CLCOMM_RANK_PROCESS"
#: Launchers' executables: those of MPICH, Open MPI and Slurm.
LAUNCHERS = (
    "hydra_pmi_proxy", "pmi_proxy", "prted", "prterun", "orted", "orterun", "mpirun", "mpiexec", "mpiexec.hydra",
    "mpiexec.gforker", "slurmstepd",
)  # fmt: skip


def launched_ranks() -> int:
    """Return the number of ranks according to the launcher's environment variables; 1 in what is no rank."""
    return 1 if rank_above() else max(numbers_of(SIZES), default=1)


def rank_above() -> int:
    """Return the rank's process that has started this one, directly or not; 0: this one is a rank, or none has."""
    return 0 if launched_rank() is None else _rank_above(os.getpid(), _told())


@cache  # for each process that is forked
def _rank_above(pid: int, told: str) -> int:
    """Return what `rank_above` does, and mark a rank, once, for what it starts."""
    between, launcher = ancestors(pid)
    own = f"{pid}@{start_time(pid)}"
    marked, _, then = variables.text(RANK_PROCESS).partition(" ")
    if (between or not launcher) and marked not in ("", own) and then == told:
        rank = int(marked.partition("@")[0])
        if rank in between or not launcher:
            return rank
    if launcher and marked != own and (programs := list(filter(_may_use_mpi, between))):
        return programs[-1]  # a rank that has not imported clcomm; others are shells that started one
    if marked not in ("", own):  # a rank has started this one's launcher: its job is another
        for name in (*OF_RUN, "CLCOMM_CHAOS"):
            os.environ.pop(name, None)
    os.environ[RANK_PROCESS] = f"{own} {told}"
    return 0


def _told() -> str:
    return "/".join(os.environ.get(name, "") for name in (*RANK_VARIABLES, *SIZES, JOB_VARIABLE, "SLURM_STEP_ID"))


def _may_use_mpi(pid: int) -> bool:
    """Return whether a process runs this Python, or has loaded an MPI library."""
    with suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        return os.path.samefile(f"/proc/{pid}/exe", "/proc/self/exe") or b"/libmpi" in file.read()
    return False


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
    return int((stat_fields(pid)[19:20] or ["0"])[0])


def _parent(pid: int) -> int:
    return int((stat_fields(pid)[1:2] or ["0"])[0])


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


# --- Signals that come while a command, or a rank of `clcomm run`, still loads its modules. ---

#: The signals that end a program, and what is said of them.
ENDED_BY = {
    signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM", signal.SIGHUP: "ended by SIGHUP",
}  # fmt: skip


def handle_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Set the handler of these signals, but of those that this process was started to ignore."""
    for number in ENDED_BY:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def say_ended(number: int) -> None:
    """Print what ends this process, for all ranks one line."""
    if not launched_rank():
        os.write(2, f"clcomm: {ENDED_BY[signal.Signals(number)]}\n".encode())


def leave_to_python() -> None:
    """Give the signals to Python and the program again."""
    handle_signals(signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
