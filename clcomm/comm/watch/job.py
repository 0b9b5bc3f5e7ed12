"""This process's job: what is there once for all of its Communicators, its time limits, its progress."""

from __future__ import annotations

import itertools
import math
import time
import weakref
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol

from clcomm.base.errors import ArgumentError
from clcomm.base.host import variables
from clcomm.comm.watch.rank_record import RankRecord
from clcomm.comm.watch.restarts import ProgressFile

if TYPE_CHECKING:
    from clcomm.base.storage.scratch import WriterLocks
    from clcomm.comm.stats.events import Call
    from clcomm.comm.transport.mpi_resources import AllResources


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


class Job:
    """This process's part in a job.

    Attributes:
        record: this rank's step and state, for messages and the exit monitor.
        progress: the same for `clcomm run`.
        averagings: by the id of a model, the averaging of its gradients that was used last: no other follows the
            model's backward.
        hooks: of the process's exits, from the first Communicator or `clcomm run` on.
        queues: collectives that run in threads beside the program.
        declared: the facts on the program that ranks compare at their start (`clcomm/comm/collectives/same_start.py`).
        warned: the warnings of that comparison that were logged.
        copies: numbers the states that are copied to memory (`clcomm/jobs/checkpoint/memory.py`).
        is_reported: whether this process's end has been reported.
        is_signalled: whether a signal has ended its program.
        wrapped: the last error that another library may have wrapped in its own, behind its text.
    """

    def __init__(self) -> None:
        self.record, self.progress = RankRecord(), ProgressFile()
        self.averagings: weakref.WeakValueDictionary[int, Averaging] = weakref.WeakValueDictionary()
        self.hooks: Hooks | None = None
        self.queues: weakref.WeakSet[Queue] = weakref.WeakSet()
        self.declared: tuple[Any, ...] = ()
        self.warned: set[str] = set()
        self.copies = itertools.count()
        self.is_reported = self.is_signalled = False
        self.wrapped: tuple[str, BaseException] | None = None

    @cached_property
    def communicators(self) -> AllResources:
        """The MPI resources of all Communicators."""
        from clcomm.comm.transport.mpi_resources import AllResources  # here, as it needs NumPy

        return AllResources()

    @cached_property
    def locks(self) -> WriterLocks:
        """The locks on files that this process writes."""
        from clcomm.base.storage.scratch import WriterLocks  # here, as few processes of a job lock files

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


# --- How long a collective may take before the missing ranks are reported, and before the job ends. ---

#: The longest interval between a watchdog's checks; limits of a few seconds shorten it.
INTERVAL_S = 1.0


@dataclass(frozen=True)
class Limits:
    """Seconds in one collective after which a rank reports the missing ranks, and after which it ends the job."""

    stall_warning_s: float
    timeout_s: float

    @classmethod
    def of(cls, stall_warning_s: float, timeout_s: float) -> Limits:
        """Return the limits; CLCOMM_STALL_WARNING_S and CLCOMM_TIMEOUT_S override the arguments; 0: no limit.

        Raises:
            ArgumentError: a value is negative or not a number; it names the argument or the variable.
        """
        return cls(
            _limit("stall_warning_s", stall_warning_s, "CLCOMM_STALL_WARNING_S"),
            _limit("timeout_s", timeout_s, "CLCOMM_TIMEOUT_S"),
        )

    @property
    def interval_s(self) -> float:
        """Seconds between a watchdog's checks."""
        return min(INTERVAL_S, self.stall_warning_s / 4, self.timeout_s / 4)

    def __bool__(self) -> bool:
        """Return whether there is any limit."""
        return min(self.stall_warning_s, self.timeout_s) < math.inf


def _limit(name: str, value: float, variable: str) -> float:
    given = variables.seconds(variable)
    try:
        seconds = float(value) if given is None else given
    except (TypeError, ValueError):
        seconds = -1.0
    if not seconds >= 0:
        raise ArgumentError(f"{name}: expected seconds, 0 for no limit, got {value}")
    return seconds or math.inf
