"""How a collective runs: what was started before is completed, ranks compare what they call, observers are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NoReturn

import numpy as np

from clcomm.arguments import address_of
from clcomm.call import Call, disagreement
from clcomm.errors import ArgumentError, no_copy
from clcomm.events import PACKING, Collective, Observer, Phase, TimedPhase, last_of
from clcomm.holdings import closed
from clcomm.in_flight import InFlight
from clcomm.stats import CommStats
from clcomm.transport import Transport
from clcomm.transport.base import misaligned
from clcomm.transport.meeting import DifferentOperations, Meeting, NoMeeting
from clcomm.transport.mpi import address_function
from clcomm.transport.pending import complete_started
from clcomm.world import World

#: More different calls than any program makes.
KEPT_CALLS = 4096


class CollectiveRunner:
    """The part of the Communicator, which inherits it, that every collective goes through."""

    def __init__(self, world: World, observers: Iterable[Observer]):
        self.comm, self._base, self._shared = world.comm, world.base, world.shared
        self.local_rank, self.local_size = world.local_rank, world.local_size
        self.host, self.hosts, self.cores = world.host, world.hosts, world.cores
        self.rank, self.size = self._base.rank, self._base.world_size
        self._pending = world.pending
        self._in_flight = InFlight()
        self._kept_s = 0.0  # how long blocking collectives, and packing for them, kept this rank
        self._finalized, self._closed_by = False, ""
        self._sequence = 0
        self._refusal = ""  # why this rank meets the others, where it does so to refuse
        self._calls: dict[tuple, Call] = {}
        self._address = address_of if self.comm is None else address_function()
        self._meeting: Meeting = world.meeting
        self._checked = not isinstance(self._meeting, NoMeeting)
        self._tells_waiting = self._checked or self.size == 1
        # Ranks that meet move on what is in flight elsewhere until all have come; others have to complete it before.
        self._completes_first = not self._checked and self.size > 1
        #: The collective this rank is in: call, sequence number, when it began (perf_counter); None: in none.
        self.current: tuple[Call, int, float] | None = None
        self.stats = CommStats(self.size)
        self._observers: list[Observer] = []
        for observer in (self.stats, *observers):
            self.add_observer(observer)

    def __reduce__(self) -> NoReturn:
        raise no_copy("Communicator", "make another where one is needed")

    # --- observers ---

    def add_observer(self, observer: Observer) -> None:
        """Tell an observer about every collective that finishes from now on, and about phases if it wants them."""
        self._observe([*self._observers, observer])

    def remove_observer(self, observer: Observer) -> None:
        """Tell an observer nothing any more; one that was never told is none's loss."""
        self._observe([other for other in self._observers if other is not observer])

    def _observe(self, observers: list[Observer]) -> None:
        self._observers = observers
        self._finished: list[Callable[[Collective], object]] = [each.collective_finished for each in observers]
        self._phase_finished = [each.phase_finished for each in observers if hasattr(each, "phase_finished")]

    def tell_phase(self, phase: Phase) -> None:
        """Hand a finished part of the program to the observers that have a method `phase_finished`."""
        if phase[0] in PACKING:
            self._kept_s += phase[2]
        for finished in self._phase_finished:
            finished(phase)

    def phase(self, name: str, label: str = "", bucket: int = -1, **figures: float) -> TimedPhase:
        """Return a `with` block that is told as a phase when it ends: "step", "forward_backward" or any name.

        figures: what a timeline shows with it, such as step=7 and epoch=1.
        """
        return TimedPhase(self.tell_phase, self.communicated, name, label, bucket, tuple(figures.items()))

    def communicated(self) -> float:
        """Return for how many seconds collectives, and packing for them, have kept this rank from anything else."""
        return self._kept_s + self._in_flight.exposed_s

    # --- a collective ---

    def _call(self, operation: str, transport: Transport, label: str = "", **details: Any) -> Call:
        """Return the Call with these fields; `array` stands for count and dtype, and for nbytes unless that is given.

        Calls are kept: to make one takes ten times longer than to find it.
        """
        array = details.pop("array", None)
        if array is not None:
            details |= {"count": array.size, "dtype": array.dtype}
            if details.get("nbytes") is None:
                details["nbytes"] = array.nbytes
        key = (operation, label, transport.name, *details.items())
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= KEPT_CALLS:
                self._calls.clear()
            through_mpi = self._checked and transport is self._base
            call = self._calls[key] = Call(operation, label, transport.name, through_mpi=through_mpi, **details)
        return call

    def _run(self, call: Call, move: Callable[..., Any], *args: Any) -> Any:
        """Run a collective, tell the observers and return what `move` returns."""
        if self._pending or self._finalized or self._completes_first:
            self._settle()
        self._sequence = sequence = self._sequence + 1
        begin = perf_counter()
        try:
            result = self._carry_out(call, sequence, begin, move, args)
        except BaseException:
            self._tell(call, sequence, begin, failed=True)
            raise
        self._tell(call, sequence, begin)
        return result

    def _agree(self, operation: str, move: Callable[..., Any], *args: Any) -> Any:
        """Run a collective by which ranks agree on something before `operation`; it is not counted."""
        self._settle()
        call = self._call(operation, self._base, is_counted=False)
        return self._carry_out(call, self._sequence, perf_counter(), move, args)

    def refuse(self, reason: str) -> NoReturn:
        """Raise ArgumentError on every rank, in whatever collective the others meet this one; collective."""
        self._settle()
        call = self._call("refusal", self._base, reason, is_counted=False)
        self._refusal = reason
        try:
            self._carry_out(call, self._sequence, perf_counter(), lambda: None, ())
        finally:
            self._refusal = ""
        raise ArgumentError(reason)  # on all ranks alike

    def _carry_out(self, call: Call, sequence: int, begin: float, move: Callable[..., Any], args: tuple) -> Any:
        meeting = self._meeting
        meeting.announce(call.tag + sequence)
        self.current = call, sequence, begin
        try:
            if call.through_mpi or not call.is_aligned:
                meeting.barrier()
            if not call.is_aligned:  # on all ranks: they have just compared that
                raise misaligned(call.dtype)
            return move(*args)
        except DifferentOperations:
            raise self._disagreement(call, sequence) from None
        finally:
            self.current = None

    def _disagreement(self, call: Call, sequence: int) -> Exception:
        """Return what every rank raises when all have learnt that they differ; counting goes on alike."""
        told = self.comm.allgather((sequence, call.describe(sequence), self._refusal))
        self._sequence = max(number for number, *_ in told)
        for rank, (*_, refusal) in enumerate(told):
            if refusal:
                return ArgumentError(f"{refusal} (on rank {rank})")
        return disagreement([text for _, text, _ in told])

    def _tell(self, call: Call, sequence: int, begin: float, failed: bool = False) -> None:
        seconds = perf_counter() - begin
        self._kept_s += seconds
        meeting, last_rank, late_s = self._meeting, -1, 0.0
        arrivals = meeting.arrivals
        if arrivals is not None:
            last_rank, late_s = last_of(arrivals)
        wait_s = meeting.waited_ns * 1e-9 if self._tells_waiting else None
        event = Collective(
            call.operation, call.label, call.nbytes, seconds, call.transport, sequence, failed, None, call.bucket,
            begin, wait_s, None, last_rank, late_s,
        )  # fmt: skip
        self._tell_observers(event)

    def _tell_observers(self, event: Collective) -> None:
        for finished in self._finished:
            finished(event)

    @contextmanager
    def _being_in(self, call: Call, sequence: int) -> Iterator[None]:
        """Say for as long as this lasts that this rank is in a collective; `_carry_out` does so by itself."""
        self.current, outer = (call, sequence, perf_counter()), self.current
        try:
            yield
        finally:
            self.current = outer

    # --- what was started before ---

    def _settle(self) -> None:
        """Complete what was started before a blocking call.

        A started all-reduce has a second phase that each rank begins while it waits for it. Were this rank to block
        in another call first, ranks that wait for the all-reduce before that call would wait for this one, and it
        for them.
        """
        self._require_open()
        if self._completes_first:
            complete_started()
        if self._pending:
            begin = perf_counter()
            with self._being_in(
                self._call("wait for started all-reduces", self._base, is_counted=False), self._sequence
            ):
                while self._pending:
                    self._pending[0].wait()
            self._in_flight.visited(begin, perf_counter())

    def _require_open(self) -> None:
        if self._finalized:
            raise closed(self._closed_by)

    def _transport_for(self, *arrays: np.ndarray) -> Transport:
        if self._shared is not None and self._shared.holds(*arrays):
            return self._shared
        return self._base
