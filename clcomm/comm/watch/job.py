"""The job that this process belongs to: what is there once for all of its Communicators, until the process ends."""

from __future__ import annotations

import itertools
import time
import weakref
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol

from clcomm.comm.transport.mpi_resources import AllResources
from clcomm.comm.watch.rank_record import RankRecord
from clcomm.comm.watch.restarts import ProgressFile

if TYPE_CHECKING:
    from clcomm.base.storage.writer_lock import WriterLocks
    from clcomm.comm.stats.call import Call
    from clcomm.comm.watch.time_limits import Limits


class Averaging(Protocol):
    """The averaging of a model's gradients: `clcomm.sync.model_sync`."""

    def stop_overlap(self) -> None:
        """Stop following the model's backward."""

    def flip_bit(self, where: int) -> str:
        """Flip a bit of the model's memory, and return what was hit, in words; "" where there is nothing to flip."""


class OpenLifetime(Protocol):
    """An open Communicator's life in the job: `clcomm.comm.collectives.lifetime`."""

    limits: Limits

    @property
    def collectives_begun(self) -> int:
        """The number of collectives that this rank has begun."""

    def leave_program(self) -> None:
        """Write that this rank has left the program."""

    def look_back(self, deadline: float) -> str:
        """Return the collective in which another rank waits for this one; "" for none."""


class OpenCommunicator(Protocol):
    """A Communicator as the hooks of its process's exits use it."""

    @property
    def lifetime(self) -> OpenLifetime:
        """Its life in the job."""

    @property
    def current(self) -> tuple[Call, int, float] | None:
        """The collective that it is in: (call, sequence number, begin in perf_counter's seconds); None outside."""

    @property
    def sequence(self) -> int:
        """The number of its last collective."""


class Hooks(Protocol):
    """The hooks of the process's exits: `clcomm.comm.watch.exits`."""

    def opened(self, communicator: OpenCommunicator) -> None:
        """Register an open Communicator of several ranks."""

    def closed(self, communicator: OpenCommunicator) -> None:
        """Deregister a closed Communicator."""


class Queue(Protocol):
    """Collectives that a thread of their own runs one after another."""

    def close(self, within_s: float | None = None) -> bool:
        """Complete what was started and end the thread; return whether it has ended within this time, None: any."""


class Started(Protocol):
    """An operation that all ranks have started: `clcomm.horovod.handles`."""

    def run_ended(self) -> None:
        """Run it, if it was ended without a result."""


class StartedOperations:
    """What was started and is not dropped yet, in the order of the starts."""

    def __init__(self) -> None:
        self._count = itertools.count()
        self._operations: weakref.WeakValueDictionary[int, Started] = weakref.WeakValueDictionary()

    def add(self, operation: Started) -> None:
        """Add one that has just been started."""
        self._operations[next(self._count)] = operation

    def run_ended(self) -> None:
        """Run what was started, in the order of the starts, after a rank that has joined has ended all of it."""
        for _, operation in sorted(self._operations.items()):
            operation.run_ended()


class Job:
    """This process's part in a job.

    Attributes:
        record: this rank's step and state, for messages and the exit monitor.
        progress: the same for `clcomm run`.
        averagings: by the id of a model, the averaging of its gradients that was used last: no other follows the
            model's backward.
        communicators: the MPI resources of all Communicators.
        hooks: of the process's exits, from the first Communicator or `clcomm run` on.
        queues: collectives that run in threads beside the program.
        started: operations of all ranks that a program completes later.
        declared: the facts on the program that ranks compare at their start (`clcomm/comm/collectives/same_start.py`).
        warned: the warnings of that comparison that were logged.
        copies: numbers the states that are copied to memory (`clcomm/jobs/checkpoint/memory.py`).
        is_reported: whether this process's end has been reported.
        is_signalled: whether a signal has ended its program.
        wrapped: the last error that another library may have wrapped in its own, behind its text.
    """

    def __init__(self) -> None:
        self.record, self.progress, self.communicators = RankRecord(), ProgressFile(), AllResources()
        self.averagings: weakref.WeakValueDictionary[int, Averaging] = weakref.WeakValueDictionary()
        self.hooks: Hooks | None = None
        self.queues: weakref.WeakSet[Queue] = weakref.WeakSet()
        self.started = StartedOperations()
        self.declared: tuple[Any, ...] = ()
        self.warned: set[str] = set()
        self.copies = itertools.count()
        self.is_reported = self.is_signalled = False
        self.wrapped: tuple[str, BaseException] | None = None

    @cached_property
    def locks(self) -> WriterLocks:
        """The locks on files that this process writes."""
        from clcomm.base.storage.writer_lock import WriterLocks  # here, as few processes of a job lock files

        return WriterLocks()

    def finish_queues(self, within_s: float | None = None) -> bool:
        """Complete what runs in other threads and end these; return whether all have ended within this time, None: any.

        MPI_Finalize crashes while another thread is in MPI, and a thread that Python's end stops within a function of
        C++ ends the process by SIGABRT.
        """
        began_s = time.monotonic()
        left_s = None
        ended = []
        for queue in list(self.queues):
            if within_s is not None:
                left_s = max(0.0, began_s + within_s - time.monotonic())
            ended.append(queue.close(left_s))
        return all(ended)


@cache
def this_job() -> Job:
    """Return the job of this process, made by the first call."""
    return Job()
