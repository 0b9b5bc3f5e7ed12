"""The ranks of a job: who is on which host, and which transports reach them."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from clcomm import lookout
from clcomm.errors import ArgumentError, MismatchError
from clcomm.holdings import free_dropped, next_number
from clcomm.limits import Limits
from clcomm.other_hosts import OtherHosts
from clcomm.progress import ProgressBoard
from clcomm.same_start import require_same_start
from clcomm.transport import Pending, SoloTransport, Transport
from clcomm.transport import mpi as mpi_transport
from clcomm.transport.hierarchical import HierarchicalTransport
from clcomm.transport.hosts import Hosts
from clcomm.transport.meeting import Meeting, NoMeeting, WorldMeeting
from clcomm.transport.memory import MemoryTransport
from clcomm.transport.mpi_transport import MpiTransport
from clcomm.transport.reduction import prepared_reduction_by_hosts
from clcomm.transport.shared import SharedTransport

TRANSPORTS = ("auto", "shared", "mpi", "solo")

#: What is said once where shared memory is too small.
NO_ROOM = (
    "/dev/shm has no room for %s on %d ranks: reducing through MPI instead; enlarge it (docker run --shm-size=1g) for "
    "faster synchronisation"
)

#: What is said where MPI has none at all.
NO_WINDOWS = (
    "MPI gives its ranks no memory to share (MPI_Win_allocate_shared fails): reducing through MPI instead; see "
    "docs/mpi.md"
)

_log = logging.getLogger("clcomm")


@dataclass
class World:
    """What a Communicator runs on; as it is by default, a rank that is alone and needs no MPI.

    base: reaches all ranks with any array. shared: reduces what it allocated itself; None without shared memory.
    pending: unfinished operations of both. host, hosts: this rank's host and how many there are. checks: ranks compare
    what they call, at their meeting. board: what the ranks of this host are doing; None for a rank that is alone.
    elsewhere: tells what those of other hosts do; None where there are none. number: see `Holdings`.
    """

    comm: Any = None
    base: Transport = field(default_factory=SoloTransport)
    shared: MemoryTransport | None = None
    pending: deque[Pending] = field(default_factory=deque)
    local_rank: int = 0
    local_size: int = 1
    host: int = 0
    hosts: int = 1
    cores: int = 1
    number: int = 0
    checks: bool = True
    meeting: Meeting = field(default_factory=NoMeeting)
    board: ProgressBoard | None = None
    elsewhere: OtherHosts | None = None


def join(comm: Any, transport: str, limits: Limits, arguments: Mapping[str, object]) -> World:
    """Return the world that an mpi4py communicator spans, COMM_WORLD if it is None; collective.

    A private duplicate carries the traffic. arguments: what has to be the same on all ranks, as well as the transport.
    Raises ArgumentError for a bad argument, LaunchError when mpiexec belongs to another MPI, and MismatchError on every
    rank where ranks were started differently.
    """
    if transport not in TRANSPORTS:
        raise ArgumentError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {transport!r}")
    world = World()
    if transport != "solo":
        with mpi_transport.taking_communicators():
            _join_ranks(world, comm, transport, limits, arguments)
    world.cores = _share_of_cores(world.comm)
    world.checks = _wants_checks(world.comm)
    world.meeting = _meeting_of(world)
    if isinstance(world.base, MpiTransport):
        world.base.meeting = world.meeting
    return world


def _meeting_of(world: World) -> Meeting:
    """Return where ranks compare what they call: in shared memory, else through MPI; where they don't, nowhere."""
    if not world.checks or world.base.world_size == 1:
        return NoMeeting()
    if world.shared is not None:
        return world.shared.meeting
    return WorldMeeting(mpi_transport.comparison(world.comm, world.hosts > 1), fence=lambda: None)


def _join_ranks(world: World, comm: Any, transport: str, limits: Limits, arguments: Mapping[str, object]) -> None:
    try:
        parent = mpi_transport.world() if comm is None else mpi_transport.checked(comm)
    except ImportError:
        _log.info("mpi4py found no MPI library: a world of one")
        return
    world.comm = comm = mpi_transport.duplicate(parent)
    try:
        require_same_start(comm, {"transport": transport, **arguments}, limits)
    except MismatchError:
        comm.Free()
        raise
    free_dropped(comm)
    world.number = next_number(comm)
    if comm.Get_size() == 1 and transport != "mpi":
        lookout.watch_host(comm, 0)
        return
    host = mpi_transport.host_of(comm)
    mpi_transport.unlink_shared_files()
    lookout.watch_host(host, mpi_transport.place_in_world()[0])
    world.local_rank, world.local_size = host.Get_rank(), host.Get_size()
    hosts = Hosts.of(comm, host)
    world.host, world.hosts = hosts.host_of(comm.Get_rank()), len(hosts)
    if transport == "shared" and world.hosts > 1:
        for each in (host, comm):
            each.Free()
        raise ArgumentError("transport: 'shared' needs all ranks on one host; use 'auto' or 'mpi'")
    world.board = ProgressBoard.of_host(host, hosts.ranks[world.host], comm.Get_rank())
    if world.hosts > 1:
        world.elsewhere = OtherHosts.of(comm, hosts.ranks, world.board)
    world.base = base = MpiTransport(comm, world.pending)
    nested = transport == "auto" and hosts.nested
    if nested:
        # So that results have the same bits where an array cannot be reduced in shared memory.
        base.prepare_fold = partial(prepared_reduction_by_hosts, hosts=hosts.ranks)
    if nested or (transport != "mpi" and world.hosts == 1):
        refusal = _open_memory(world, base, host, hosts)
        if refusal and comm.Get_rank() == 0:
            _log.warning("%s", refusal)
    if world.shared is None:
        host.Free()


def _open_memory(world: World, base: MpiTransport, host: Any, hosts: Hosts) -> str:
    """Open the transport in memory that the ranks of each host share, or return why there is none; collective."""
    comm = world.comm
    can_open = HierarchicalTransport.can_open(comm, host) if hosts.nested else SharedTransport.can_open(host)
    if not can_open:
        return NO_ROOM % ("the transport itself", comm.Get_size())
    if not all(comm.allgather(mpi_transport.shares_memory(host))):
        return NO_WINDOWS
    if hosts.nested:
        world.shared = HierarchicalTransport(base, host, hosts)
    else:
        world.shared = SharedTransport(host, world.pending, comm)
    return ""


def _share_of_cores(comm: Any) -> int:
    """Return how many cores this rank may call its own: those it may run on, over the ranks that share them."""
    mine = (os.uname().nodename, tuple(sorted(os.sched_getaffinity(0))))
    sharers = 1 if comm is None else comm.allgather(mine).count(mine)
    return max(1, len(mine[1]) // sharers)


def _wants_checks(comm: Any) -> bool:
    """Return, alike on every rank, whether ranks compare what they call: unless all have CLCOMM_CHECKS=off."""
    wants = os.environ.get("CLCOMM_CHECKS", "on") != "off"
    return wants if comm is None else any(comm.allgather(wants))
