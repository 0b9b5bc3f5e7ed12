"""The Communicator: NumPy arrays and objects between ranks, checked, timed and counted.

Each collective is one short method: check the arguments, let a transport move the data, notify the observers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.collectives.all_reduce import AllReduces
from clcomm.collectives.arguments import address_of, agreed_size, size_or_error
from clcomm.collectives.arrays import ArrayCollectives
from clcomm.collectives.lizardist import LizarDistCalls, by_position
from clcomm.collectives.world import NO_ROOM, World
from clcomm.errors import MismatchError, RankNames
from clcomm.host import variables
from clcomm.host.arrays import aligned_zeros
from clcomm.job.time_limits import Limits
from clcomm.stats.comm_stats import CommStats, Observer
from clcomm.transport import mpi_communicators, mpi_runtime
from clcomm.transport.mpi_runtime import Intracomm
from clcomm.units import format_size, parse_size

if TYPE_CHECKING:
    from clcomm.job.collective_watchdog import Watchdog
    from clcomm.transport.mapped_files import MappedFile
    from clcomm.transport.memory_transport import MemoryTransport

#: In place of a bucket size: the Synchronizer looks for the fastest.
AUTO = "auto"
_DEFAULT_BUCKET_SIZE = "1MiB"
_ABANDON = "abandon()"
_log = logging.getLogger("clcomm")

if mpi_runtime.is_one_of_several():
    from clcomm.job.exits import hook_job

    hook_job()  # now, so that a rank that fails before it has a Communicator ends the others too


class Communicator(AllReduces, ArrayCollectives, LizarDistCalls):
    """The ranks of a job and the collectives between them.

    Creating one is collective. A private duplicate of the MPI communicator carries its traffic.

    Args:
        comm: an mpi4py communicator; None: COMM_WORLD, or a world of one without MPI. A number is the bucket size, as
            in LizarDist.
        use_bucketing: False reduces each gradient on its own.
        bucket_size: bytes, or text such as "4MiB", by default 1 MiB: the size of one all-reduce of gradients. "auto":
            each Synchronizer finds the fastest; elsewhere it is 1 MiB.
        transport: "auto" reduces memory of `allocate` in each host's shared memory, and everything else through MPI;
            "mpi" never uses shared memory; "shared" requires it, on one host.
        observers: notified of every finished collective, after `stats`.
        stall_warning_s: seconds in one collective after which a rank logs which ranks are missing; 0: never.
            CLCOMM_STALL_WARNING_S overrides it.
        timeout_s: seconds in one collective after which a rank ends the job (docs/robustness.md); 0: never.
            CLCOMM_TIMEOUT_S overrides it.
        name: what messages and tables call these ranks, such as a mesh's axis; "": they are named by number alone.

    Raises:
        ArgumentError: an argument is invalid.
        LaunchError: mpiexec belongs to another MPI.
        ResourceError: MPI has no communicators left.
        MismatchError: ranks differ in an argument, an option or a version; on every rank.
    """

    def __init__(
        self,
        comm: Intracomm | None = None,
        use_bucketing: bool = True,
        *,
        bucket_size: int | str = _DEFAULT_BUCKET_SIZE,
        transport: str = "auto",
        observers: Iterable[Observer] = (),
        stall_warning_s: float = 10.0,
        timeout_s: float = 300.0,
        name: str = "",
    ):
        from clcomm.job.exits import hook_job  # here, as an import hooks nothing

        self._hooks = hook_job()
        comm, bucket_size = by_position(comm, bucket_size, _DEFAULT_BUCKET_SIZE)
        self.auto_bucket_size = isinstance(bucket_size, str) and bucket_size == AUTO
        self.bucket_size = parse_size(_DEFAULT_BUCKET_SIZE if self.auto_bucket_size else bucket_size)
        self.use_bucketing = use_bucketing
        self.transport, self.name = transport, name
        self._given_observers = tuple(observers)
        self._warned_fallback = False
        variables.require_valid()
        self.limits = limits = Limits.of(stall_warning_s, timeout_s)
        world = World()
        if transport != "solo":
            from clcomm.collectives.connection import open_world  # here, as one rank alone needs no transports

            compared = {"bucket_size": bucket_size, "use_bucketing": bool(use_bucketing), "name": name}
            world = open_world(comm, transport, limits, compared)
        self._parts: list[Communicator] = []
        self._resources = None
        if world.comm is not None:
            from clcomm.job.job import this_job
            from clcomm.transport.mpi_resources import MpiResources

            held = [each for each in (world.shared, world.base) if each is not None]
            everyone = this_job().communicators
            self._resources = MpiResources(self, world.comm, held, world.pending, world.number, everyone, name)
        names = RankNames(name) if self._resources is None else self._resources.names
        super().__init__(world, self._given_observers, names)
        self._elsewhere, self._status_page = world.elsewhere, world.status_page
        self._watchdog: Watchdog | None = None
        #: Raises a collective's time-out in the program, which may catch it; None: the job ends. See Watchdog.
        self.interrupt: Callable[[str, float, Callable[[], None]], bool] | None = None
        if self.size > 1:
            self._hooks.opened(self)
        self._watch()

    def _watch(self) -> None:
        """Start the watchdog where there is something to watch, or let it have the present limits."""
        if self._watchdog is not None:
            self._watchdog.limits = self.limits
        elif self.size > 1 and self._status_page is not None and self.limits:
            from clcomm.job.collective_watchdog import Watchdog
            from clcomm.stats.flight_recorder import FlightRecorder

            recorder = FlightRecorder()
            self.add_observer(recorder)
            self._watchdog = Watchdog(self, self._status_page, self.limits, recorder, self._elsewhere, self._resources)

    def set_timeout(self, timeout_s: float) -> None:
        """Set after how many seconds in one collective this rank ends the job, 0: never; also in one that runs now.

        The parts that `split` made keep theirs. CLCOMM_TIMEOUT_S overrides it. Raises ArgumentError for what is no
        number of seconds.
        """
        self._require_open()
        self.limits = Limits.of(self.limits.stall_warning_s, timeout_s)
        self._watch()

    @property
    def bucket_size(self) -> int:
        """The bytes of one all-reduce of gradients; settable, for Synchronizers that are made later."""
        return self._bucket_size

    @bucket_size.setter
    def bucket_size(self, nbytes: int | str) -> None:
        self._bucket_size = parse_size(nbytes)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.size

    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments, without `comm`, for a Communicator of other ranks with these settings."""
        return {
            "use_bucketing": self.use_bucketing,
            "bucket_size": AUTO if self.auto_bucket_size else self.bucket_size,
            "transport": self.transport,
            "observers": self._given_observers,
            "stall_warning_s": self.limits.stall_warning_s,
            "timeout_s": self.limits.timeout_s,
            "name": self.name,
        }

    # --- parts ---

    def split(self, color: int | None, key: int | None = None, *, name: str = "") -> Communicator | None:
        """Return a Communicator of the ranks with the same color, with these settings and memory of its own.

        Collective. Like MPI_Comm_split (MPI 4.1, section 7.4.2). `finalize()` closes it together with this one.

        Args:
            color: the part of this rank, a number from 0 up; None: it is in none, and gets None.
            key: ranks are ordered by it, and by their rank here where it is equal; None: by their rank here.
            name: the part's. Its collectives and phases are then reported to this Communicator's observers too, its
                `stats` among them, with that name as their `part`.

        Raises:
            ArgumentError: an argument is invalid; on every rank.
            ResourceError: MPI has no communicators left.
            MismatchError: the ranks of a part differ in its name.
        """
        from clcomm.collectives.parts import PartEvents, Wanted, members_of

        wanted = Wanted.of(color, self.rank if key is None else key, name)
        everyone = self._run_uncounted("split", self._allgather, wanted)
        members = members_of(everyone, self.rank, self.name_ranks)
        settings = self.settings() | {"observers": (), "name": name}
        if self.comm is None:
            part = Communicator(**settings) if members else None
        else:
            part = self._split_off(members, settings)
        self._parts = [each for each in self._parts if not each._finalized]
        if part is not None:
            self._parts.append(part)
            if name:
                part.add_observer(PartEvents(self, name, members))
        if self.size > 1:
            self._hooks.opened(self)  # the latest again, as it keeps its parts
        return part

    def _split_off(self, members: list[int], settings: dict[str, Any]) -> Communicator | None:
        """Return a Communicator of these ranks, None if there are none; collective over all ranks of this one."""
        with mpi_communicators.taking_communicators():
            place = members.index(self.rank) if members else 0
            lane = mpi_communicators.lane_of(self.comm, min(members, default=None), place)
        if lane is None:
            return None
        try:
            return (
                Communicator(lane, **settings) if len(members) > 1 else Communicator(**settings | {"transport": "solo"})
            )
        finally:
            lane.Free()

    @property
    def collectives_begun(self) -> int:
        """How many collectives this rank has begun, in the Communicator's parts too."""
        return self._sequence + sum(part.collectives_begun for part in self._parts)

    # --- memory ---

    @property
    def shares_memory(self) -> bool:
        """Whether `allocate` returns shared memory, as long as there is room."""
        return self._shared is not None

    def holds(self, array: np.ndarray) -> bool:
        """Return whether an array is in memory of `allocate` or `allocate_common`, where collectives need no copy."""
        return self._shared is not None and self._shared.holds(array)

    def holds_at(self, address: int, nbytes: int) -> bool:
        """Return whether these bytes of the process are in such memory."""
        return self._shared is not None and self._shared.holds_at(address, nbytes)

    def all_agree(self, answer: bool, purpose: str) -> bool:
        """Return whether all ranks answer True; collective, the same on every rank, and not counted.

        purpose: what messages call it where ranks differ in their collectives.
        """
        if self._shared is None:
            return all(self._run_uncounted(purpose, self._allgather, answer))
        self._complete_in_flight()
        call = self._call(purpose, self._shared, is_counted=False)
        return self._compare_and_move(call, self._sequence, time.perf_counter(), self._shared.all_agree, (answer,))

    def allocate(self, nbytes: int, *, purpose: str = "allocate") -> np.ndarray:
        """Return a zeroed uint8 array of this rank, in shared memory where available. Collective.

        purpose: what messages call it where ranks differ in their collectives.
        """
        return self._allocate(nbytes, common=False, purpose=purpose)

    def allocate_common(self, nbytes: int) -> np.ndarray:
        """Return a zeroed uint8 array, in memory common to all ranks of a host where available. Collective.

        As `out` of an all-reduce it makes ranks write each byte of the result once. Elsewhere it is an ordinary array.
        """
        return self._allocate(nbytes, common=True)

    def _allocate(self, nbytes: int, common: bool, purpose: str = "allocate") -> np.ndarray:
        self._planned.clear()
        nbytes = agreed_size(self._run_uncounted(purpose, self._allgather, size_or_error(nbytes, "nbytes")))
        if self._shared is not None:
            if self._has_room(self._shared, nbytes, common):
                with mpi_communicators.taking_communicators():
                    return self._shared.allocate_common(nbytes) if common else self._shared.allocate(nbytes)
            self._warn_fallback(nbytes)
        return aligned_zeros(nbytes)

    def adopt(
        self,
        sizes: Sequence[int],
        move: Callable[[], Sequence[MappedFile]],
        *,
        purpose: str = "adopt",
        require_equal: bool = False,
    ) -> bool:
        """Let the other ranks of the host use blocks of this rank in place, like memory of `allocate`. Collective.

        Args:
            sizes: of the blocks, in bytes.
            move: moves the blocks into mapped files. It is called where all ranks gave the same sizes and have room.
            purpose: what messages call it where ranks differ in their collectives.
            require_equal: raise MismatchError, on every rank, where sizes differ.

        Returns:
            Whether the blocks are now such memory, the same on every rank of a host.
        """
        everyone = self._run_uncounted(purpose, self._allgather, tuple(sizes))
        other = next((rank for rank, each in enumerate(everyone) if each != everyone[0]), 0)
        if other and require_equal:
            raise MismatchError(
                f"{purpose}: expected the same sizes on every rank, got {list(everyone[0])} bytes on rank 0, "
                f"{list(everyone[other])} on rank {other}"
            )
        if self._shared is None or not sizes or other:
            return False
        self._planned.clear()
        return self._has_room(self._shared, sum(sizes), common=False) and self._shared.adopt(move())

    def free_unused(self) -> None:
        """Free shared memory in which no rank has an array left, as `allocate` does first; collective."""
        free = (lambda: None) if self._shared is None else self._shared.memory.free_unused
        self._run_uncounted("free_unused", free)

    def _has_room(self, shared: MemoryTransport, nbytes: int, common: bool) -> bool:
        """Return whether there is room for an allocation, after freeing dropped Communicators if needed."""
        if shared.make_room(nbytes, common):
            return True
        from clcomm.job.job import this_job

        this_job().communicators.free_dropped(self.comm, is_short=True)
        return shared.make_room(nbytes, common)

    def _warn_fallback(self, nbytes: int) -> None:
        if self.rank == 0 and not self._warned_fallback:
            _log.warning(NO_ROOM, f"{format_size(nbytes)} a rank", self.size)
        self._warned_fallback = True

    # --- stats and the end ---

    def merged_stats(self) -> CommStats:
        """Return the stats of a mean rank, on every rank; collective."""
        states = self._run_uncounted("merged_stats", self._allgather, self.stats.state())
        return CommStats.merged(states, self.size, self.name)

    def finalize(self) -> None:
        """Free communicators, and shared memory without arrays; collective, and no other call may follow.

        Parts that `split` made are closed first. A second `finalize()` does nothing; the stats remain readable.
        """
        if self._finalized:
            return
        for part in self._parts:
            part.finalize()
        self._run_uncounted("finalize", lambda: None)
        self._leave("finalize()")
        if self._resources is not None:
            self._resources.free()

    def abandon(self) -> None:
        """Close the Communicator without the other ranks, after some have failed; no other call may follow.

        Ranks that block in one of its collectives get MPI's error. Its memory stays until the process ends.
        """
        if self._finalized:
            return
        for part in self._parts:
            part.abandon()
        transports = self._shared, self._base
        self._leave(_ABANDON)
        while self._pending:
            self._pending[0].fail(mpi_runtime.closed(_ABANDON))
        if self._resources is not None:
            self._resources.forget()
        for transport in transports:
            if transport is not None:
                transport.revoke()

    @property
    def is_abandoned(self) -> bool:
        """Whether `abandon` has closed it, so that what was begun will never be complete."""
        return self._closed_by == _ABANDON

    def leave_program(self) -> None:
        """Notify the other ranks that this rank's program has ended."""
        if self._watchdog is not None:
            self._watchdog.leave(self._sequence)

    def look_back(self, deadline: float) -> str:
        """Return the collective in which another rank waits for this one, whose program has ended; "" for none.

        deadline: until when to look, by time.perf_counter().
        """
        return "" if self._watchdog is None else self._watchdog.look_back(self._sequence, deadline)

    def leave_mpi(self) -> None:
        """Close the Communicator because the program calls MPI.Finalize(); no other call may follow."""
        self._leave(mpi_runtime.FINALIZE)

    def _leave(self, closed_by: str) -> None:
        self._finalized, self._closed_by = True, closed_by
        self._shared, self.comm = None, None
        self._address = address_of  # MPI's function may not be called after MPI.Finalize
        self._hooks.closed(self)
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._status_page is not None:
            self._status_page.hide()
        if self._elsewhere is not None:
            self._elsewhere.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.finalize()
