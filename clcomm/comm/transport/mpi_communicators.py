"""The MPI communicators, windows and comparisons that the transports use."""

from __future__ import annotations

import contextlib
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar, cast

import numpy as np

from clcomm.base.errors import ArgumentError, ResourceError
from clcomm.comm.transport.mpi_failures import is_lost_peer, tolerates_failures
from clcomm.comm.transport.mpi_runtime import Datatype, Intracomm, Request, Win, process_mpi, require_not_finalized
from clcomm.comm.transport.mpi_runtime import host_of as host_of
from clcomm.comm.transport.pending import advance_started, complete

if TYPE_CHECKING:
    from clcomm.comm.transport.memory_comm import MemoryComm

T = TypeVar("T")

#: Interval of the tests in `wait_patiently`.
_PATIENCE_S = 1e-3
#: MPI's reductions, and the unsupported ones: for pairs of value and index, for windows, and the null operation.
_NOT_SERVED = ("MINLOC", "MAXLOC", "REPLACE", "NO_OP", "OP_NULL")
_REDUCTIONS = ("SUM", "MIN", "MAX", "PROD", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR", *_NOT_SERVED)


def _is_in_memory(comm: object) -> TypeGuard[MemoryComm]:
    """Return whether a communicator is one without MPI, whose file few programs load."""
    return hasattr(comm, "mail")


def checked(comm: object) -> Intracomm:
    """Return the user's communicator; ArgumentError unless it is an mpi4py intracommunicator."""
    if _is_in_memory(comm):
        return cast("Intracomm", comm)
    from mpi4py import MPI

    require_not_finalized()
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        got = "COMM_NULL" if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL else type(comm).__name__
        raise ArgumentError(f"comm: expected an mpi4py intracommunicator such as MPI.COMM_WORLD, got {got}")
    return comm


def pickled(obj: object) -> bytes:
    """Return an object as mpi4py sends it; ArgumentError for one that cannot be pickled."""
    mpi = sys.modules.get("mpi4py.MPI")
    try:
        data: bytes = mpi.pickle.dumps(obj) if mpi else pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
        return data
    except Exception as error:  # an object's own code may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArgumentError(f"object: expected one that can be pickled, got {type(obj).__name__}: {reason}") from None


def unpickled(data: bytes) -> Any:
    """Return the object that `pickled` was given."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi.pickle.loads(data) if mpi else pickle.loads(data)


class Names(NamedTuple):
    """What a communicator's messages need besides it."""

    #: The datatype in which all arrays are sent.
    byte: Datatype
    #: The source of a message from any rank.
    any_rank: Any
    new_status: Callable[[], Any]
    most_tag: int


def names_of(comm: Intracomm) -> Names:
    """Return the names of a communicator's library."""
    if _is_in_memory(comm):
        return Names(cast("Datatype", None), None, comm.new_status, comm.most_tag)
    from mpi4py import MPI

    return Names(MPI.BYTE, MPI.ANY_SOURCE, MPI.Status, comm.Get_attr(MPI.TAG_UB) or 32767)


def duplicate(comm: Intracomm) -> Intracomm:
    """Return a duplicate of a communicator; collective, without a busy wait for ranks that are still starting."""
    if tolerates_failures():  # a death within Open MPI's Idup can leave a lock, for which a later Shrink waits forever
        wait_patiently(comm.Ibarrier())
        return comm.Dup()
    copy, request = comm.Idup()
    wait_patiently(request)
    return copy


def wait_patiently(request: Request) -> None:
    """Complete a request, testing it once a millisecond: a blocking call would keep a core busy."""
    while not request.Test():
        advance_started()
        time.sleep(_PATIENCE_S)


@contextlib.contextmanager
def taking_communicators() -> Iterator[None]:
    """Raise ResourceError if MPI runs out of communicators in this block; a window needs one too."""
    try:
        yield
    except Exception as error:
        mpi = sys.modules.get("mpi4py.MPI")  # None where mpi4py finds no library
        if mpi is None or not isinstance(error, mpi.Exception) or is_lost_peer(error):
            raise
        raise ResourceError(
            f"Communicator: expected MPI to have communicators left, but it reports: {str(error).splitlines()[-1]}; "
            f"call finalize() of those that are not needed any more"
        ) from None


def world_ranks(comm: Intracomm) -> tuple[int, ...]:
    """Return the ranks in COMM_WORLD of a communicator's ranks; empty if some belong to another world."""
    if _is_in_memory(comm):
        own = process_mpi().stand_in
        return comm.members if own is not None and own.mail is comm.mail else ()
    from mpi4py import MPI

    group, world_group = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = MPI.Group.Translate_ranks(group, None, world_group)
    group.Free()
    world_group.Free()
    return () if MPI.UNDEFINED in ranks else tuple(ranks)


def of_ranks(ranks: Sequence[int], tag: int) -> Intracomm:
    """Return a communicator of these ranks of COMM_WORLD, in this order; collective over them alone.

    Like MPI_Comm_create_group (MPI 4.1, section 7.4.2). tag: sets apart communicators that threads make at one time.
    """
    if (own := process_mpi().stand_in) is not None:
        return cast("Intracomm", own.of_ranks(ranks, tag))
    from mpi4py import MPI

    world_group = MPI.COMM_WORLD.Get_group()
    group = world_group.Incl(list(ranks))
    made = MPI.COMM_WORLD.Create_group(group, tag)
    group.Free()
    world_group.Free()
    return made


class Place(NamedTuple):
    """A rank's place in the job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    hosts: int = 1


def place_of(comm: Intracomm | None) -> Place:
    """Return this rank's place; None: a world of one. Collective."""
    if comm is None:
        return Place()
    host = host_of(comm)
    local_rank, local_size = host.Get_rank(), host.Get_size()
    host.Free()
    hosts = sum(comm.allgather(local_rank == 0))
    return Place(comm.Get_rank(), comm.Get_size(), local_rank, local_size, hosts)


def from_first(comm: Intracomm | None, make: Callable[[], T]) -> T:
    """Return what rank 0's `make` returns, on every rank; collective."""
    return make() if comm is None else comm.bcast(make() if comm.Get_rank() == 0 else None, 0)


def everyones(comm: Intracomm | None, value: T) -> list[T]:
    """Return every rank's value, in their order; collective."""
    return [value] if comm is None else comm.allgather(value)


def lane_of(comm: Intracomm, lane: int | None, position: int) -> Intracomm | None:
    """Return a communicator of the ranks with the same lane, ordered by position; collective.

    Args:
        comm: an mpi4py communicator of all ranks.
        lane: this rank's lane; None: the rank is in none, and gets None.
        position: this rank's place in its lane.
    """
    if _is_in_memory(comm):
        return cast("Intracomm | None", comm.Split(lane, position))
    from mpi4py import MPI

    made = comm.Split(MPI.UNDEFINED if lane is None else lane, position)
    return None if lane is None else cast("Intracomm", made)


def shared_window(comm: Intracomm, nbytes: int) -> Win:
    """Return a window with `nbytes` of this rank, readable by all ranks of the host; collective."""
    if _is_in_memory(comm):
        return cast("Win", comm.window(nbytes))
    from mpi4py import MPI

    comm.Dup().Free()  # MPICH 5 crashes instead of raising where it has no communicator left for the window
    info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
    window = MPI.Win.Allocate_shared(nbytes, 1, info, comm)
    info.Free()
    return window


def shares_memory(host: Intracomm) -> bool:
    """Return whether MPI supports shared-memory windows, with the same result on the host's ranks; collective."""
    if _is_in_memory(host):
        return True
    from mpi4py import MPI

    try:
        window = shared_window(host, 1)
    except MPI.Exception:  # built without, or disabled
        window = None
    on_all_ranks = all(host.allgather(window is not None))
    if on_all_ranks and window is not None:
        window.Free()
    return on_all_ranks


def address_function(comm: Intracomm) -> Callable[[np.ndarray], int]:
    """Return a function that returns an array's address: MPI's, eight times faster than NumPy's, where MPI runs."""
    if _is_in_memory(comm):
        return lambda array: int(array.__array_interface__["data"][0])
    from mpi4py import MPI

    return MPI.Get_address


def comparison_between_hosts(comm: Intracomm) -> Callable[[int, int], tuple[bool, None]]:
    """Return a function that compares a number over the ranks, with the same result on all; each call is collective.

    The function takes the number and the time of this rank's arrival, which ranks on one host exchange instead
    (`Comparisons.alike`): clocks of hosts differ. It uses non-blocking MPI calls, so that a rank that waits in it
    advances its operations on other communicators.
    """
    from mpi4py import MPI

    both, least = np.zeros(2, np.int64), np.zeros(2, np.int64)
    arguments = [both, MPI.INT64_T], [least, MPI.INT64_T], MPI.MIN

    def alike(number: int, arrived_ns: int) -> tuple[bool, None]:
        both[0], both[1] = number, -number  # the numbers are equal if their minimum is -min(-number), their maximum
        complete(comm.Iallreduce(*arguments))  # one network latency, where MPICH's Allreduce takes two
        return bool(least[0] == -least[1]), None

    return alike


#: The source of a message from any rank.
ANY_RANK = "any"


def peer_name(rank: object) -> Any:
    """Return clcomm's name of mpi4py's PROC_NULL (None) and ANY_SOURCE ("any"); any other value as it is."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(rank, int):
        return rank
    return {mpi.PROC_NULL: None, mpi.ANY_SOURCE: ANY_RANK}.get(rank, rank)


def reduction_name(op: object) -> Any:
    """Return clcomm's name of an mpi4py reduction such as MPI.SUM; any other value is returned as it is.

    For an unsupported reduction it returns MPI's name, for the error message.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(op, mpi.Op):
        return op
    name = next((name for name in _REDUCTIONS if op == getattr(mpi, name)), "")
    if not name:
        return "an operation of the program's own"
    return name.lower() if name not in _NOT_SERVED else f"MPI.{name}"
