"""The MPI library that mpi4py loads, and its launcher's environment variables."""

from __future__ import annotations

import os
import sys
import warnings
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from clcomm.base.errors import ArgumentError, LaunchError, pip_install
from clcomm.base.host.launcher import SIZES, launched_rank_in_words, numbers_of
from clcomm.base.host.rank_process import launched_ranks as launched_ranks
from clcomm.base.host.rank_process import rank_above

if TYPE_CHECKING:
    from mpi4py.MPI import Datatype as Datatype
    from mpi4py.MPI import Intracomm as Intracomm
    from mpi4py.MPI import Request as Request
    from mpi4py.MPI import Win as Win
else:  # mpi4py is imported where MPI is needed
    Datatype = Intracomm = Request = Win = object

#: The program's call after which no other MPI call is allowed, as messages name it.
FINALIZE = "MPI.Finalize()"


def world() -> Intracomm:
    """Return MPI's COMM_WORLD.

    Raises:
        ArgumentError: after MPI.Finalize().
        LaunchError: the launcher's environment variables promise several ranks but MPI has one: mpiexec and the library
            that mpi4py loaded belong to different MPIs, there is no library, or torchrun started the job.
        ImportError: without a launcher, no library was found.
    """
    own: Intracomm | None = process_mpi().stand_in
    if own is not None:
        return own
    promised = launched_ranks()
    require_no_torchrun()
    mpi = load_mpi()
    require_not_finalized()
    size = mpi.COMM_WORLD.Get_size()
    if size == 1 and promised > 1:
        raise LaunchError(
            f"mpiexec: expected a world of {promised} ranks (its environment says so), but {library()}, "
            f"which mpi4py loaded, sees 1; start the job with the mpiexec of that MPI "
            f"(installed beside this Python: {_own_mpiexec()})"
        )
    everyone: Intracomm = mpi.COMM_WORLD
    return everyone


def host_of(comm: Intracomm) -> Intracomm:
    """Return a communicator of the ranks that can share memory with this one; collective."""
    if hasattr(comm, "of_host"):  # one without MPI
        return cast("Intracomm", comm.of_host())
    from mpi4py import MPI

    return cast("Intracomm", comm.Split_type(MPI.COMM_TYPE_SHARED, comm.Get_rank()))


def library() -> str:
    """Return the name and version of the MPI library that mpi4py loaded; "none" where ranks have met without MPI."""
    if not is_running() and (process_mpi().stand_in is not None or "TORCHELASTIC_RUN_ID" in os.environ):
        return "none"
    vendor, version = load_mpi().get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


def bindings_version() -> str:
    """Return mpi4py's version; "none" where it is not installed, as ranks may meet without MPI."""
    try:
        import mpi4py
    except ImportError:
        return "none"
    return mpi4py.__version__


class ProcessMpi:
    """MPI in this process, which starts and ends once.

    Attributes:
        is_ours_to_end: whether clcomm calls MPI_Finalize: mpi4py leaves that to it, or left MPI_Init to it.
        survivors: the job's live ranks after losses, or all of them under `clcomm.guard`; None: all of COMM_WORLD.
        stand_in: the world of ranks that meet without MPI (`memory_comm.py`), in place of COMM_WORLD; None: MPI's.
        windows_in_use: windows that arrays still used when their Communicator was closed, by the ranks in COMM_WORLD
            that share them (`host_memory.py`).
    """

    def __init__(self) -> None:
        self.is_ours_to_end = False
        self.survivors: Intracomm | None = None
        self.stand_in: Any = None
        self.windows_in_use: dict[tuple[int, ...], list[Any]] = {}


@cache
def process_mpi() -> ProcessMpi:
    """Return what belongs to this process's MPI."""
    return ProcessMpi()


def load_mpi() -> ModuleType:
    """Import and start MPI, without mpi4py's warning about another MPI's launcher: `world` raises an error instead.

    Raises:
        LaunchError: a rank has started this process, which is none; or no library was found, and the launcher's
            environment variables promise several ranks.
        ImportError: no library was found.
    """
    if above := rank_above():
        raise LaunchError(
            f"MPI: expected a rank, got process {os.getpid()}, which rank {launched_rank_in_words()} (process {above}) "
            f"has started; communicate in the rank, take transport='solo', or start a job of its own with "
            f"`clcomm run -n N script.py`"
        )
    if is_running():
        return sys.modules["mpi4py.MPI"]
    from clcomm.base.storage.scratch import in_job_folder  # here, as an import needs none of it

    with warnings.catch_warnings(), in_job_folder():  # a rank of Open MPI whose launcher has ended makes a folder
        warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # mpi4py raises either, depending on how it looked for the library
            reason = str(error).splitlines()[0]
            if launched_ranks() > 1:
                raise LaunchError(
                    f"mpi4py: expected an MPI library for {launched_ranks()} ranks, found none ({reason}); run "
                    f"`{pip_install('mpich')}` or see docs/installation.md"
                ) from None
            raise ImportError(reason) from None
        if not MPI.Is_initialized():
            MPI.Init_thread()
            process_mpi().is_ours_to_end = True  # the program has set mpi4py.rc.initialize to False
    return MPI


def processes_without_mpi() -> int:
    """Return the number of processes that torchrun, or a program like it, started without MPI; 1 for none."""
    processes = os.environ.get("WORLD_SIZE", "")
    is_mpis = (
        launched_ranks() > 1 or rank_above() or ("TORCHELASTIC_RUN_ID" not in os.environ and any(numbers_of(SIZES)))
    )
    if is_mpis or "RANK" not in os.environ or not processes.isdigit():
        return 1
    return max(1, int(processes))


def is_one_of_several() -> bool:
    """Return whether a launcher, or torchrun, has started this process as one of several."""
    return launched_ranks() > 1 or processes_without_mpi() > 1


def require_no_torchrun() -> None:
    processes = processes_without_mpi()
    if processes == 1:
        return
    script = os.path.basename(sys.argv[0]) if sys.argv[0].endswith(".py") else "train.py"
    starter = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "RANK and WORLD_SIZE"
    raise LaunchError(
        f"{starter}: expected ranks that MPI connects, got {processes} processes that it knows nothing of; "
        f"start the job with: clcomm run -n {processes} {script}"
    )


def _own_mpiexec() -> str:
    candidate = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return candidate if os.path.exists(candidate) else "none found"


def is_running() -> bool:
    """Return whether MPI is initialised in this process and not finalised."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not hasattr(mpi, "Is_finalized"):  # not imported, or still importing
        return False
    return mpi.Is_initialized() and not mpi.Is_finalized()


def is_finalized() -> bool:
    """Return whether MPI was finalised in this process; it cannot be started again."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and hasattr(mpi, "Is_finalized") and mpi.Is_finalized()


def require_not_finalized() -> None:
    """Raise ArgumentError after MPI.Finalize(): a later MPI call would end the process."""
    if is_finalized():
        raise ArgumentError(
            f"Communicator: expected MPI to run, but {FINALIZE} was called; make it before, or use transport='solo'"
        )


def closed(by: str) -> ArgumentError:
    """Return the error for a call after `by` has closed the Communicator."""
    advice = "call that last" if by == FINALIZE else "make a new one"
    return ArgumentError(f"Communicator: expected an open one, but {by} was called; {advice}")
