"""The watchdog: a thread per rank that reports the missing ranks of a stalled collective, and ends a hung job.

The thread sleeps most of the time. About once a second it writes its rank's collective and source location on the
host's status page, from which other ranks report a missing rank. A collective costs the program one more assignment.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import weakref
from collections.abc import Callable
from functools import partial
from time import perf_counter, perf_counter_ns, sleep

from clcomm.base.errors import RankNames
from clcomm.comm.stats.events import Call
from clcomm.comm.stats.flight_recorder import FlightRecorder, new_dump_folder
from clcomm.comm.transport.mpi_resources import MpiResources
from clcomm.comm.watch import endings
from clcomm.comm.watch.figures import Figures, Watched
from clcomm.comm.watch.forced_end import end_by_force_later
from clcomm.comm.watch.job import Limits
from clcomm.comm.watch.other_hosts import DUMP, PROGRESS, OtherHosts
from clcomm.comm.watch.stall_message import LEFT, Dump, describe, is_lowest, left_while_awaited, place_of_thread
from clcomm.comm.watch.status_page import RankStatus, StatusPage

#: How long a job's end waits for the other ranks' dumps.
DUMP_S = 2.0
#: A rank that leaves the program looks for other ranks that have waited for it this long, at this interval.
AWAITED_S, BETWEEN_LOOKS_S = 1.5, 0.2
#: How long a rank waits for one that has left before it ends the job itself; the rank that left, if it can, ends the
#: job earlier, after AWAITED_S.
LEFT_S = 2.5
#: How long an exception may take to arrive in a thread that waits, and how long a rank that did not catch it waits for
#: another one to end the job.
INTERRUPTED_S, UNCAUGHT_S = 3.0, 6.0

_log = logging.getLogger("clcomm")


class Watchdog:
    """Watches the collectives of one Communicator, which it does not keep alive, from a thread of its own.

    Args:
        watched: has `current`: (call, sequence number, begin in perf_counter's seconds), or None outside collectives;
            and `interrupt`, which raises a time-out in the program; None: the job ends.
        elsewhere: queries the ranks of other hosts; None where there are none.
        resources: those of `watched`, for its name and the waits of this process's other Communicators.

    Attributes:
        limits: those in force; other ones are from the next look on, within a second.
    """

    def __init__(
        self, watched: Watched, page: StatusPage, limits: Limits, recorder: FlightRecorder,
        elsewhere: OtherHosts | None = None, resources: MpiResources | None = None,
    ):  # fmt: skip
        self._page, self.limits, self._recorder = page, limits, recorder
        self._elsewhere, self._resources = elsewhere, resources
        self._names = RankNames() if resources is None else resources.names
        self._ranks = watched.size
        self._program = threading.get_ident()
        self._warned_of: tuple[Call, int, float] | None = None
        self._has_dumped, self._peer = False, -1
        self._interrupt: Callable[[str, float, Callable[[], None]], bool] | None = None
        self._figures = Figures(recorder) if page.is_public else None
        self.look(None)
        # Released to end the thread. The garbage collector may have to do that, in any thread; setting an Event there
        # could deadlock, as it takes a lock.
        self._stop = threading.Lock()
        self._stop.acquire()
        self._watched = weakref.ref(watched, self._release)
        self._thread = threading.Thread(target=self._watch, name="clcomm-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._release()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _release(self, *watched: object) -> None:
        try:  # noqa: SIM105 - without a module's name: at the end of Python those are gone
            self._stop.release()
        except RuntimeError:
            pass  # already released

    def _watch(self) -> None:
        while not self._stop.acquire(timeout=min(self.limits.interval_s, threading.TIMEOUT_MAX)):
            watched = self._watched()
            if watched is None:
                return
            current, self._interrupt = watched.current, watched.interrupt
            try:
                figures = "" if self._figures is None else self._figures.take(watched, current)
                del watched
                self.look(current, figures)
            except Exception:  # a failing watchdog must not fail the job
                _log.exception("the watchdog of rank %d ends; the job goes on unwatched", self._page.own)
                return

    def look(self, current: tuple[Call, int, float] | None, figures: str = "") -> None:
        """Write this rank's line, and act if its collective has taken too long or another rank ends the job."""
        if current is None:
            elsewhere = "" if self._resources is None else self._resources.others_wait()
            self._page.write(0, 0, elsewhere, self.place(), figures)
            waited_s = 0.0
        else:
            call, sequence, began_s = current
            text = call.describe(sequence) + ("" if self._resources is None else self._resources.name)
            self._page.write(call.tag + sequence + 1, int(began_s * 1e9), text, self.place(), figures)
            waited_s = perf_counter() - began_s
            self._peer = call.peer
            if waited_s > LEFT_S:
                self._end_if_left(call, sequence, text)
        folder = self._page.dump_folder
        if folder:
            self._dump(folder)
        elif waited_s > self.limits.timeout_s:
            self._time_out(waited_s)
        elif waited_s > self.limits.stall_warning_s and self._warned_of != current:
            self._warned_of = current
            self._warn(waited_s)

    def leave(self, sequence: int) -> None:
        """Write that this rank has left the program after `sequence` collectives; end the thread."""
        self.stop()
        self._page.write(0, sequence, LEFT, "")

    def _end_if_left(self, call: Call, sequence: int, text: str) -> None:
        """End the job if this rank waits for one of this host that has left the program."""
        lines, last_ns = self._page.read(), perf_counter_ns() - AWAITED_S * 1e9
        left = {line.rank: line.began_ns for line in lines if line.text == LEFT and line.beat_ns < last_ns}
        missed = call.misses(left, self._ranks, sequence)
        if missed is not None and is_lowest(self._page.own, lines, LEFT_S) and self._page.claim_end():
            end_by_force_later(endings.FAILURE)
            own = self._names([self._page.own])
            endings.end(endings.FAILURE, left_while_awaited(own, text, self.place()), self._names.in_world(missed))

    def look_back(self, sequence: int, deadline: float) -> str:
        """Return the reason to end the job if another rank waits for this one, which has left the program.

        Returns "" once all ranks have left, or when none waits at the deadline: they may have work of their own.

        Args:
            sequence: the number of collectives before this rank left.
            deadline: by perf_counter(), in seconds.
        """
        while True:
            others = [line for line in self._everyone(PROGRESS) if line.rank != self._page.own]
            if all(line.text == LEFT or line.state != "running" for line in others):
                return ""
            waiting = [line for line in others if line.state == "running" and _is_in_later(line, sequence)]
            for line in waiting:
                if (perf_counter_ns() - line.began_ns) / 1e9 > AWAITED_S and self._page.claim_end():
                    return left_while_awaited(self._names([line.rank]), line.text, line.place)
            if not waiting and perf_counter() > deadline:
                return ""
            sleep(BETWEEN_LOOKS_S)

    # --- the warning ---

    def _warn(self, waited_s: float) -> None:
        limit_s = self.limits.stall_warning_s
        if not is_lowest(self._page.own, self._page.read(), limit_s) or not self._is_first_to_report():
            return
        lines = self._everyone(PROGRESS)
        if is_lowest(self._page.own, lines, limit_s):
            end = f"; after {self.limits.timeout_s:g} s the job ends" if self.limits.timeout_s < math.inf else ""
            endings.print_line(f"clcomm: {self._described(lines, waited_s)}{end}")
            self._page.note_report()

    def _described(self, lines: list[RankStatus], waited_s: float) -> str:
        """Return where this rank waits, and what those do that it waits for: one rank alone for a message of its."""
        awaited = [line for line in lines if self._peer < 0 or line.rank in (self._peer, self._page.own)]
        return describe(self._page.own, awaited, waited_s, self._names)

    def _is_first_to_report(self) -> bool:
        last_ns = self._page.reported_ns
        return not last_ns or perf_counter_ns() - last_ns > self.limits.stall_warning_s * 1e9

    def _everyone(self, question: bytes) -> list[RankStatus]:
        """Return the lines of all ranks, in rank order; those of other hosts are queried over the network."""
        elsewhere = [] if self._elsewhere is None else self._elsewhere.ask(question)
        return sorted([*self._page.read(), *elsewhere])

    # --- the end of the job ---

    def _time_out(self, waited_s: float) -> None:
        """Raise an error in the threads that wait, where the program may catch it, or else end the job."""
        if self._interrupt is not None:
            limit_s = self.limits.timeout_s
            text = self._described(self._everyone(PROGRESS), waited_s)
            if self._interrupt(text, limit_s, partial(self._end_uncaught, text, limit_s)):
                return
            if waited_s < limit_s + INTERRUPTED_S:
                return  # it is on its way
        if not is_lowest(self._page.own, self._page.read(), self.limits.timeout_s):
            return  # the lowest waiting rank ends it; if that one hangs, its line gets too old, and the next one does
        self._end_job(self._described(self._everyone(PROGRESS), waited_s), self.limits.timeout_s)

    def _end_uncaught(self, text: str, limit_s: float) -> None:
        """End the job for an error that the program did not catch, unless another rank does so."""
        if not self._page.claim_end():
            sleep(UNCAUGHT_S)
        self._end_job(text, limit_s)

    def _end_job(self, text: str, limit_s: float) -> None:
        end_by_force_later(endings.TIMED_OUT)
        folder = self._page.dump_folder or new_dump_folder()
        self._page.dump_folder = folder
        self._everyone(DUMP)
        if folder:
            self._dump(folder)
            self._wait_for_dumps()
        written = f"; what each rank did last is in {folder}/rank-*.json" if folder else ""
        endings.print_line(f"clcomm: {text}; the limit is {limit_s:g} s, the job ends{written}")
        endings.abort(endings.TIMED_OUT)

    def _wait_for_dumps(self) -> None:
        deadline = perf_counter() + DUMP_S
        while perf_counter() < deadline:
            lines = self._page.read()
            if self._elsewhere is None and all(line.dumped or line.state != "running" for line in lines):
                return
            sleep(0.02)

    def _dump(self, folder: str) -> None:
        """Write this rank's last operations to the folder, once, and their summary to the terminal."""
        if self._has_dumped:
            return
        self._has_dumped = True
        own = next(line for line in self._page.read() if line.rank == self._page.own)
        watched = self._watched()
        try:
            unfinished = () if watched is None else watched.unfinished()
            dump = Dump(own.rank, self._ranks, self._recorder, self._resources)
            dump.write(folder, unfinished, self._program, own.text, own.place)
        except OSError as error:
            endings.print_line(f"clcomm: {self._names([own.rank])}: its last operations could not be written: {error}")
        endings.print_line(f"clcomm: {self._names([own.rank])}, last operations: {self._recorder.summary()}")
        self._page.note_dump()

    def place(self) -> str:
        """Return this rank's source location: "train.py:57 in load, from train.py:80 in main"."""
        return place_of_thread(self._program)


def _is_in_later(line: RankStatus, sequence: int) -> bool:
    """Return whether a rank is in a collective with a number above `sequence`."""
    number = re.search(r"#(\d+)(?: \(| of |$)", line.text)
    return line.waits and number is not None and int(number[1]) > sequence
