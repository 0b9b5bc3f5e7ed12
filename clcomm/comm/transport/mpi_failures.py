"""Lost ranks, and the end of a job: agreement between ranks, MPI_Abort and MPI_Finalize."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from clcomm.base.errors import LaunchError
from clcomm.base.host.host_processes import SHARED_MEMORY, files_of
from clcomm.base.host.launcher import launched_rank
from clcomm.comm.transport.mpi_runtime import (
    Intracomm,
    is_finalized,
    is_running,
    launched_ranks,
    load_mpi,
    process_mpi,
    world,
)

#: How long the news of a rank's death may take to come, after what it left of a message.
NEWS_S = 1.0
#: How long no further death may have come to light before the live ranks make a communicator.
SETTLED_S = 0.05


def unlink_shared_files() -> None:
    """Unlink MPI's own files in /dev/shm, once all ranks of the host have mapped them.

    MPICH unlinks them only in MPI_Finalize, so a job that ends in any other way would leave them behind; Open MPI's
    launcher removes them, unless it is killed. MPI does not open them again after MPI_Init.
    """
    with contextlib.suppress(OSError):  # no descriptor is free
        for name in files_of(os.getpid(), r"mpich_shm_\S+|sm_segment[.]\S+"):
            with contextlib.suppress(OSError):  # unlinked by another rank
                os.unlink(f"{SHARED_MEMORY}/{name}")


def tolerates_failures() -> bool:
    """Return whether MPI continues when a rank dies: Open MPI under `mpiexec --with-ft ulfm`."""
    if not is_running():
        return False
    from mpi4py import MPI

    enabled = os.environ.get("OMPI_MCA_mpi_ft_enable")  # noqa: SIM112 - Open MPI's own
    return MPI.ERR_PROC_FAILED != MPI.ERR_UNKNOWN and enabled == "1"


def is_lost_peer(error: BaseException) -> bool:
    """Return whether this is MPI's error for a dead rank or a revoked communicator, or was raised from such a one.

    Of a rank that dies within a collective Open MPI may report an unknown or internal error instead.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return False
    own = error if isinstance(error, mpi.Exception) else error.__cause__
    lost = mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED
    return isinstance(own, mpi.Exception) and (own.Get_error_class() in lost or _has_lost_ranks())


def require_live_ranks() -> None:
    """Raise MPI's error for a dead rank if one of the job's is dead, where another error may be due to that.

    What a dying rank sent may be here before the news of its death, which is waited for.
    """
    if not tolerates_failures():
        return
    until = time.perf_counter() + NEWS_S
    while not _has_lost_ranks():
        if time.perf_counter() > until:
            return
        _job().Iprobe()  # MPI learns of a death in its own calls
        time.sleep(1e-3)
    from mpi4py import MPI

    raise MPI.Exception(MPI.ERR_PROC_FAILED)


def _has_lost_ranks() -> bool:
    return tolerates_failures() and bool(_job().Is_revoked() or _job().Get_failed().Get_size())


def revoke(*comms: Intracomm) -> None:
    """Revoke these communicators: every call on them, on any rank, raises an error."""
    for comm in comms:
        if comm and not comm.Is_revoked():  # a freed one is false
            comm.Revoke()


@contextlib.contextmanager
def revoking(comms: Sequence[Intracomm]) -> Iterator[None]:
    """Revoke what the block has appended to `comms` if it loses a rank, as others may wait in one of them.

    MPI may give what a dead rank was to send as garbage, without an error: the error that follows is then MPI's too.
    """
    try:
        try:
            yield
        except Exception as error:
            if not is_lost_peer(error):
                require_live_ranks()
            raise
    except Exception as error:
        if is_lost_peer(error):
            revoke(*comms)
        raise


def survivors(comm: Intracomm) -> Intracomm:
    """Return a communicator of a revoked one's live ranks; collective over these.

    From then on the job consists of these ranks alone, which agree on how it ends.
    """
    _wait_until_settled(comm)
    process_mpi().survivors = alive = cast("Intracomm", comm.Shrink())
    return alive


def _wait_until_settled(comm: Intracomm) -> None:
    """Wait until no rank of a communicator has died for SETTLED_S.

    The cause of one death, such as a full memory, often ends other ranks of the host too, a few milliseconds later; and
    Open MPI 5.0 crashes at the news of a death that comes while it activates the new communicator, whose messages it
    then revokes before they are set up (ompi_comm_revoke_local in ompi/communicator/ft/comm_ft_revoke.c).
    """
    from mpi4py import MPI

    lost, until = 0, time.monotonic() + SETTLED_S
    while time.monotonic() < until:
        MPI.COMM_SELF.Iprobe()  # MPI learns of a death in its own calls
        time.sleep(1e-3)
        if (now_lost := comm.Get_failed().Get_size()) != lost:
            lost, until = now_lost, time.monotonic() + SETTLED_S


def live_world() -> Intracomm:
    """Return COMM_WORLD, or after losses a communicator of the surviving ranks; raises as `mpi_runtime.world`."""
    everyone, alive = world(), process_mpi().survivors
    return everyone if alive is None else alive


def _job() -> Intracomm:
    """Return a communicator of the job's live ranks, used only for the end of the job."""
    process = process_mpi()
    if process.stand_in is not None:
        return cast("Intracomm", process.stand_in)
    from mpi4py import MPI

    return MPI.COMM_WORLD if process.survivors is None else process.survivors


def call_before_finalize(function: Callable[[], None]) -> None:
    """Register a function to be called when the program calls MPI.Finalize(); not when MPI ends with Python.

    MPI_Finalize begins by freeing COMM_SELF, which deletes its attributes (MPI 4.1, section 11.2.4).
    """
    if not is_running():  # the ranks have met without MPI
        return
    from mpi4py import MPI

    keyval = MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, value: function())
    MPI.COMM_SELF.Set_attr(keyval, None)


def take_over_finalize() -> None:
    """Let `finalize_after_python` call MPI_Finalize in place of mpi4py, which calls it in a forked child too.

    No-op if mpi4py has already loaded MPI or the program has set mpi4py.rc.
    """
    try:
        import mpi4py
    except ImportError:  # ranks may meet without it
        return
    if "mpi4py.MPI" not in sys.modules and mpi4py.rc.finalize is None and mpi4py.rc.initialize:
        mpi4py.rc.finalize = False
        process_mpi().is_ours_to_end = True


def finalize_after_python() -> None:
    """Register MPI_Finalize for the end of Python; not where ranks may die, as it would wait for them."""
    if not process_mpi().is_ours_to_end or not is_running() or tolerates_failures():
        return
    import ctypes

    from mpi4py import MPI

    try:
        function = ctypes.CDLL(MPI.__file__).MPI_Finalize
    except (OSError, AttributeError):  # an mpi4py that hides its library
        MPI.Finalize()
        return
    ctypes.pythonapi.Py_AtExit(ctypes.cast(function, ctypes.c_void_p))


def place_in_world() -> tuple[int, int]:
    """Return this process's rank in the job and the job's size; starts MPI if the launcher's variables name ranks.

    Both refer to COMM_WORLD, or after losses to the surviving ranks.
    """
    if process_mpi().stand_in is not None:
        return _job().Get_rank(), _job().Get_size()
    if is_finalized():
        return launched_rank() or 0, launched_ranks()
    if not is_running() and launched_ranks() == 1:
        return 0, 1
    try:
        load_mpi()
    except LaunchError:  # without a library each rank is alone, and prints its own error
        return 0, 1
    return _job().Get_rank(), _job().Get_size()


def ranks_in_agreement(digest: bytes, timeout_s: float) -> list[int] | None:
    """Return the ranks that call this with the same digest; None after a time-out, a rank's death or MPI.Finalize()."""
    if is_finalized():
        return None
    everyone = bytearray(_job().Get_size() * len(digest))
    deadline = time.monotonic() + timeout_s
    try:
        request = _job().Iallgather(bytearray(digest), everyone)
        while not request.Test():
            if time.monotonic() > deadline:
                return None
            time.sleep(0.005)
    except Exception as error:
        if not is_lost_peer(error):
            raise
        return None
    theirs = (everyone[start : start + len(digest)] for start in range(0, len(everyone), len(digest)))
    return [rank for rank, its in enumerate(theirs) if its == digest]


def prepare_abort() -> None:
    """Unlink MPI's files in /dev/shm, and notify the ranks of other hosts where MPI would not end them."""
    unlink_shared_files()
    if tolerates_failures():
        with contextlib.suppress(Exception):  # MPI may not work any more
            revoke(_job())


def abort(code: int) -> None:
    """End all ranks of the job with this exit code, if MPI runs; under `--with-ft ulfm` perhaps only this one."""
    if is_running():
        from mpi4py import MPI

        prepare_abort()
        MPI.COMM_WORLD.Abort(code)
