"""The `hierarchical` transport: within a host through shared memory, between hosts through MPI.

An all-reduce has three parts. Each rank folds its shard of the range over its host's arrays, in rank order; ranks with
the same index on their hosts exchange their shards and fold them in the order of the hosts; and all ranks of a host
read the result in place. All ranks of a host communicate at once, each for its own shard, and the traffic of a host
does not grow with the number of its ranks. (The order of the 2D-torus all-reduce of Mikami et al., 2018:
reduce-scatter, all-reduce, all-gather; here the first and the last are memory reads.)

Where hosts have different numbers of ranks, the range is split into as many lanes as the smallest host has ranks, and
only that many ranks of each host communicate.

Before data moves, all ranks of all hosts compare their operations, and a mismatch is raised on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import numpy as np

from clcomm.transport.base import Transport, require_aligned
from clcomm.transport.host_memory import HostMemory
from clcomm.transport.hosts import Hosts
from clcomm.transport.meeting import MeetingPoint, WorldMeeting, length_and_dtype
from clcomm.transport.memory_transport import MemoryTransport
from clcomm.transport.mpi_communicators import comparison_between_hosts, lane_of
from clcomm.transport.mpi_failures import revoke
from clcomm.transport.mpi_runtime import Intracomm, Request
from clcomm.transport.mpi_transport import MpiTransport
from clcomm.transport.pending import Pending
from clcomm.transport.reduction import partial_op, prepared_reduction
from clcomm.transport.same_arrays import require_alike
from clcomm.transport.shards import shards


class HierarchicalTransport(MemoryTransport):
    """Collectives on arrays that `allocate` or `allocate_common` returned, or slices of them, over several hosts.

    Args:
        base: connects all ranks and folds by hosts (`prepared_reduction_by_hosts`); still owned by the caller.
        host: an mpi4py communicator of this host's ranks, in rank order, which this transport takes over.
        hosts: the ranks of each host.

    Raises:
        MismatchError: on every rank, if lengths or dtypes differ or ranks call different prepared operations.
    """

    name = "hierarchical"

    def __init__(self, base: MpiTransport, host: Intracomm, hosts: Hosts):
        self.base, self.hosts = base, hosts
        self.rank, self.world_size = base.rank, base.world_size
        self.memory = HostMemory(host)
        self._neighbours = list(hosts.ranks[hosts.host_of(self.rank)])  # on this host, this rank among them
        self._lane = self.memory.rank if self.memory.rank < hosts.fewest else None
        peers = lane_of(base.comm, self._lane, hosts.host_of(self.rank))
        # A mean divides by the number of all ranks once the hosts' sums are added.
        fold = partial(prepared_reduction, ranks=self.world_size)
        self._peers = None if peers is None else MpiTransport(peers, base.pending, fold)
        self._second_host = host.Dup()
        self.meeting = WorldMeeting(comparison_between_hosts(base.comm), self.memory.fence)

    @staticmethod
    def can_open(comm: Intracomm, host: Intracomm) -> bool:
        """Return whether each host's /dev/shm has room for the transport, the same on every rank; collective."""
        room = HostMemory.has_room(host, MeetingPoint.nbytes(host.Get_size()))
        return all(comm.allgather(room))

    def fits(self, nbytes: int, common: bool) -> bool:
        return all(self.base.comm.allgather(self.memory.fits(nbytes, common)))

    def all_agree(self, answer: bool) -> bool:
        self.meeting.barrier()
        return all(self.base.comm.allgather(answer))

    # --- all-reduce ---

    def all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        kind = length_and_dtype(source)
        self.meeting.barrier(kind)
        self._reduction((source, out), self.memory.point.exchange(self.memory.places(source, out), kind), op).run()

    def _reduction(self, arrays: tuple[np.ndarray, np.ndarray], everyone: np.ndarray, op: str) -> _Reduction:
        """Return the cached reduction of these arrays: for a device, building one takes longer than running it."""

        def make() -> _Reduction:
            sources, targets = self.memory.counterparts(arrays, everyone)
            return _Reduction(self, sources, targets, op)

        return self.memory.kept((op, everyone.tobytes()), make)

    def prepare_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Callable[[], None]:
        kind = length_and_dtype(source)
        self.meeting.barrier(kind)
        sources, targets = self.memory.meet(source, out)
        reduce = _Reduction(self, sources, targets, op).run

        def run() -> None:
            self.meeting.barrier(kind)
            reduce()

        return run

    def prepare_between_hosts(
        self, source: np.ndarray, out: np.ndarray, between: Callable[[Transport], int]
    ) -> Callable[[], int]:
        """Return an all-reduce in which `between` combines the hosts' sums; collective, and so is each call.

        Args:
            source: this rank's array.
            out: common to the host; holds the host's sum when `between` is called and the result when it returns.
            between: called on the first rank of each host with a transport of these ranks, in the order of the hosts;
                each call returns its return value on every rank of the host.
        """
        kind = length_and_dtype(source)
        self.meeting.barrier(kind)
        sources, _ = self.memory.meet(source, out)
        shard = shards(out, self.memory.ranks)[self.memory.rank]
        fold = prepared_reduction([row[shard] for row in sources], out[shard], "sum", fold=self.fold)
        point, leaders = self.memory.point, self._peers if self.memory.rank == 0 else None

        def run() -> int:
            self.meeting.barrier(kind)
            fold()
            point.barrier()
            agreed = 0 if leaders is None else between(leaders)
            return int(point.exchange([agreed])[0, 0])

        return run

    def start_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Pending:
        places = self.memory.places(source, out)
        first, everyone = self.base.comparisons.begin(self.meeting.tag, places)

        def fold() -> None:
            require_alike(everyone, arrays=2)
            require_aligned(source, out)
            reductions.append(self._reduction((source, out), everyone[self._neighbours, 1:], op))
            reductions[0].fold()

        reductions: list[_Reduction] = []
        return Pending(self.base.pending, first, fold, *self._later_phases(reductions, source), meets=True)

    def _later_phases(self, reductions: list[_Reduction], source: np.ndarray) -> list[Callable[[], Request]]:
        """Return the phases after the fold, which appends its reduction to the list."""
        phases: list[Callable[[], Request]] = []
        if not self.hosts.even:
            phases.append(self._second_host.Ibarrier)
        if self._peers is not None and self._lane is not None:
            cut = shards(source, self.hosts.fewest)[self._lane]
            count = self._peers.count_phases(source[cut].size, source.itemsize)
            phases += [partial(lambda at: reductions[0].exchange_phases[at](), at) for at in range(count)]

        def publish() -> Request:
            reductions[0].publish()
            return self._second_host.Ibarrier()

        return [*phases, publish]

    # --- other collectives: through MPI, which is aware of hosts itself ---

    def barrier(self) -> None:
        self.meeting.barrier()

    def broadcast(self, array: np.ndarray, root: int) -> None:
        self.meeting.barrier(length_and_dtype(array))
        self.base.broadcast(array, root)
        self.barrier()  # the array may be common to the host's ranks: no rank may use it before all have written it

    def all_gather(self, source: np.ndarray, out: np.ndarray) -> None:
        self.meeting.barrier(length_and_dtype(source))
        if not self.is_common(out):
            self.base.all_gather(source.copy() if np.may_share_memory(source, out) else source, out)
        else:
            gathered = np.empty_like(out)  # MPI may write intermediate values, which neighbours must not see
            self.base.all_gather(source, gathered)
            self.barrier()  # all ranks have sent their part of `out`
            np.copyto(out, gathered)
        self.barrier()

    def reduce_scatter(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        self.meeting.barrier(length_and_dtype(source))
        self.base.reduce_scatter(source, out, op)

    def gather(self, source: np.ndarray, out: np.ndarray | None, root: int) -> None:
        self.meeting.barrier(length_and_dtype(source))
        self.base.gather(source, out, root)

    def scatter(self, source: np.ndarray | None, out: np.ndarray, root: int) -> None:
        self.meeting.barrier(length_and_dtype(out))
        self.base.scatter(source, out, root)

    def all_to_all(self, sends: Sequence[np.ndarray], receives: Sequence[np.ndarray]) -> None:
        self.base.all_to_all(sends, receives)

    def close(self) -> None:
        self.memory.close()
        self._second_host.Free()
        if self._peers is not None:
            self._peers.close()
            self._peers.comm.Free()

    def revoke(self) -> None:
        revoke(self.memory.comm, self._second_host)
        if self._peers is not None:
            self._peers.revoke()


class _Reduction:
    """The parts of one all-reduce on this rank; the host's first target holds the partial sums."""

    def __init__(self, transport: HierarchicalTransport, sources: list[np.ndarray], targets: list[np.ndarray], op: str):
        hosts, memory = transport.hosts, transport.memory
        first, *others = memory.distinct(targets)
        shard = shards(first, memory.ranks)[memory.rank]
        # The first target may be row 0 of the sum, never a later row, so the fold can write to it.
        rows = [source[shard] for source in sources]
        self.fold = prepared_reduction(rows, first[shard], partial_op(op), fold=transport.fold)
        # With equally many ranks on all hosts a lane is a shard: a rank sends only what it has folded itself.
        self._meet = None if hosts.even else memory.point.barrier
        self._leave = memory.point.barrier
        self._exchange: Callable[[], None] | None = None
        self._copies: list[tuple[np.ndarray, np.ndarray]] = []
        peers, lane = transport._peers, transport._lane
        if peers is not None and lane is not None:
            cut = shards(first, hosts.fewest)[lane]
            mine = first[cut]
            self._exchange = peers.prepare_all_reduce(mine, mine, op)
            self._make_phases = partial(peers.later_phases, mine, mine, op)
            self._copies = [(other[cut], mine) for other in others]

    def run(self) -> None:
        """Reduce; all ranks of the host have written their sources."""
        self.fold()
        if self._meet is not None:
            self._meet()
        if self._exchange is not None:
            self._exchange()
        self.publish()
        self._leave()

    @cached_property
    def exchange_phases(self) -> list[Callable[[], Request]]:
        """The phases in which this rank's lane is exchanged between hosts."""
        return self._make_phases()

    def publish(self) -> None:
        """Copy the result of this rank's lane to targets in other memory."""
        for target, finished in self._copies:
            np.copyto(target, finished)
