"""The ranks of a job: their hosts, and the transports between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from clcomm.base.host import usable_cores
from clcomm.comm.collectives.arguments import address_of
from clcomm.comm.transport import mpi_communicators
from clcomm.comm.transport.base import Transport
from clcomm.comm.transport.mpi_runtime import Intracomm
from clcomm.comm.transport.pending import Pending
from clcomm.comm.transport.rendezvous import NoRendezvous, Rendezvous
from clcomm.comm.transport.solo import SoloTransport

if TYPE_CHECKING:
    from clcomm.comm.transport.base import BlockingCollectives
    from clcomm.comm.transport.host_memory import MemoryTransport
    from clcomm.comm.transport.staged import StagedCollectives
    from clcomm.comm.watch.other_hosts import OtherHosts
    from clcomm.comm.watch.status_page import StatusPage

T = TypeVar("T")

TRANSPORTS = ("auto", "shared", "mpi", "solo")

#: Warned once where shared memory is too small.
NO_ROOM = (
    "/dev/shm has no room for %s on %d ranks: reducing with more copies instead; enlarge it "
    "(docker run --shm-size=1g) for faster synchronisation"
)


@dataclass
class World:
    """The ranks and transports of a Communicator; by default a single rank without MPI."""

    #: The private duplicate of the mpi4py communicator; None without MPI.
    comm: Any = None
    #: mpi4py communicators that were made for it: its own and its host's. While it opens, ranks may wait in either.
    created: list[Intracomm] = field(default_factory=list)
    #: Moves any array between all ranks.
    base: Transport = field(default_factory=SoloTransport)
    #: Reduces arrays that it allocated itself; None without shared memory.
    shared: MemoryTransport | None = None
    #: Moves arrays in other memory in blocking calls, where all ranks are on one host that has shared memory.
    staged: StagedCollectives | None = None
    #: Unfinished operations of both.
    pending: deque[Pending] = field(default_factory=deque)
    local_rank: int = 0
    local_size: int = 1
    #: Index of this rank's host, and the number of hosts.
    host: int = 0
    hosts: int = 1
    #: This rank's share of the host's cores.
    cores: int = field(default_factory=lambda: len(usable_cores()))
    #: The Communicator's number, see `MpiResources`.
    number: int = 0
    #: At which ranks compare their calls.
    rendezvous: Rendezvous = field(default_factory=NoRendezvous)
    #: What the ranks of this host are doing; None for a single rank.
    status_page: StatusPage | None = None
    #: Reports what the ranks of other hosts are doing; None on a single host.
    elsewhere: OtherHosts | None = None
    #: Returns the address of an array's first element.
    address: Callable[[np.ndarray], int] = address_of

    def members(self) -> tuple[int, ...]:
        """Return the ranks' numbers in COMM_WORLD; empty where they are not known."""
        return () if self.comm is None else mpi_communicators.world_ranks(self.comm)

    def transport_for(self, *arrays: np.ndarray) -> Transport:
        """Return what moves these arrays: `shared` where it holds them all, else `base`."""
        if self.shared is not None and self.shared.holds(*arrays):
            return self.shared
        return self.base

    def blocking_for(self, *arrays: np.ndarray) -> BlockingCollectives:
        """Return what moves these arrays in a blocking call."""
        chosen = self.transport_for(*arrays)
        return self.staged if chosen is self.base and self.staged is not None else chosen

    def compares(self, transport: object) -> bool:
        """Return whether a transport, or a part of one, compares the ranks' calls itself: MPI compares nothing."""
        return transport is self.shared or transport is self.staged

    def is_common(self, array: np.ndarray) -> bool:
        """Return whether an array is memory common to all ranks of this host."""
        return self.shared is not None and self.shared.is_common(array)

    def bcast(self, obj: object, root: int) -> Any:
        """Return root's object, pickled; collective, and neither compared nor counted."""
        return obj if self.comm is None else self.comm.bcast(obj, root)

    def allgather(self, obj: T) -> list[T]:
        """Return every rank's object, pickled; collective, and neither compared nor counted."""
        return [obj] if self.comm is None else self.comm.allgather(obj)

    def close(self) -> None:
        """Forget the memory and MPI's communicator, which somebody else frees."""
        self.shared = self.staged = self.comm = None
        self.address = address_of  # MPI's function may not be called after MPI.Finalize
