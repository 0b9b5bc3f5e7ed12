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

from clcomm.comm.transport.base import Transport, require_aligned, require_alike
from clcomm.comm.transport.host_memory import HostMemory, MemoryTransport
from clcomm.comm.transport.hosts import Hosts
from clcomm.comm.transport.mpi_communicators import comparison_between_hosts, lane_of
from clcomm.comm.transport.mpi_failures import revoke
from clcomm.comm.transport.mpi_runtime import Intracomm, Request
from clcomm.comm.transport.mpi_transport import MpiTransport
from clcomm.comm.transport.pending import Pending
from clcomm.comm.transport.reduction import in_sequence, partial_op, prepared_reduction
from clcomm.comm.transport.rendezvous import HostRendezvous, MpiRendezvous, length_and_dtype
from clcomm.comm.transport.shards import shards


class HierarchicalTransport(MemoryTransport):
    """Collectives on arrays that `allocate` or `allocate_common` returned, or slices of them, over several hosts.

    Args:
        base: connects all ranks and folds by hosts (`prepared_reduction_by_hosts`); still owned by the caller.
        host: an mpi4py communicator of this host's ranks, in rank order, which this transport takes over.
        hosts: the ranks of each host.

    Attributes:
        lane: the index of this rank's part of what hosts exchange; None: it takes no part.
        peers: connects the ranks of this lane; None as `lane`.
        second_host: the host's ranks, for the later phases of pending operations.

    Raises:
        MismatchError: on every rank, if lengths or dtypes differ or ranks call different prepared operations.
    """

    name = "hierarchical"

    def __init__(self, base: MpiTransport, host: Intracomm, hosts: Hosts):
        self.base, self.hosts = base, hosts
        self.rank, self.world_size = base.rank, base.world_size
        self.memory = HostMemory(host)
        self._neighbours = list(hosts.ranks[hosts.host_of(self.rank)])  # on this host, this rank among them
        self.lane = self.memory.rank if self.memory.rank < hosts.fewest else None
        peers = lane_of(base.comm, self.lane, hosts.host_of(self.rank))
        # A mean divides by the number of all ranks once the hosts' sums are added.
        fold = partial(prepared_reduction, ranks=self.world_size)
        self.peers = None if peers is None else MpiTransport(peers, base.pending, fold)
        self.second_host = host.Dup()
        self.rendezvous = MpiRendezvous(comparison_between_hosts(base.comm), self.memory.fence)

    @staticmethod
    def can_open(comm: Intracomm, host: Intracomm) -> bool:
        """Return whether each host's /dev/shm has room for the transport, the same on every rank; collective."""
        room = HostMemory.has_room(host, HostRendezvous.nbytes(host.Get_size()))
        return all(comm.allgather(room))

    def fits(self, nbytes: int, common: bool) -> bool:
        return all(self.base.comm.allgather(self.memory.fits(nbytes, common)))

    def all_agree(self, answer: bool) -> bool:
        self.rendezvous.barrier()
        return all(self.base.comm.allgather(answer))

    # --- all-reduce ---

    def all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        kind = length_and_dtype(source)
        self.rendezvous.barrier(kind)
        self._reduction((source, out), self.memory.rendezvous.exchange(self.memory.places(source, out), kind), op).run()

    def _reduction(self, arrays: tuple[np.ndarray, np.ndarray], everyone: np.ndarray, op: str) -> _Reduction:
        """Return the cached reduction of these arrays: for a device, building one takes longer than running it."""
        make = partial(self._make_reduction, arrays, everyone, op)
        return self.memory.kept((op, everyone.tobytes()), make)

    def _make_reduction(self, arrays: tuple[np.ndarray, np.ndarray], everyone: np.ndarray, op: str) -> _Reduction:
        sources, targets = self.memory.counterparts(arrays, everyone)
        return _Reduction(self, sources, targets, op)

    def prepare_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Callable[[], None]:
        kind = length_and_dtype(source)
        self.rendezvous.barrier(kind)
        sources, targets = self.memory.meet(source, out)
        return in_sequence([partial(self.rendezvous.barrier, kind), _Reduction(self, sources, targets, op).run])

    def prepare_between_hosts(
        self, source: np.ndarray, out: np.ndarray, between: Callable[[Transport], int]
    ) -> Callable[[], int]:
        """Return an all-reduce in which `between` combines the hosts' sums; collective, and so is each run.

        Args:
            source: this rank's array.
            out: common to the host; holds the host's sum when `between` is called and the result when it returns.
            between: called on the first rank of each host with a transport of these ranks, in the order of the hosts;
                each run returns its return value on every rank of the host.
        """
        kind = length_and_dtype(source)
        self.rendezvous.barrier(kind)
        sources, _ = self.memory.meet(source, out)
        shard = shards(out, self.memory.ranks)[self.memory.rank]
        fold = prepared_reduction([row[shard] for row in sources], out[shard], "sum", fold=self.fold)
        leaders, on_host = self.peers if self.memory.rank == 0 else None, self.memory.rendezvous

        def run() -> int:
            self.rendezvous.barrier(kind)
            fold()
            on_host.barrier()
            agreed = 0 if leaders is None else between(leaders)
            return int(on_host.exchange([agreed])[0, 0])

        return run

    def start_all_reduce(self, source: np.ndarray, out: np.ndarray, op: str) -> Pending:
        return _BackgroundAllReduce(self, source, out, op).start()

    def reduction_at(self, arrays: tuple[np.ndarray, np.ndarray], everyone: np.ndarray, op: str) -> _Reduction:
        """Return the reduction of these arrays on this host, from the `places` of all ranks."""
        return self._reduction(arrays, everyone[self._neighbours], op)

    def phases_between_hosts(self, array: np.ndarray) -> int:
        """Return in how many phases this rank's lane of such an array is exchanged between hosts."""
        if self.peers is None or self.lane is None:
            return 0
        cut = shards(array, self.hosts.fewest)[self.lane]
        return self.peers.count_phases(array[cut].size, array.itemsize)

    # --- other collectives: through MPI ---

    def barrier(self) -> None:
        self.rendezvous.barrier()

    def broadcast(self, array: np.ndarray, root: int) -> None:
        self.rendezvous.barrier(length_and_dtype(array))
        self.base.broadcast(array, root)
        self._meet_on_host()  # the array may be common to the host: no rank may use it before all have written it

    def all_gather(self, source: np.ndarray, out: np.ndarray) -> None:
        """Gather; where the hosts' ranks have a part of common memory each, a host receives every row once."""
        self.rendezvous.barrier(length_and_dtype(source))
        if not self.is_common(out):
            self.base.all_gather(source.copy() if np.may_share_memory(source, out) else source, out)
            return
        rows = out.reshape(self.world_size, -1)
        ranks, gather = list(range(self.world_size)), self.base.all_gather
        if self.peers is not None and self.lane is not None and self.hosts.even:
            ranks, gather = [own[self.lane] for own in self.hosts.ranks], self.peers.all_gather
        # MPI may write intermediate values, which neighbours must not see.
        gathered = np.empty((len(ranks), source.size), source.dtype)
        gather(source, gathered.reshape(-1))
        self._meet_on_host()  # all ranks of the host have sent their part of `out`
        rows[ranks] = gathered
        self._meet_on_host()

    def _meet_on_host(self) -> None:
        self.memory.rendezvous.barrier()

    def reduce_scatter(self, source: np.ndarray, out: np.ndarray, op: str) -> None:
        self.rendezvous.barrier(length_and_dtype(source))
        self.base.reduce_scatter(source, out, op)

    def all_to_all(self, sends: Sequence[np.ndarray], receives: Sequence[np.ndarray]) -> None:
        self.base.all_to_all(sends, receives)

    def close(self) -> None:
        self.memory.close()
        self.second_host.Free()
        if self.peers is not None:
            self.peers.close()
            self.peers.comm.Free()

    def revoke(self) -> None:
        revoke(self.memory.comm, self.second_host)
        if self.peers is not None:
            self.peers.revoke()


class _BackgroundAllReduce:
    """An all-reduce in the background: its reduction is known once all ranks have started it."""

    _reduction: _Reduction

    def __init__(self, transport: HierarchicalTransport, source: np.ndarray, out: np.ndarray, op: str):
        self._transport, self._arrays, self._op = transport, (source, out), op

    def start(self) -> Pending:
        """Start it, for the operation that was announced last."""
        transport, places = self._transport, self._transport.memory.places(*self._arrays)
        first, self._everyone = transport.base.comparisons.begin(transport.rendezvous.tag, places)
        count = transport.phases_between_hosts(self._arrays[0])
        phases: list[Callable[[], Request | None]] = [self._fold]
        if not transport.hosts.even:
            phases.append(transport.second_host.Ibarrier)
        phases += [partial(self._exchange, at) for at in range(count)]
        return Pending(transport.base.pending, first, *phases, self._publish, meets=True)

    def _fold(self) -> None:
        require_alike(self._everyone, arrays=2)
        require_aligned(*self._arrays)
        self._reduction = self._transport.reduction_at(self._arrays, self._everyone[:, 1:], self._op)
        self._reduction.fold()

    def _exchange(self, at: int) -> Request:
        return self._reduction.exchange_phases[at]()

    def _publish(self) -> Request:
        self._reduction.publish()
        return self._transport.second_host.Ibarrier()


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
        self._meet = None if hosts.even else memory.rendezvous.barrier
        self._leave = memory.rendezvous.barrier
        self._exchange: Callable[[], None] | None = None
        self._copies: list[tuple[np.ndarray, np.ndarray]] = []
        peers, lane = transport.peers, transport.lane
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
