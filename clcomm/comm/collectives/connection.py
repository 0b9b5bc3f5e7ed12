"""How a Communicator's ranks connect: they compare their start, find their hosts, and open transports."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.base.host import usable_cores, variables
from clcomm.comm.collectives.same_start import require_same_start
from clcomm.comm.collectives.world import NO_ROOM, TRANSPORTS, World
from clcomm.comm.transport import mpi_communicators, mpi_failures
from clcomm.comm.transport.direct_exchange import DirectExchange, OtherMemory
from clcomm.comm.transport.hierarchical import HierarchicalTransport
from clcomm.comm.transport.hosts import Hosts
from clcomm.comm.transport.mpi_runtime import Intracomm
from clcomm.comm.transport.mpi_transport import MpiTransport
from clcomm.comm.transport.reduction import prepared_reduction_by_hosts
from clcomm.comm.transport.rendezvous import MpiRendezvous, Rendezvous
from clcomm.comm.transport.shared import SharedTransport
from clcomm.comm.transport.staged import StagedCollectives
from clcomm.comm.watch import exit_monitor
from clcomm.comm.watch.job import Limits, this_job
from clcomm.comm.watch.other_hosts import OtherHosts
from clcomm.comm.watch.running_jobs import job_description
from clcomm.comm.watch.startup_watchdog import StartWatch
from clcomm.comm.watch.status_page import StatusPage

#: Warned where MPI offers no shared memory.
NO_WINDOWS = (
    "MPI offers its ranks no shared memory (MPI_Win_allocate_shared fails): reducing through MPI instead; see "
    "docs/launchers.md"
)

_log = logging.getLogger("clcomm")


def open_world(comm: Intracomm | None, transport: str, limits: Limits, arguments: Mapping[str, object]) -> World:
    """Return the world of an mpi4py communicator, of COMM_WORLD if it is None; collective.

    All traffic goes through a private duplicate of it.

    Args:
        comm: the mpi4py communicator.
        transport: one of TRANSPORTS.
        limits: the time limits of waits.
        arguments: the Communicator's other arguments, by name; like `transport`, they are the same on all ranks.

    Raises:
        ArgumentError: an argument is invalid.
        LaunchError: mpiexec belongs to another MPI.
        MismatchError: ranks were started differently; on every rank.
    """
    if transport not in TRANSPORTS:
        raise ArgumentError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {transport!r}")
    world = World()
    with StartWatch(limits), mpi_failures.revoking(world.created), mpi_communicators.taking_communicators():
        _connect_ranks(world, comm, transport, limits, arguments)
        world.cores = _share_of_cores(world.comm)
        compares = _wants_checks(world.comm)
    if compares and world.base.world_size > 1:
        world.rendezvous = _rendezvous_of(world)
    if isinstance(world.base, MpiTransport):
        world.base.rendezvous = world.rendezvous
    return world


def _rendezvous_of(world: World) -> Rendezvous:
    """Return the rendezvous in which ranks compare their calls: in shared memory or through MPI."""
    if world.shared is not None:
        return world.shared.rendezvous
    assert isinstance(world.base, MpiTransport)
    on_one_host = world.base.comparisons.alike
    alike = mpi_communicators.comparison_between_hosts(world.comm) if world.hosts > 1 else on_one_host
    return MpiRendezvous(alike, fence=lambda: None)


def _connect_ranks(world: World, comm: Any, transport: str, limits: Limits, arguments: Mapping[str, object]) -> None:
    try:
        parent = mpi_failures.live_world() if comm is None else mpi_communicators.checked(comm)
    except ImportError:
        _log.info("mpi4py found no MPI library: a world of one")
        return
    world.comm = comm = mpi_communicators.duplicate(parent)
    world.address = mpi_communicators.address_function(comm)
    world.created.append(comm)
    try:
        require_same_start(comm, {"transport": transport, **arguments}, limits)
    except MismatchError:
        comm.Free()
        raise
    job = this_job()
    job.communicators.free_dropped(comm)
    world.number = job.communicators.next_number(comm)
    if comm.Get_size() > 1 or mpi_failures.place_in_world()[1] == 1:  # else the host's other ranks may still start MPI
        mpi_failures.unlink_shared_files()
    if comm.Get_size() == 1 and transport != "mpi":
        exit_monitor.watch_host(job.record, comm, 0)
        return
    host = mpi_communicators.host_of(comm)
    world.created.append(host)
    exit_monitor.watch_host(job.record, host, mpi_failures.place_in_world()[0])
    world.local_rank, world.local_size = host.Get_rank(), host.Get_size()
    hosts = Hosts.of(comm, host)
    world.host, world.hosts = hosts.host_of(comm.Get_rank()), len(hosts)
    if transport == "shared" and world.hosts > 1:
        for each in (host, comm):
            each.Free()
        raise ArgumentError("transport: 'shared' needs all ranks on one host; use 'auto' or 'mpi'")
    is_whole = comm.Get_size() == mpi_failures.place_in_world()[1]
    world.status_page = StatusPage.of_host(
        host, hosts.ranks[world.host], comm.Get_rank(), comm.Get_size() if is_whole else 0
    )
    if world.hosts > 1:
        world.elsewhere = OtherHosts.of(comm, hosts.ranks, world.status_page)
    world.status_page.describe(job_description(world.status_page.ranks, comm.Get_size(), world.hosts, world.elsewhere))
    world.base = base = MpiTransport(comm, world.pending)
    nested = transport == "auto" and hosts.nested
    if nested:
        # For the same bits where an array cannot be reduced in shared memory.
        base.prepare_fold = partial(prepared_reduction_by_hosts, hosts=hosts.ranks)
    if nested or (transport != "mpi" and world.hosts == 1):
        refusal = _open_memory(world, base, host, hosts)
        if refusal and comm.Get_rank() == 0:
            _log.warning("%s", refusal)
    if world.shared is None:
        host.Free()


def _open_memory(world: World, base: MpiTransport, host: Intracomm, hosts: Hosts) -> str:
    """Open the transport in the hosts' shared memory; return the reason where that fails, else ""; collective."""
    comm = world.comm
    can_open = HierarchicalTransport.can_open(comm, host) if hosts.nested else SharedTransport.can_open(host)
    if not can_open:
        return NO_ROOM % ("the transport itself", comm.Get_size())
    if not all(comm.allgather(mpi_communicators.shares_memory(host))):
        return NO_WINDOWS
    if hosts.nested:
        world.shared = HierarchicalTransport(base, host, hosts)
    else:
        world.shared = shared = SharedTransport(host, world.pending, base.comparisons)
        others = OtherMemory.open(shared.rendezvous)
        direct = None if others is None else DirectExchange(shared.rendezvous, others)
        world.staged = StagedCollectives(shared.slots, shared.is_common, direct)
    return ""


def _share_of_cores(comm: Intracomm | None) -> int:
    """Return this rank's share of the cores that it may run on."""
    mine = (os.uname().nodename, tuple(sorted(usable_cores())))
    sharers = 1 if comm is None else comm.allgather(mine).count(mine)
    return max(1, len(mine[1]) // sharers)


def _wants_checks(comm: Intracomm | None) -> bool:
    """Return whether ranks compare their calls: they do unless all have CLCOMM_CHECKS=off. The same on every rank."""
    wants = variables.is_on("CLCOMM_CHECKS")
    return wants if comm is None else any(comm.allgather(wants))
