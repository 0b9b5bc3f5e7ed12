"""All that needs mpi4py directly: the world, the host, windows, failures, abort."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from clcomm.errors import ArgumentError, LaunchError, ResourceError
from clcomm.transport.pending import advance_started, complete

_PATIENCE_S = 1e-3
#: The program's own call after which none of MPI's may follow.
FINALIZE = "MPI.Finalize()"
#: MPI's reductions, and those of them that we have not: for pairs of value and index, for windows, none.
_NOT_SERVED = ("MINLOC", "MAXLOC", "REPLACE", "NO_OP", "OP_NULL")
_REDUCTIONS = ("SUM", "MIN", "MAX", "PROD", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR", *_NOT_SERVED)


def world() -> Any:
    """Return MPI's COMM_WORLD.

    Raises ArgumentError after MPI.Finalize(), LaunchError when the launcher's environment speaks of several ranks
    and MPI of one: then mpiexec belongs to another MPI than the library mpi4py loaded, or there is no such library.
    Without a launcher a missing library is an ImportError.
    """
    MPI = _mpi4py()
    require_not_finalized()
    size = MPI.COMM_WORLD.Get_size()
    promised = launched_ranks()
    if size == 1 and promised > 1:
        raise LaunchError(
            f"mpiexec: expected a world of {promised} ranks (its environment says so), but {library()}, "
            f"which mpi4py loaded, sees 1; start the job with the mpiexec of that MPI "
            f"(installed beside this Python: {_own_mpiexec()})"
        )
    return MPI.COMM_WORLD


def library() -> str:
    """Return the name and version of the MPI library that mpi4py loaded."""
    vendor, version = _mpi4py().get_vendor()
    return f"{vendor} {'.'.join(map(str, version))}"


def bindings_version() -> str:
    """Return mpi4py's version."""
    import mpi4py

    return mpi4py.__version__


def _mpi4py() -> Any:
    """Import and start MPI, without mpi4py's warning about a launcher that does not fit: `world` says it shorter."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # mpi4py says both, by how it looked for the library
            reason = str(error).splitlines()[0]
            if launched_ranks() > 1:
                raise LaunchError(
                    f"mpi4py: expected an MPI library for {launched_ranks()} ranks, found none ({reason}); run "
                    f"`pip install 'clcomm[mpich]'` or see docs/mpi.md"
                ) from None
            raise ImportError(reason) from None
    return MPI


def checked(comm: Any) -> Any:
    """Return a communicator that a user gave, or raise ArgumentError when it is none of mpi4py's."""
    from mpi4py import MPI

    require_not_finalized()
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        got = "COMM_NULL" if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL else type(comm).__name__
        raise ArgumentError(f"comm: expected an mpi4py intracommunicator such as MPI.COMM_WORLD, got {got}")
    return comm


def launched_ranks() -> int:
    """Return the number of ranks that the launcher's environment variables speak of; 1 when they are silent."""
    names = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE", "PALS_SIZE")
    values = [os.environ.get(name, "") for name in names]
    return max([int(value) for value in values if value.isdigit()], default=1)


def launched_rank() -> str:
    """Return this process's rank as the launcher's environment variables have it, before MPI runs; else "?"."""
    names = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID")
    return next((os.environ[name] for name in names if name in os.environ), "?")


def _own_mpiexec() -> str:
    candidate = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return candidate if os.path.exists(candidate) else "none found"


def byte() -> Any:
    """Return the MPI datatype in which all arrays travel."""
    from mpi4py import MPI

    return MPI.BYTE


def duplicate(comm: Any) -> Any:
    """Return a duplicate of a communicator; collective, and patient: ranks come to it as they are done starting."""
    copy, request = comm.Idup()
    wait_patiently(request)
    return copy


def wait_patiently(request: Any) -> None:
    """Complete a request, asking once a millisecond: a blocking call would keep a core busy while others need it."""
    while not request.Test():
        advance_started()
        time.sleep(_PATIENCE_S)


@contextlib.contextmanager
def taking_communicators() -> Iterator[None]:
    """Raise ResourceError where MPI has no more of the communicators that this block makes; windows take one each."""
    try:
        yield
    except Exception as error:
        mpi = sys.modules.get("mpi4py.MPI")  # None where mpi4py finds no library
        if mpi is None or not isinstance(error, mpi.Exception) or is_lost_peer(error):
            raise
        raise ResourceError(
            f"Communicator: expected MPI to have communicators left, but it says: {str(error).splitlines()[-1]}; call "
            f"finalize() of those that are not needed any more"
        ) from None


def host_of(comm: Any) -> Any:
    """Return a communicator of the ranks that can share memory with this one; collective."""
    from mpi4py import MPI

    return comm.Split_type(MPI.COMM_TYPE_SHARED, comm.Get_rank())


def unlink_shared_files() -> None:
    """Take the names of MPI's own shared memory out of /dev/shm, once all ranks of the host have it mapped.

    MPICH unlinks it in MPI_Finalize alone, so the file of a job that ends in any other way would stay; Open MPI's
    launcher takes such files away, unless it is killed. Nobody opens them again after MPI_Init.
    """
    with open("/proc/self/maps") as maps:
        for path in {line.split()[-1] for line in maps if re.search("/dev/shm/(mpich_shm_|sm_segment[.])", line)}:
            with contextlib.suppress(OSError):  # another rank was faster, or the line ends in "(deleted)"
                os.unlink(path)


def world_ranks(comm: Any) -> tuple[int, ...]:
    """Return the numbers that a communicator's ranks have in COMM_WORLD; empty where some are of another world."""
    from mpi4py import MPI

    group, world_group = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = MPI.Group.Translate_ranks(group, None, world_group)
    group.Free()
    world_group.Free()
    return () if MPI.UNDEFINED in ranks else tuple(ranks)


def lane_of(comm: Any, lane: int | None, position: int) -> Any | None:
    """Return a communicator of the ranks that gave the same lane, in the order of their positions; collective.

    None: part of no lane, and of no communicator.
    """
    from mpi4py import MPI

    made = comm.Split(MPI.UNDEFINED if lane is None else lane, position)
    return None if lane is None else made


def shared_window(comm: Any, nbytes: int) -> Any:
    """Return a window to which this rank adds a part of so many bytes, readable by all ranks of the host; collective.

    Parts start at pages of their own.
    """
    from mpi4py import MPI

    comm.Dup().Free()  # MPICH 5 crashes instead of raising where it has no communicator left for the window
    info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
    window = MPI.Win.Allocate_shared(nbytes, 1, info, comm)
    info.Free()
    return window


def shares_memory(host: Any) -> bool:
    """Say, alike on every rank of a host's communicator, whether MPI makes windows that they share; collective."""
    from mpi4py import MPI

    try:
        window = shared_window(host, 1)
    except MPI.Exception:  # built without, or told not to
        window = None
    everyone = all(host.allgather(window is not None))
    if everyone and window is not None:
        window.Free()
    return everyone


def address_function() -> Callable[[np.ndarray], int]:
    """Return what tells where an array starts, eight times faster than asking NumPy."""
    from mpi4py import MPI

    return MPI.Get_address


def comparison(comm: Any, between_hosts: bool) -> Callable[[int, int], tuple[bool, list[int] | None]]:
    """Return what says, alike on every rank, whether all ranks gave it the same number; each call is collective.

    It takes the number and when the rank came (perf_counter_ns), and also returns when each rank came; None between
    hosts, which have clocks of their own. Both are non-blocking calls of MPI, as a rank that waits here moves on what
    it has started on other communicators.
    """
    return _comparison_of_hosts(comm) if between_hosts else _comparison_on_host(comm)


def _comparison_of_hosts(comm: Any) -> Callable[[int, int], tuple[bool, None]]:
    from mpi4py import MPI

    both, least = np.zeros(2, np.int64), np.zeros(2, np.int64)
    arguments = [both, MPI.INT64_T], [least, MPI.INT64_T], MPI.MIN

    def alike(number: int, came_ns: int) -> tuple[bool, None]:
        both[0], both[1] = number, -number
        complete(comm.Iallreduce(*arguments))  # a network's latency once, where MPICH's Allreduce takes it twice
        return bool(least[0] == -least[1]), None

    return alike


def _comparison_on_host(comm: Any) -> Callable[[int, int], tuple[bool, list[int]]]:
    from mpi4py import MPI

    own, everyone = np.zeros(2, np.int64), np.zeros((comm.Get_size(), 2), np.int64)
    arguments = [own, MPI.INT64_T], [everyone, MPI.INT64_T]

    def alike(number: int, came_ns: int) -> tuple[bool, list[int]]:
        own[0], own[1] = number, came_ns
        complete(comm.Iallgather(*arguments))
        numbers, arrivals = everyone.T.tolist()
        return numbers.count(number) == len(numbers), arrivals

    return alike


def reduction_name(op: Any) -> str:
    """Return our name of a reduction given as mpi4py's constant, e.g. MPI.SUM; the value itself when it is none.

    Of what we have no name for it returns MPI's, for the error to tell.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(op, mpi.Op):
        return op
    name = next((name for name in _REDUCTIONS if op == getattr(mpi, name)), "")
    if not name:
        return "an operation of the program's own"
    return name.lower() if name not in _NOT_SERVED else f"MPI.{name}"


# --- ranks that die ---------------------------------------------------------------------------------------------


def tolerates_failures() -> bool:
    """Say whether MPI goes on when a rank dies: Open MPI whose launcher was told `--with-ft ulfm`."""
    if not is_running():
        return False
    from mpi4py import MPI

    enabled = os.environ.get("OMPI_MCA_mpi_ft_enable")  # noqa: SIM112 - Open MPI's own
    return MPI.ERR_PROC_FAILED != MPI.ERR_UNKNOWN and enabled == "1"


def is_lost_peer(error: BaseException) -> bool:
    """Say whether this is MPI's error for a call that a dead rank, or a revoked communicator, has spoilt."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(error, mpi.Exception):
        return False
    return error.Get_error_class() in (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)


def revoke(*comms: Any) -> None:
    """Let every call on these communicators, on any rank, end with an error."""
    for comm in comms:
        if not comm.Is_revoked():
            comm.Revoke()


def survivors(comm: Any) -> Any:
    """Return a communicator of the ranks of a revoked one that still live; collective over these.

    From now on the job is these ranks: they alone agree on how it ends.
    """
    _Job.comm = comm.Shrink()
    return _Job.comm


class _Job:
    """The ranks that are left of the job, where some have died; None as long as that is COMM_WORLD."""

    comm: Any = None


def _job() -> Any:
    """Return a communicator of the job's living ranks that carries nothing but how the job ends."""
    from mpi4py import MPI

    return MPI.COMM_WORLD if _Job.comm is None else _Job.comm


# --- the end of a job --------------------------------------------------------------------------------------------


def is_running() -> bool:
    """Say whether MPI was initialised in this process and not finalised yet."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not hasattr(mpi, "Is_finalized"):  # not imported, or just being
        return False
    return mpi.Is_initialized() and not mpi.Is_finalized()


def is_finalized() -> bool:
    """Say whether MPI was finalised in this process, which ends it for good."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and hasattr(mpi, "Is_finalized") and mpi.Is_finalized()


def require_not_finalized() -> None:
    """Raise ArgumentError after MPI.Finalize(): MPI ends a process that calls it then."""
    if is_finalized():
        raise ArgumentError(
            f"Communicator: expected MPI to run, but {FINALIZE} was called; make it before, or use transport='solo'"
        )


def call_before_finalize(function: Callable[[], None]) -> None:
    """Let a function be called when the program calls MPI.Finalize(); not when MPI ends with Python.

    MPI_Finalize begins by freeing COMM_SELF, which deletes its attributes (MPI 4.1, section 11.2.4).
    """
    from mpi4py import MPI

    keyval = MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, value: function())
    MPI.COMM_SELF.Set_attr(keyval, None)


def place_in_world() -> tuple[int, int]:
    """Return this process's rank in the job and the job's size; starts MPI if the launcher's variables name ranks.

    That is COMM_WORLD's, or after losses the survivors'.
    """
    if is_finalized():
        return int(launched_rank().replace("?", "0")), launched_ranks()
    if not is_running() and launched_ranks() == 1:
        return 0, 1
    try:
        _mpi4py()
    except LaunchError:  # each rank is on its own, and says so
        return 0, 1
    return _job().Get_rank(), _job().Get_size()


def ranks_in_agreement(digest: bytes, timeout_s: float) -> list[int] | None:
    """Return the ranks that call this with the same digest, or None when a rank has not called it in time, or died.

    None as well after MPI.Finalize().
    """
    if is_finalized():
        return None
    own = np.frombuffer(digest, np.uint8).copy()
    everyone = np.empty((_job().Get_size(), own.size), np.uint8)
    deadline = time.monotonic() + timeout_s
    try:
        request = _job().Iallgather(own, everyone)
        while not request.Test():
            if time.monotonic() > deadline:
                return None
            time.sleep(0.005)
    except Exception as error:
        if not is_lost_peer(error):
            raise
        return None
    return [r for r, theirs in enumerate(everyone) if np.array_equal(theirs, own)]


def prepare_abort() -> None:
    """Take MPI's files out of /dev/shm, and let the ranks of other hosts know where MPI itself would not end them."""
    with contextlib.suppress(OSError):  # no descriptor is free
        unlink_shared_files()
    if tolerates_failures():
        with contextlib.suppress(Exception):  # MPI is not to be relied on any more
            revoke(_job())


def abort(code: int) -> None:
    """End all ranks of the job with this exit code, if MPI runs; under `--with-ft ulfm` MPI may end this one alone."""
    if is_running():
        from mpi4py import MPI

        prepare_abort()
        MPI.COMM_WORLD.Abort(code)
