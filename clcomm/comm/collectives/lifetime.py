"""A Communicator's life in its job: MPI's resources, the watchdog, the hooks of the process's exits, and its end."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from clcomm.base.errors import OutputError
from clcomm.comm.collectives.parts import Parts
from clcomm.comm.collectives.runner import CollectiveRunner
from clcomm.comm.collectives.world import World
from clcomm.comm.stats.events import Observer
from clcomm.comm.stats.flight_recorder import FlightRecorder
from clcomm.comm.transport import mpi_runtime
from clcomm.comm.transport.mpi_resources import MpiResources
from clcomm.comm.watch.exits import hook_job
from clcomm.comm.watch.figures import Watched
from clcomm.comm.watch.job import Limits, OpenCommunicator, this_job

if TYPE_CHECKING:
    from clcomm.comm.watch.collective_watchdog import Watchdog
    from clcomm.comm.watch.stall_message import Unfinished

_ABANDON = "abandon()"


class LastingCommunicator(OpenCommunicator, Watched, Protocol):
    """The Communicator, as this file uses it."""

    def add_observer(self, observer: Observer) -> None:
        """Notify an observer of collectives from now on."""


class Lifetime:
    """Ties a Communicator to its job, and closes it: with the other ranks, without them, or as the program ends.

    Args:
        world: its ranks, whose transports are closed too.
        runner: runs its collectives.
        limits: the time limits of these.
        name: the Communicator's.

    Attributes:
        limits: those in force.
        parts: what it was split into.
        resources: those of MPI; None without MPI.
        watchdog: None where there is nothing to watch.
    """

    def __init__(self, world: World, runner: CollectiveRunner, limits: Limits, name: str):
        self._world, self._runner, self.limits, self._name = world, runner, limits, name
        self.parts = Parts()
        self.resources: MpiResources | None = None
        self.watchdog: Watchdog | None = None
        self._recorder = FlightRecorder()

    def begin(self, owner: LastingCommunicator) -> None:
        """Begin with the Communicator that is now complete, and that this object does not keep alive."""
        self._owner, world = weakref.ref(owner), self._world
        owner.add_observer(self._recorder)
        if world.comm is not None:
            held = [each for each in (world.shared, world.base) if each is not None]
            everyone = this_job().communicators
            self.resources = MpiResources(owner, world.comm, held, world.pending, world.number, everyone, self._name)
        self.keep_alive()
        self._watch(owner)

    def keep_alive(self) -> None:
        """Let the job's hooks keep this Communicator and its parts alive from now on, in place of any other."""
        owner = self._owner()
        if owner is not None and self._world.base.world_size > 1:
            hook_job().opened(owner)

    def set_timeout(self, timeout_s: float) -> None:
        """See `Communicator.set_timeout`."""
        self._runner.require_open()
        self.limits = Limits.of(self.limits.stall_warning_s, timeout_s)
        owner = self._owner()
        if owner is not None:
            self._watch(owner)

    def _watch(self, owner: LastingCommunicator) -> None:
        """Start the watchdog where there is something to watch, or let it have the present limits."""
        world = self._world
        if self.watchdog is not None:
            self.watchdog.limits = self.limits
        elif world.base.world_size > 1 and world.status_page is not None and self.limits:
            from clcomm.comm.watch.collective_watchdog import Watchdog

            self.watchdog = Watchdog(
                owner, world.status_page, self.limits, self._recorder, world.elsewhere, self.resources
            )

    def dump_operations(self, folder: str, unfinished: Unfinished) -> None:
        """See `Communicator.dump_operations`."""
        from clcomm.comm.watch.stall_message import Dump  # here, as few programs need it

        base = self._world.base
        try:
            Dump(base.rank, base.world_size, self._recorder, self.resources).write(
                folder, unfinished, threading.get_ident()
            )
        except OSError as error:
            raise OutputError(
                f"folder: expected a writable one without files of an earlier dump, got {folder!r}: {error}"
            ) from error

    @property
    def collectives_begun(self) -> int:
        """How many collectives this rank has begun, in the Communicator's parts too."""
        return self._runner.sequence + self.parts.collectives_begun

    # --- the end ---

    def finalize(self, require_complete: Callable[[], None]) -> None:
        """See `Communicator.finalize`; require_complete: refuses messages that are on their way."""
        if self._runner.closed_by:
            return
        self.parts.finalize()
        require_complete()
        self._runner.run_uncounted("finalize", lambda: None)
        self._end("finalize()")
        if self.resources is not None:
            self.resources.free()

    def abandon(self) -> None:
        """See `Communicator.abandon`."""
        if self._runner.closed_by:
            return
        self.parts.abandon()
        transports, pending = (self._world.shared, self._world.base), self._runner.pending
        self._end(_ABANDON)
        while pending:
            pending[0].fail(mpi_runtime.closed(_ABANDON))
        if self.resources is not None:
            self.resources.forget()
        for transport in transports:
            if transport is not None:
                transport.revoke()

    @property
    def is_abandoned(self) -> bool:
        """Whether `abandon` has closed it."""
        return self._runner.closed_by == _ABANDON

    def leave_program(self) -> None:
        """Notify the other ranks that this rank's program has ended."""
        if self.watchdog is not None:
            self.watchdog.leave(self._runner.sequence)

    def look_back(self, deadline: float) -> str:
        """Return the collective in which another rank waits for this one, whose program has ended; "" for none.

        deadline: until when to look, by time.perf_counter().
        """
        return "" if self.watchdog is None else self.watchdog.look_back(self._runner.sequence, deadline)

    def leave_mpi(self) -> None:
        """Close the Communicator because the program calls MPI.Finalize(); no other call may follow."""
        self._end(mpi_runtime.FINALIZE)

    def _end(self, closed_by: str) -> None:
        self._runner.closed_by = closed_by
        self._world.close()
        owner = self._owner()
        if owner is not None:
            hook_job().closed(owner)
        if self.watchdog is not None:
            self.watchdog.stop()
        if self._world.status_page is not None:
            self._world.status_page.hide()
        if self._world.elsewhere is not None:
            self._world.elsewhere.close()
