"""The watchdog: a thread per rank that says who is missing where a collective waits too long, and ends a hung job.

It sleeps nearly always. About once a second it writes on its host's board what its rank is doing, and where in the
program that is, so that others can say it of a rank that does not come. A collective itself pays one assignment.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import math
import os
import re
import signal
import sys
import sysconfig
import threading
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, perf_counter_ns, sleep
from types import FrameType
from typing import Any

from clcomm import exits, job
from clcomm.call import name_ranks
from clcomm.errors import ArgumentError
from clcomm.flight_recorder import FlightRecorder, new_dump_folder
from clcomm.progress import Progress, ProgressBoard
from clcomm.transport import mpi

#: Exit code of a job that the watchdog ends, as timeout(1) has it.
TIMED_OUT = 124
#: How often a thread wakes, at most; with limits below some seconds more often.
INTERVAL_S = 1.0
#: Ranks may start so far apart without a word: imports from a network's disk take their time.
START_S = 30.0
#: A rank that has not written its line for so long, though its process runs, is in code that lets no thread work.
SILENT_S = 3.0
#: How long a job's end waits for the other ranks to dump what they did.
DUMP_S = 2.0
#: What a rank's line says when it has left the program; how long it looks back then, and at waits of how long.
LEFT, LOOK_BACK_S, AWAITED_S = "has left the program", 4.0, 1.5
#: By how much the alarm comes after the thread that can explain itself.
ALARM_MARGIN_S = 2.0

_log = logging.getLogger("clcomm")

_OURS = str(Path(__file__).parent) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class Limits:
    """After how many seconds in one collective a rank says who is missing, and after how many it ends the job."""

    stall_warning_s: float
    timeout_s: float

    @classmethod
    def of(cls, stall_warning_s: float, timeout_s: float) -> Limits:
        """Return the limits, CLCOMM_STALL_WARNING_S and CLCOMM_TIMEOUT_S before the arguments; 0: none."""
        return cls(
            _limit("stall_warning_s", stall_warning_s, "CLCOMM_STALL_WARNING_S"),
            _limit("timeout_s", timeout_s, "CLCOMM_TIMEOUT_S"),
        )

    @property
    def interval_s(self) -> float:
        """How often to look."""
        return min(INTERVAL_S, self.stall_warning_s / 4, self.timeout_s / 4)

    def __bool__(self) -> bool:
        return min(self.stall_warning_s, self.timeout_s) < math.inf


def _limit(name: str, value: float, variable: str) -> float:
    given = os.environ.get(variable)
    try:
        seconds = float(value if given is None else given)
    except (TypeError, ValueError):
        seconds = -1.0
    if not seconds >= 0:
        said = f"{name}: " if given is None else f"{variable}: "
        raise ArgumentError(f"{said}expected seconds, 0 for no limit, got {value if given is None else given!r}")
    return seconds or math.inf


class Watchdog:
    """Watches the collectives of one Communicator, which it does not keep alive, from a thread of its own.

    watched: has `current`: (call, sequence number, begin in perf_counter's seconds), or None outside collectives.
    """

    def __init__(self, watched: Any, board: ProgressBoard, limits: Limits, recorder: FlightRecorder, others: int):
        self._watched, self._board, self._limits, self._recorder = weakref.ref(watched), board, limits, recorder
        self._ranks_elsewhere = others
        self._program = threading.get_ident()
        self._warned_of: tuple[Any, int, float] | None = None
        self._has_dumped = False
        self.look(None)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="clcomm-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._limits.interval_s):
            watched = self._watched()
            if watched is None:
                return
            current = watched.current
            del watched
            try:
                self.look(current)
            except Exception:  # a job must not fail because nobody watches it
                _log.exception("the watchdog of rank %d ends; the job goes on unwatched", self._board.own)
                return

    def look(self, current: tuple[Any, int, float] | None) -> None:
        """Write this rank's line, and act if its collective has taken too long or another rank ends the job."""
        if current is None:
            self._board.write(0, 0, "", self.place())
            waited_s = 0.0
        else:
            call, sequence, began_s = current
            self._board.write(call.tag + sequence + 1, int(began_s * 1e9), call.describe(sequence), self.place())
            waited_s = perf_counter() - began_s
        folder = self._board.dump_folder
        if folder:
            self._dump(folder)
        elif waited_s > self._limits.timeout_s:
            self._end_job(waited_s)
        elif waited_s > self._limits.stall_warning_s and self._warned_of != current:
            self._warned_of = current
            self._warn(waited_s)

    def leave(self, sequence: int) -> str:
        """Tell the others that this rank leaves the program, after so many collectives; end the thread.

        Returns, in words, what another rank of the host waits in that needs this one; "" when all leave or nobody has
        waited after some seconds: they may have work of their own.
        """
        self.stop()
        self._board.write(0, 0, LEFT, "")
        deadline = perf_counter() + LOOK_BACK_S
        while perf_counter() < deadline:
            others = [line for line in self._board.read() if line.rank != self._board.own]
            if all(line.text == LEFT or line.state != "running" for line in others):
                return ""
            for line in others:
                number = re.search(r"#(\d+)(?: \(|$)", line.text)
                waited_s = (perf_counter_ns() - line.began_ns) / 1e9
                if line.waits and number and int(number[1]) > sequence and waited_s > AWAITED_S:
                    where = f", called at {line.place}" if line.place else ""
                    return f"left while rank {line.rank} waits for it in {line.text}{where}"
            sleep(0.05)
        return ""

    # --- after a while: who is missing ---

    def _warn(self, waited_s: float) -> None:
        lines = self._board.read()
        if self._is_lowest(lines, self._limits.stall_warning_s) and self._is_first_to_report():
            self._board.note_report()
            end = f"; after {self._limits.timeout_s:g} s the job ends" if self._limits.timeout_s < math.inf else ""
            job.print_line(f"clcomm: {self.stall(lines, waited_s)}{end}")

    def _is_first_to_report(self) -> bool:
        last_ns = self._board.reported_ns
        return not last_ns or perf_counter_ns() - last_ns > self._limits.stall_warning_s * 1e9

    def _is_lowest(self, lines: list[Progress], limit_s: float) -> bool:
        """Say whether this is the lowest rank of its host that lives and has waited for longer than that."""
        now_ns = perf_counter_ns()
        waiting = [
            line.rank for line in lines
            if line.waits and line.state == "running" and now_ns - line.began_ns > limit_s * 1e9
            and now_ns - line.beat_ns < SILENT_S * 1e9
        ]  # fmt: skip
        return self._board.own <= min(waiting, default=self._board.own)

    def stall(self, lines: list[Progress], waited_s: float) -> str:
        """Return in a sentence where this rank waits, and what the ranks do that are not there."""
        own = next(line for line in lines if line.rank == self._board.own)
        missing: dict[str, list[int]] = {}
        for line in lines:
            if line.key != own.key or line.state != "running":
                missing.setdefault(_doing(line), []).append(line.rank)
        listed = ", ".join(f"{name_ranks(ranks)} ({doing})" for doing, ranks in missing.items())
        known = f"missing: {listed}" if missing else "no rank is missing"
        if self._ranks_elsewhere:
            known += f" on this host; the {self._ranks_elsewhere} on other hosts are not known here"
        where = f", called at {own.place}" if own.place else ""
        return f"rank {own.rank} has waited {waited_s:.1f} s in {own.text}{where}; {known}"

    # --- at last: the end ---

    def _end_job(self, waited_s: float) -> None:
        lines = self._board.read()
        if not self._is_lowest(lines, self._limits.timeout_s):
            return  # the lowest ends it; if it does not, this one is the lowest when that one's line is old
        exits.end_by_force_later(TIMED_OUT)
        folder = self._board.dump_folder = new_dump_folder()
        if folder:
            self._dump(folder)
            self._wait_for_dumps()
        written = f"; what each rank did last is in {folder}/rank-*.json" if folder else ""
        job.print_line(
            f"clcomm: {self.stall(lines, waited_s)}; the limit is {self._limits.timeout_s:g} s, the job ends{written}"
        )
        job.abort(TIMED_OUT)

    def _wait_for_dumps(self) -> None:
        deadline = perf_counter() + DUMP_S
        while perf_counter() < deadline:
            lines = self._board.read()
            if not self._ranks_elsewhere and all(line.dumped or line.state != "running" for line in lines):
                return
            sleep(0.02)

    def _dump(self, folder: str) -> None:
        """Write this rank's flight recorder to the folder, once, and its last words to the terminal."""
        if self._has_dumped:
            return
        self._has_dumped = True
        own = next(line for line in self._board.read() if line.rank == self._board.own)
        with _no_collection():
            frame = sys._current_frames().get(self._program)
            stack = [] if frame is None else [line.rstrip() for line in traceback.format_stack(frame)]
        try:
            self._recorder.dump(
                folder, own.rank, host=os.uname().nodename, pid=os.getpid(), collective=own.text, place=own.place,
                stack=stack,
            )  # fmt: skip
        except OSError as error:
            job.print_line(f"clcomm: rank {own.rank}: its last operations could not be written: {error}")
        job.print_line(f"clcomm: rank {own.rank}, last operations: {self._recorder.last_words()}")
        self._board.note_dump()

    def place(self) -> str:
        """Return where in the program this rank is: "train.py:57 in load, from train.py:80 in main"."""
        with _no_collection():
            return place_of(sys._current_frames().get(self._program))


def _doing(line: Progress) -> str:
    if line.text == LEFT:
        return LEFT
    at = f" at {line.place}" if line.place else ""
    inside = f"in {line.text}{at}" if line.waits else f"in no collective but{at or ' elsewhere'}"
    if line.state == "stopped":
        return f"stopped by SIGSTOP or a debugger, was {inside}"
    if line.state == "dead":
        return f"its process has ended, was {inside}"
    silent_s = (perf_counter_ns() - line.beat_ns) / 1e9
    return f"lets no other thread work for {silent_s:.0f} s, was {inside}" if silent_s > SILENT_S else inside


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector still while another thread's frames are looked at.

    CPython 3.11 makes frame objects while it holds a lock of the interpreter. Were it to collect then, an object that
    lets other threads run as it goes (mmap's, for one) would end in a deadlock, or in frames that are no more.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def place_of(frame: FrameType | None) -> str:
    """Return the innermost frame that is not clcomm's own, and the next one that is no library's."""
    outside = [each for each in _outwards(frame) if not each.f_code.co_filename.startswith(_OURS)]
    if not outside:
        return ""
    program = next((each for each in outside[1:] if not _is_library(each)), None)
    return _name(outside[0]) + (f", from {_name(program)}" if program is not None else "")


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(("<", *_LIBRARIES))


def _name(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}"


class StartWatch:
    """Watches the creation of a Communicator, when there is no board yet to tell who is missing: a context manager.

    While MPI starts, mpi4py lets no thread work; then SIGALRM ends a rank whose others don't come, with its traceback.
    """

    def __init__(self, limits: Limits):
        warning_s = max(limits.stall_warning_s, START_S)
        self._timers = [
            threading.Timer(limit_s, act, (f"clcomm: rank {mpi.launched_rank()} has waited {limit_s:g} s for the other "
                                           f"ranks to create their Communicator",))
            for limit_s, act in ((warning_s, job.print_line), (limits.timeout_s, self._end_job))
            if limit_s < math.inf and mpi.launched_ranks() > 1
        ]  # fmt: skip
        starts = mpi.launched_ranks() > 1 and limits.timeout_s < math.inf and not mpi.is_running()
        is_ours = starts and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
        self._alarm_s = limits.timeout_s + ALARM_MARGIN_S if is_ours else 0.0

    def __enter__(self) -> None:
        if self._alarm_s:
            with contextlib.suppress(ValueError, OSError, AttributeError):  # a stderr that is no file
                faulthandler.register(signal.SIGALRM, all_threads=False, chain=True)
            signal.setitimer(signal.ITIMER_REAL, self._alarm_s)
        for timer in self._timers:
            timer.daemon = True
            timer.start()

    def __exit__(self, *error: object) -> None:
        for timer in self._timers:
            timer.cancel()
        if self._alarm_s:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.unregister(signal.SIGALRM)

    def _end_job(self, said: str) -> None:
        exits.end_by_force_later(TIMED_OUT)
        job.print_line(f"{said}; the job ends")
        job.abort(TIMED_OUT)
