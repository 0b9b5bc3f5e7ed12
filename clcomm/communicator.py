"""The Communicator: NumPy arrays and objects between ranks, checked, timed and counted.

Each collective is one short method: check the arguments, let a transport move the data, tell the observers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np

from clcomm import exits
from clcomm.all_reduce import AllReduces
from clcomm.arguments import address_of, agreed_size, size_or_error
from clcomm.collectives import ArrayCollectives
from clcomm.flight_recorder import FlightRecorder
from clcomm.holdings import Holdings, free_dropped
from clcomm.host_memory import aligned_zeros
from clcomm.limits import Limits
from clcomm.lizardist_calls import LizarDistCalls, by_position
from clcomm.start_watch import StartWatch
from clcomm.stats import CommStats, Observer
from clcomm.transport import mpi as mpi_transport
from clcomm.transport.memory import MemoryTransport
from clcomm.units import format_size, parse_size
from clcomm.watchdog import Watchdog
from clcomm.world import NO_ROOM, join

#: In place of a bucket size: the Synchronizer looks for the fastest.
AUTO = "auto"
_DEFAULT_BUCKET_SIZE = "1MiB"
_log = logging.getLogger("clcomm")

if mpi_transport.launched_ranks() > 1:
    exits.watch()  # now, so that a rank that fails before it has a Communicator ends the others too


class Communicator(AllReduces, ArrayCollectives, LizarDistCalls):
    """The ranks of a job and the collectives between them.

    comm: an mpi4py communicator; None takes COMM_WORLD, and a world of one where there is no MPI. Either way a
        private duplicate carries the traffic. Creating a Communicator is collective. A number in its place is the
        bucket size, as LizarDist has it.
    use_bucketing: False reduces each gradient on its own.
    bucket_size: bytes, or text such as "4MiB", by default 1 MiB: how much of the gradients one all-reduce takes. "auto"
        lets each Synchronizer find the fastest; it is 1 MiB elsewhere.
    transport: "auto" reduces what `allocate` returned in the shared memory of each host, and moves the rest, and what
        goes between hosts, through MPI; "mpi" never uses shared memory; "shared" insists on it, on one host.
    observers: told about every finished collective, after `stats`.
    stall_warning_s, timeout_s: after how long in one collective a rank says which ranks are missing, and after how long
        it ends the job (docs/robustness.md); 0: never. CLCOMM_STALL_WARNING_S and CLCOMM_TIMEOUT_S override them.

    Raises ArgumentError for a bad argument, LaunchError when mpiexec belongs to another MPI, ResourceError when MPI has
    no communicators left, and MismatchError on every rank where ranks differ in an argument, an option or a version.
    """

    def __init__(
        self,
        comm: Any = None,
        use_bucketing: bool = True,
        *,
        bucket_size: int | str = _DEFAULT_BUCKET_SIZE,
        transport: str = "auto",
        observers: Iterable[Observer] = (),
        stall_warning_s: float = 10.0,
        timeout_s: float = 300.0,
    ):
        comm, bucket_size = by_position(comm, bucket_size, _DEFAULT_BUCKET_SIZE)
        self.auto_bucket_size = isinstance(bucket_size, str) and bucket_size == AUTO
        self.bucket_size = parse_size(_DEFAULT_BUCKET_SIZE if self.auto_bucket_size else bucket_size)
        self.use_bucketing = use_bucketing
        self.transport = transport
        self._warned_fallback = False
        self.limits = limits = Limits.of(stall_warning_s, timeout_s)
        with StartWatch(limits):
            world = join(comm, transport, limits, {"bucket_size": bucket_size, "use_bucketing": bool(use_bucketing)})
        self._holdings = None
        if world.comm is not None:
            held = [each for each in (world.shared, world.base) if each is not None]
            self._holdings = Holdings(self, world.comm, held, world.pending, world.number)
        super().__init__(world, observers)
        self._elsewhere, self._watchdog = world.elsewhere, None
        if self.size > 1:
            exits.opened(self)
        if self.size > 1 and world.board is not None and limits:
            recorder = FlightRecorder()
            self.add_observer(recorder)
            self._watchdog = Watchdog(self, world.board, limits, recorder, world.elsewhere, self._holdings)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.size

    # --- memory ---

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return a zeroed uint8 array of this rank; in shared memory where the transport has it. Collective."""
        return self._allocate(nbytes, common=False)

    def allocate_common(self, nbytes: int) -> np.ndarray:
        """Return a zeroed uint8 array that is one memory on all ranks where they share a host. Collective.

        As `out` of an all-reduce it lets each byte of a result be written once. Elsewhere it is an ordinary array.
        """
        return self._allocate(nbytes, common=True)

    def _allocate(self, nbytes: int, common: bool) -> np.ndarray:
        self._planned.clear()
        nbytes = agreed_size(self._agree("allocate", self._allgather, size_or_error(nbytes, "nbytes")))
        if self._shared is not None:
            if self._has_room(self._shared, nbytes, common):
                with mpi_transport.taking_communicators():
                    return self._shared.allocate_common(nbytes) if common else self._shared.allocate(nbytes)
            self._warn_fallback(nbytes)
        return aligned_zeros(nbytes)

    def _has_room(self, shared: MemoryTransport, nbytes: int, common: bool) -> bool:
        """Make room, of what dropped Communicators leave behind if need be, and say whether there is enough."""
        if shared.make_room(nbytes, common):
            return True
        free_dropped(self.comm, is_short=True)
        return shared.make_room(nbytes, common)

    def _warn_fallback(self, nbytes: int) -> None:
        if self.rank == 0 and not self._warned_fallback:
            _log.warning(NO_ROOM, f"{format_size(nbytes)} a rank", self.size)
        self._warned_fallback = True

    # --- stats and the end ---

    def merged_stats(self) -> CommStats:
        """Return the stats of an average rank, on every rank; collective."""
        return CommStats.merged(self._agree("merged_stats", self._allgather, self.stats.state()), self.size)

    def finalize(self) -> None:
        """Free communicators, and shared memory that no array lies in any more; collective, and no call may follow.

        A second `finalize()` does nothing; the stats remain.
        """
        if self._finalized:
            return
        self._agree("finalize", lambda: None)
        self._leave("finalize()")
        if self._holdings is not None:
            self._holdings.free()

    def abandon(self) -> None:
        """Give the Communicator up without the other ranks, some of which are gone; no call may follow.

        Ranks that wait in one of its collectives get MPI's error. What it allocated stays until the process ends.
        """
        transports = self._shared, self._base
        self._leave("abandon()")
        if self._holdings is not None:
            self._holdings.forget()
        for transport in transports:
            if transport is not None:
                transport.revoke()

    def leave_program(self) -> None:
        """Let the other ranks know that this rank's program is over."""
        if self._watchdog is not None:
            self._watchdog.leave()

    def look_back(self, deadline: float) -> str:
        """Return what another rank waits in that needs this one, whose program is over; "" if none does until then.

        deadline: by time.perf_counter().
        """
        return "" if self._watchdog is None else self._watchdog.look_back(self._sequence, deadline)

    def leave_mpi(self) -> None:
        """Close, as the program calls MPI.Finalize(), which frees what this holds; no call may follow."""
        self._leave(mpi_transport.FINALIZE)

    def _leave(self, closed_by: str) -> None:
        self._finalized, self._closed_by = True, closed_by
        self._shared, self.comm = None, None
        self._address = address_of  # MPI's own needs MPI
        exits.finalized(self)
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._elsewhere is not None:
            self._elsewhere.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.finalize()
