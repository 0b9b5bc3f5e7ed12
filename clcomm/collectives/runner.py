"""How a collective runs: complete what was started, compare the ranks' calls, move the data, notify observers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pickle import UnpicklingError
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

import numpy as np

from clcomm.collectives.arguments import address_of
from clcomm.collectives.handle import Handle, T
from clcomm.collectives.in_flight import StartGuard
from clcomm.collectives.notifier import Notifier
from clcomm.collectives.world import World
from clcomm.errors import ArgumentError, RankNames, no_copy
from clcomm.stats.call import Call, disagreement
from clcomm.stats.comm_stats import CommStats
from clcomm.stats.events import Collective, Observer
from clcomm.transport import Pending, Transport, mpi_failures
from clcomm.transport.base import misaligned
from clcomm.transport.meeting import DifferentOperations, Meeting, NoMeeting
from clcomm.transport.mpi_communicators import address_function
from clcomm.transport.mpi_runtime import closed
from clcomm.transport.pending import complete_started

if TYPE_CHECKING:
    from clcomm.transport.fused import FusedReduction
    from clcomm.transport.host_memory import HostMemory
    from clcomm.transport.mpi_transport import MpiTransport

#: Bounds the memory for different calls; no program makes so many.
KEPT_CALLS = 4096

Arguments = tuple[object, ...]

_new = tuple.__new__  # makes a named tuple of all its fields, in half the time


class Named(Protocol):
    """What moves a collective's data: a Transport, or a part of one."""

    name: str


class CollectiveRunner(Notifier):
    """Runs every collective of the Communicator (a base class of it)."""

    #: The collective that this rank is in: call, sequence number, begin (perf_counter); None: in none. Other threads
    #: read it, of a Communicator in the making too.
    current: tuple[Call, int, float] | None = None

    def __init__(self, world: World, observers: Iterable[Observer], name_ranks: RankNames):
        self.comm, self._base, self._shared = world.comm, world.base, world.shared
        self.local_rank, self.local_size = world.local_rank, world.local_size
        self.host, self.hosts, self.cores = world.host, world.hosts, world.cores
        self.rank, self.size = self._base.rank, self._base.world_size
        self._pending = world.pending
        self._finalized, self._closed_by = False, ""
        self._sequence = 0
        self._sent = 0, 0  # messages and their bytes in the collective that runs, where they are counted
        self._unraised: Exception | None = None  # of ranks in different collectives, found while this one polled
        self._refusal = ""  # the reason for which `refuse` ends the others' collective; "" if none
        self._calls: dict[Arguments, Call] = {}
        self._address = address_of if self.comm is None else address_function()
        self._meeting: Meeting = world.meeting
        self._checked = not isinstance(self._meeting, NoMeeting)
        self._measures_wait = self._checked or self.size == 1
        # Ranks in a meeting progress other Communicators' operations; without meetings these are completed first.
        self._completes_first = not self._checked and self.size > 1
        #: Names ranks of this Communicator in messages: `RankNames`.
        self.name_ranks = name_ranks
        super().__init__(CommStats(self.size, name_ranks.name), observers)

    def __reduce__(self) -> NoReturn:
        raise no_copy("Communicator", "make another where one is needed")

    @property
    def host_memory(self) -> HostMemory | None:
        """The memory that the ranks of this host share, with their meeting point; None where they share none."""
        return None if self._shared is None else self._shared.memory

    @property
    def sequence(self) -> int:
        """Number of collectives that have begun, the same on every rank between two of them."""
        return self._sequence

    # --- a collective ---

    def _call(self, operation: str, transport: Named, label: str = "", **details: Any) -> Call:
        """Return the Call with these fields; `array` gives count, dtype, shape and, unless given, nbytes.

        Calls are cached: creating one takes ten times as long as a look-up.
        """
        array = details.pop("array", None)
        if array is not None:
            details |= {"count": array.size, "dtype": array.dtype}
            if array.ndim != 1:
                details["shape"] = array.shape
            if details.get("nbytes") is None:
                details["nbytes"] = array.nbytes
        key = (operation, label, transport.name, *details.items())
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= KEPT_CALLS:
                self._calls.clear()
            through_mpi = self._checked and transport is not self._shared
            call = self._calls[key] = Call(operation, label, transport.name, through_mpi=through_mpi, **details)
        return call

    def _run_counted(self, call: Call, move: Callable[..., T], *args: object) -> T:
        """Run a collective, notify the observers and return what `move` returns."""
        if self._pending or self._finalized or self._completes_first or self._unraised is not None:
            self._complete_in_flight()
        self._sequence = sequence = self._sequence + 1
        return self._run_numbered(call, sequence, perf_counter(), move, args)

    def _run_numbered(self, call: Call, sequence: int, begin: float, move: Callable[..., T], args: Arguments) -> T:
        try:
            result = self._compare_and_move(call, sequence, begin, move, args)
        except BaseException:
            self._report(call, sequence, begin, failed=True)
            raise
        self._report(call, sequence, begin)
        return result

    def _start(
        self,
        call: Call,
        start: Callable[[], Pending],
        result: object,
        computes: Callable[[], bool] | None = None,
    ) -> Handle:
        self._require_open()
        self._require_agreement()
        self._sequence = sequence = self._sequence + 1
        begin = perf_counter()
        guard = self._guard(call, sequence)
        pending = start()
        if guard is not None:
            pending.guard_with(guard)
        self._in_flight.add(call, sequence, begin, pending, self._notify)
        waiting = partial(self._shown_as_current, call, sequence)
        return Handle(pending, result, begin, self._in_flight, waiting, computes)

    def _guard(self, call: Call, sequence: int) -> StartGuard | None:
        """Announce an operation that is about to start, and return what watches it; None: nothing is compared."""
        tag = call.tag + sequence
        self._meeting.announce(tag)
        if not self._checked:
            return None
        order = None if self._shared is None else self._shared.start_order
        if order is not None:
            order.note(sequence, tag)
        settle = partial(self._disagreement, call, sequence, " in the background")
        return StartGuard(self._meeting, order, sequence, tag, settle)

    def _repeatable(self, call: Call, move: Callable[[], T]) -> Callable[[], T | None]:
        """Return a function that runs a prepared collective: `_run_counted` with these arguments."""
        launch = getattr(move, "launch", None)
        if launch is not None and self._checked:
            return self._fused(call, cast("FusedReduction", move), launch)
        return partial(self._run_counted, call, move)

    def _fused(self, call: Call, move: FusedReduction, launch: Callable[[], object]) -> Callable[[], None]:
        """Return a function that runs an all-reduce that one kernel does, meetings included.

        One that the kernel cannot complete ends as others do. The function is `_run_counted` for small arrays, where
        look-ups and calls in Python took longer than the sum.
        """
        from clcomm.transport.fused import ARRIVED_NS, COMPLETE, LAST_RANK, LATE_NS, STATE, TAG, WAITED_NS

        tag, words = call.tag, move.words
        operation, label, nbytes = call.operation, call.label, call.nbytes
        transport, bucket = call.transport, call.bucket

        def run() -> None:
            if self._pending or self._finalized or self._unraised is not None:
                self._complete_in_flight()
            self._sequence = sequence = self._sequence + 1
            begin_ns = perf_counter_ns()
            begin = begin_ns * 1e-9
            self.current = call, sequence, begin
            words[TAG] = tag + sequence
            words[ARRIVED_NS] = begin_ns
            try:
                launch()
            except BaseException:
                self.current = None
                self._meeting.announce(tag + sequence)  # without a wait or a last rank
                self._report(call, sequence, begin, failed=True)
                raise
            if words[STATE] != COMPLETE:
                self._run_numbered(call, sequence, begin, move.complete, ())
                return
            self.current = None
            seconds = perf_counter() - begin
            self._blocked_s += seconds
            event = _new(Collective, (
                operation, label, nbytes, seconds, transport, sequence, False, None, bucket, begin,
                words[WAITED_NS] * 1e-9, None, words[LAST_RANK], words[LATE_NS] * 1e-9, 0.0, (), (), "", 0, 0, 0,
            ))  # fmt: skip
            for finished in self._finished:
                finished(event)

        return run

    def _run_uncounted(self, operation: str, move: Callable[..., T], *args: object) -> T:
        """Run a collective that precedes `operation`, such as a comparison of arguments; it is not counted."""
        self._complete_in_flight()
        call = self._call(operation, self._base, is_counted=False)
        return self._compare_and_move(call, self._sequence, perf_counter(), move, args)

    def refuse(self, reason: str) -> NoReturn:
        """Raise ArgumentError on every rank, in the collective in which the others meet this one; collective."""
        self._complete_in_flight()
        call = self._call("refusal", self._base, reason, is_counted=False)
        with self.refusing(reason):
            self._compare_and_move(call, self._sequence, perf_counter(), lambda: None, ())
        raise ArgumentError(reason)  # on all ranks alike

    @contextmanager
    def refusing(self, reason: str) -> Iterator[None]:
        """Let a collective of other ranks that this one does not call raise ArgumentError on all, within the block."""
        self._refusal = reason
        try:
            yield
        finally:
            self._refusal = ""

    def _compare_and_move(self, call: Call, sequence: int, begin: float, move: Callable[..., T], args: Arguments) -> T:
        meeting = self._meeting
        meeting.announce(call.tag + sequence)
        self.current = call, sequence, begin
        try:
            if call.through_mpi or not call.is_aligned:
                meeting.barrier()
            if not call.is_aligned:  # on all ranks, as they have just compared it
                raise misaligned(call.dtype)
            return move(*args)
        except DifferentOperations:
            raise self._disagreement(call, sequence) from None
        except (UnpicklingError, EOFError):
            mpi_failures.require_live_ranks()  # MPI gives what a dead rank was to send as garbage, without an error
            raise
        finally:
            self.current = None

    def _disagreement(self, call: Call, sequence: int, how: str = "") -> Exception:
        """Return the error that every rank raises, and set the same sequence number on all; collective.

        It ends all that this rank has in the background, which others may never start. how: appended to the call.
        """
        for pending in self._pending:
            pending.take_back()
        calls = cast("MpiTransport", self._base).comparisons.exchange(
            (self._sequence, call.describe(sequence) + how, self._refusal)
        )
        self._sequence = max(number for number, *_ in calls)
        refused = [(rank, refusal) for rank, (*_, refusal) in enumerate(calls) if refusal]
        error: Exception
        if refused:
            rank, refusal = refused[0]
            error = ArgumentError(f"{refusal} (on {self.name_ranks([rank])})")
        else:
            error = disagreement([text for _, text, _ in calls], self.name_ranks)
        while self._pending:
            self._pending[0].withdraw(error)
        if how:
            self._unraised = error
        return error

    def _report(self, call: Call, sequence: int, begin: float, failed: bool = False) -> None:
        seconds = perf_counter() - begin
        self._blocked_s += seconds
        meeting = self._meeting
        last_rank, late_s = meeting.last
        wait_s = meeting.waited_ns * 1e-9 if self._measures_wait else None
        (messages, message_nbytes), self._sent = self._sent, (0, 0)
        event = Collective(
            call.operation, call.label, call.nbytes, seconds, call.transport, sequence, failed, None, call.bucket,
            begin, wait_s, None, last_rank, late_s, messages=messages, message_nbytes=message_nbytes,
        )  # fmt: skip
        self._notify(event)

    @contextmanager
    def _shown_as_current(self, call: Call, sequence: int) -> Iterator[None]:
        """Set `current` within the block, for collectives that do not run through `_compare_and_move`."""
        self.current, outer = (call, sequence, perf_counter()), self.current
        try:
            yield
        finally:
            self.current = outer

    @contextmanager
    def waiting_for(
        self, operation: str, label: str = "", *, before_next: bool = False, peer: int | None = -1
    ) -> Iterator[None]:
        """Show the watchdog that this rank waits in `operation`, such as a message, unless it is in a collective.

        Another thread may run a collective meanwhile.

        Args:
            before_next: whether all ranks have to come to the next collective for the wait to end, so that a rank that
                leaves the program before it ends the job.
            peer: the one rank that the wait is for, which ends the job if it leaves the program; None: any one; -1:
                none.
        """
        whose = {"takes_any": True} if peer is None else {"peer": peer}
        call = self._call(operation, self._base, label, is_counted=before_next, **whose)
        mine = call, self._sequence + before_next, perf_counter()
        if self.current is None:
            self.current = mine
        try:
            yield
        finally:
            if self.current is mine:
                self.current = None

    # --- what was started before ---

    def _complete_in_flight(self) -> None:
        """Complete all started operations before a blocking call.

        A started all-reduce has a second stage that each rank begins while it waits for it. If this rank blocked in
        another call first, ranks that wait for the all-reduce before that call would deadlock with it.
        """
        self._require_open()
        self._require_agreement()
        if self._completes_first:
            complete_started()
        if self._pending:
            begin = perf_counter()
            with self._shown_as_current(
                self._call("wait for started all-reduces", self._base, is_counted=False), self._sequence
            ):
                while self._pending:
                    self._pending[0].wait()
            self._in_flight.add_call(begin, perf_counter())

    def _require_agreement(self) -> None:
        """Raise the error of ranks in different collectives that only a poll has met; the others have raised it."""
        found, self._unraised = self._unraised, None
        if found is not None and found.__traceback__ is None:  # no handle has raised it
            raise found

    def _require_open(self) -> None:
        if self._finalized:
            raise closed(self._closed_by)

    def _transport_for(self, *arrays: np.ndarray) -> Transport:
        if self._shared is not None and self._shared.holds(*arrays):
            return self._shared
        return self._base
