"""How a collective runs: complete what was started, compare the ranks' calls, move the data, notify observers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pickle import UnpicklingError
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Protocol, TypeVar, cast

import numpy as np

from clcomm.base.errors import ArgumentError, MismatchError, RankNames
from clcomm.base.host.arrays import note_write
from clcomm.comm.collectives.in_flight import Handle, Notifier, StartGuard, T
from clcomm.comm.collectives.world import World
from clcomm.comm.stats.events import Call, Collective, disagreement
from clcomm.comm.transport import mpi_failures
from clcomm.comm.transport.base import Transport, misaligned
from clcomm.comm.transport.mpi_runtime import closed
from clcomm.comm.transport.pending import Pending, complete_started
from clcomm.comm.transport.rendezvous import DifferentOperations, HostRendezvous, NoRendezvous, Rendezvous

if TYPE_CHECKING:
    from clcomm.comm.transport.mpi_transport import MpiTransport
    from clcomm.comm.transport.pending import StartOrder

#: Bounds the memory for different calls; no program makes so many.
KEPT_CALLS = 4096

Arguments = tuple[object, ...]


class Named(Protocol):
    """What moves a collective's data: a Transport, or a part of one."""

    name: str


P = ParamSpec("P")
R = TypeVar("R")


def refused_on_all(call: Callable[P, R], runner_of: Callable[..., Any] | None = None) -> Callable[P, R]:
    """Let an ArgumentError that a rank raises in a collective before it meets the others be raised on all of them.

    runner_of: returns the runner of a call's ranks from its arguments, None for no ranks; None: that of `self`.
    """

    @wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        of: Any = args[0] if args else None
        runner: CollectiveRunner | None = of.runner if runner_of is None else runner_of(*args, **kwargs)
        met = runner and runner.met
        try:
            return call(*args, **kwargs)
        except ArgumentError as error:
            if runner is None or runner.met != met or not runner.checked or runner.closed_by:
                raise
            try:
                runner.refuse(str(error))
            except ArgumentError:
                if type(error) is ArgumentError:
                    raise
            raise

    return checked


class CollectiveRunner:
    """Runs every collective of a Communicator, which holds it.

    Args:
        world: the ranks.
        notifier: is told of every collective.
        name_ranks: names the ranks in messages.

    Attributes:
        current: the collective that this rank is in: call, sequence number, begin (perf_counter); None: in none. Other
            threads read it.
        sequence: the number of collectives that have begun, the same on every rank between two of them.
        closed_by: what has closed the Communicator; "": it is open.
        pending: what was started and is not finished.
        unraised: the error of ranks in different collectives that only a poll has met.
        completes_first: whether other Communicators' operations are completed before a blocking call.
        checked: whether ranks compare their calls.
        met: how often this rank has come to where ranks compare them.
    """

    def __init__(self, world: World, notifier: Notifier, name_ranks: RankNames):
        self._world, self.notifier, self._name_ranks = world, notifier, name_ranks
        self.current: tuple[Call, int, float] | None = None
        self.sequence = self.met = 0
        self.closed_by = ""
        self.pending = world.pending
        self.unraised: Exception | None = None
        self._sent = 0, 0  # messages and their bytes in the collective that runs, where they are counted
        self._broken: tuple[Call, int] | None = None  # the last call that an error has ended
        self._refusal = ""  # the reason for which `refuse` ends the others' collective; "" if none
        self._home: tuple[CollectiveRunner, str] | None = None  # see `awaited_from`
        self.calls: dict[Arguments, Call] = {}
        self._rendezvous: Rendezvous = world.rendezvous
        self.checked = not isinstance(self._rendezvous, NoRendezvous)
        several = world.base.world_size > 1
        self._measures_wait = self.checked or not several
        # Ranks in a rendezvous progress other Communicators' operations; without rendezvous these are completed first.
        self.completes_first = several and not self.checked

    # --- a collective ---

    def call(self, operation: str, transport: Named, label: str = "", **details: Any) -> Call:
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
        call = self.calls.get(key)
        if call is None:
            if len(self.calls) >= KEPT_CALLS:
                self.calls.clear()
            through_mpi = self.checked and not self._world.compares(transport)
            call = self.calls[key] = Call(operation, label, transport.name, through_mpi=through_mpi, **details)
        return call

    def run(self, call: Call, move: Callable[..., T], *args: object) -> T:
        """Run a collective, notify the observers and return what `move` returns."""
        if self.pending or self.closed_by or self.completes_first or self.unraised is not None:
            self.complete_in_flight()
        self.sequence = sequence = self.sequence + 1
        return self.run_numbered(call, sequence, perf_counter(), move, args)

    def run_numbered(self, call: Call, sequence: int, begin: float, move: Callable[..., T], args: Arguments) -> T:
        """Run a collective that has its number and has begun (perf_counter), and notify the observers."""
        try:
            result = self.compare_and_move(call, sequence, begin, move, args)
        except BaseException:
            self._report(call, sequence, begin, failed=True)
            raise
        self._report(call, sequence, begin)
        return result

    def repeatable(self, call: Call, move: Callable[[], T], written: np.ndarray, *, keeps: object) -> Callable[[], T]:
        """Return a function that runs this collective on the same memory at each call.

        Args:
            call: what ranks compare.
            move: moves the data.
            written: the memory that changes.
            keeps: what else lives as long as the function, the Communicator and the arrays: shared memory is freed when
                no array refers to it.
        """
        return partial(self._run_again, call, move, written, keeps)

    def _run_again(self, call: Call, move: Callable[[], T], written: np.ndarray, _keeps: object) -> T:
        note_write(written)
        return self.run(call, move)

    def start(
        self,
        call: Call,
        start: Callable[[], Pending],
        result: object,
        computes: Callable[[], bool] | None = None,
        *,
        written: np.ndarray | None = None,
        keeps: object,
    ) -> Handle:
        """Start a collective in the background and return its handle.

        Args:
            call: what ranks compare.
            start: starts it on a transport.
            result: what `wait` of the handle returns.
            computes: returns whether the caller's device is computing.
            written: the memory that changes, until a call finds it complete; None: that of nobody else.
            keeps: what else lives as long as the handle: the Communicator and the arrays.
        """
        self.require_open()
        self._require_agreement()
        self.sequence = sequence = self.sequence + 1
        begin = perf_counter()
        guard = self._guard(call, sequence)
        if written is not None:
            note_write(written)
        pending = start()
        if guard is not None:
            pending.guard_with(guard)
        notify = self.notifier.notify if written is None else partial(self._written, written)
        self.notifier.in_flight.add(call, sequence, begin, pending, notify)
        waiting = partial(self.shown_as_current, call, sequence)
        return Handle(pending, result, begin, self.notifier.in_flight, waiting, computes, keeps=keeps)

    def _written(self, array: np.ndarray, event: Collective) -> None:
        note_write(array)
        self.notifier.notify(event)

    def _guard(self, call: Call, sequence: int) -> StartGuard | None:
        """Announce an operation that is about to start, and return what watches it; None: nothing is compared."""
        tag = call.tag + sequence
        self.met += 1
        self._rendezvous.announce(tag)
        if not self.checked:
            return None
        order = None if self._world.shared is None else self._world.shared.start_order
        if order is not None:
            order.note(sequence, tag)
        settle = partial(self._disagreement, call, sequence, " in the background")
        return StartGuard(self._rendezvous, order, sequence, tag, settle, partial(self._left, sequence))

    @contextmanager
    def awaited_from(self, home: CollectiveRunner, operation: str) -> Iterator[None]:
        """Within the block, let a rank that calls another operation of `home` before it starts this one's be an error.

        The other ranks wait here, so that nobody would come there.

        Args:
            home: the runner of another Communicator of the same ranks.
            operation: what the program calls here.
        """
        self._home = home, operation
        try:
            yield
        finally:
            self._home = None

    def _left(self, sequence: int, order: StartOrder) -> Callable[[], Exception] | None:
        """Return what settles that a rank waits in a call of the Communicator to which this one's program belongs."""
        if self._home is None or not isinstance(there := self._home[0]._rendezvous, HostRendezvous):
            return None
        return partial(self._settle_there, *self._home) if order.is_left_for(there, sequence) else None

    def _settle_there(self, home: CollectiveRunner, operation: str) -> Exception:
        """Take back what not all ranks have started, and return the error; collective of `home`."""
        for pending in self.pending:
            pending.take_back()
        self.sequence -= len(self.pending)
        error: Exception = MismatchError(f"{operation}: expected it on every rank, got another call on some")
        try:
            home.meet(operation)
        except Exception as found:
            error = found
        while self.pending:
            self.pending[0].withdraw(error)
        return error

    def run_uncounted(
        self, operation: str, move: Callable[..., T], *args: object, transport: Transport | None = None, root: int = -1
    ) -> T:
        """Run a collective that precedes `operation`, such as a comparison of arguments; it is not counted.

        transport: moves its data; None: MPI. root: that of a broadcast; ranks that differ in it would leave messages.
        """
        self.complete_in_flight()
        call = self.call(operation, transport or self._world.base, is_counted=False, root=root)
        return self.compare_and_move(call, self.sequence, perf_counter(), move, args)

    def refuse(self, reason: str) -> NoReturn:
        """Raise ArgumentError on every rank, in the collective in which the others meet this one; collective."""
        with self.refusing(reason):
            self.meet("refusal", reason)
        raise ArgumentError(reason)  # on all ranks alike

    def meet(self, operation: str, label: str = "") -> None:
        """Meet other ranks in a call that this one does not make, which is an error on all; collective."""
        self.complete_in_flight()
        call = self.call(operation, self._world.base, label, is_counted=False)
        self.compare_and_move(call, self.sequence, perf_counter(), lambda: None, ())

    @contextmanager
    def refusing(self, reason: str) -> Iterator[None]:
        """Let a collective of other ranks that this one does not call raise ArgumentError on all, within the block."""
        self._refusal = reason
        try:
            yield
        finally:
            self._refusal = ""

    def prepare(self, call: Call, prepare: Callable[..., T], *args: object) -> T:
        """Return what `prepare` returns, a transport's prepared collective; ranks compare the call, uncounted."""
        return self.compare_and_move(call, self.sequence, perf_counter(), prepare, args)

    def compare_and_move(self, call: Call, sequence: int, begin: float, move: Callable[..., T], args: Arguments) -> T:
        """Announce the call, compare it where the transport does not, and return what `move` returns."""
        rendezvous = self._rendezvous
        self.met += 1
        rendezvous.announce(call.tag + sequence)
        self.current = call, sequence, begin
        try:
            if call.through_mpi or not call.is_aligned:
                rendezvous.barrier()
            if not call.is_aligned:  # on all ranks, as they have just compared it
                raise misaligned(call.dtype)
            return move(*args)
        except DifferentOperations:
            self._broken = call, sequence
            raise self._disagreement(call, sequence) from None
        except (UnpicklingError, EOFError):
            mpi_failures.require_live_ranks()  # MPI gives what a dead rank was to send as garbage, without an error
            raise
        except BaseException:
            self._broken = call, sequence
            raise
        finally:
            self.current = None

    def unfinished(self) -> list[tuple[Call, int]]:
        """Return the calls that have begun and neither ended nor been reported, with their numbers.

        The last that an error ended is one of them until the next counted one: observers do not hear of those that
        have no number.
        """
        found = self.notifier.in_flight.unfinished() + [each[:2] for each in (self.current,) if each is not None]
        if self._broken is not None and self._broken[1] + 1 >= self.sequence:
            found.append(self._broken)
        return found

    def _disagreement(self, call: Call, sequence: int, how: str = "") -> Exception:
        """Return the error that every rank raises, and set the same sequence number on all; collective.

        It ends all that this rank has in the background, which others may never start. how: appended to the call.
        """
        for pending in self.pending:
            pending.take_back()
        calls = cast("MpiTransport", self._world.base).comparisons.exchange(
            (self.sequence, call.describe(sequence) + how, self._refusal)
        )
        self.sequence = max(number for number, *_ in calls)
        refused = [(rank, refusal) for rank, (*_, refusal) in enumerate(calls) if refusal]
        error: Exception
        if refused:
            rank, refusal = refused[0]
            error = ArgumentError(f"{refusal} (on {self._name_ranks([rank])})")
        else:
            error = disagreement([text for _, text, _ in calls], self._name_ranks)
        while self.pending:
            self.pending[0].withdraw(error)
        if how:
            self.unraised = error
        return error

    def count_sent(self, messages: int, nbytes: int) -> None:
        """Count messages that this rank has sent in the collective that runs."""
        self._sent = self._sent[0] + messages, self._sent[1] + nbytes

    def fail_unannounced(self, call: Call, sequence: int, begin: float) -> None:
        """Notify the observers of a collective that failed before it came to a rendezvous."""
        self.current = None
        self._rendezvous.announce(call.tag + sequence)  # without a wait or a last rank
        self._report(call, sequence, begin, failed=True)

    def _report(self, call: Call, sequence: int, begin: float, failed: bool = False) -> None:
        seconds = perf_counter() - begin
        self.notifier.blocked_s += seconds
        rendezvous = self._rendezvous
        last_rank, late_s = rendezvous.last
        wait_s = rendezvous.waited_ns * 1e-9 if self._measures_wait else None
        (messages, message_nbytes), self._sent = self._sent, (0, 0)
        event = tuple.__new__(Collective, (  # a named tuple of all its fields, made in half the time
            call.operation, call.label, call.nbytes, seconds, call.transport, sequence, failed, None, call.bucket,
            begin, wait_s, None, last_rank, late_s, 0.0, (), (), "", 0, messages, message_nbytes,
            call.extent, call.dtype_name,
        ))  # fmt: skip
        self.notifier.notify(event)

    @contextmanager
    def shown_as_current(self, call: Call, sequence: int) -> Iterator[None]:
        """Set `current` within the block, for collectives that do not run through `compare_and_move`."""
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
        call = self.call(operation, self._world.base, label, is_counted=before_next, **whose)
        mine = call, self.sequence + before_next, perf_counter()
        if self.current is None:
            self.current = mine
        try:
            yield
        finally:
            if self.current is mine:
                self.current = None

    # --- what was started before ---

    def complete_in_flight(self) -> None:
        """Complete all started operations before a blocking call.

        A started all-reduce has a second stage that each rank begins while it waits for it. If this rank blocked in
        another call first, ranks that wait for the all-reduce before that call would deadlock with it.
        """
        self.require_open()
        self._require_agreement()
        if self.completes_first:
            complete_started()
        if self.pending:
            begin = perf_counter()
            with self.shown_as_current(
                self.call("wait for started all-reduces", self._world.base, is_counted=False), self.sequence
            ):
                while self.pending:
                    self.pending[0].wait()
            self.notifier.in_flight.add_call(begin, perf_counter())

    def _require_agreement(self) -> None:
        """Raise the error of ranks in different collectives that only a poll has met; the others have raised it."""
        found, self.unraised = self.unraised, None
        if found is not None and found.__traceback__ is None:  # no handle has raised it
            raise found

    def require_open(self) -> None:
        """Raise the error of a closed Communicator."""
        if self.closed_by:
            raise closed(self.closed_by)
