"""The message for a stalled collective: the waiting rank, the missing ranks, and what these do instead."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter_ns
from types import FrameType

from clcomm.base.errors import name_ranks
from clcomm.comm.stats.events import Call
from clcomm.comm.stats.flight_recorder import FlightRecorder, Frame, Group, trace_of, write_private
from clcomm.comm.transport.mpi_resources import MpiResources
from clcomm.comm.watch.status_page import RankStatus

#: A running rank whose line is older than this is in code that blocks all of its threads.
SILENT_S = 3.0
#: Text of the line of a rank that has left the program.
LEFT = "has left the program"
#: State of the ranks of a host that does not answer.
UNKNOWN = "unknown"


def describe(
    own_rank: int, lines: Sequence[RankStatus], waited_s: float, name_of: Callable[[Sequence[int]], str] = name_ranks
) -> str:
    """Return a sentence on where a rank waits and what the missing ranks do.

    Args:
        own_rank: the rank that waits.
        lines: all ranks', including its own.
        waited_s: for how long it has waited.
        name_of: returns ranks in words.
    """
    own = next(line for line in lines if line.rank == own_rank)
    missing: dict[str, list[int]] = {}
    for line in lines:
        if line.key != own.key or line.state != "running":
            missing.setdefault(_activity_of(line), []).append(line.rank)
    listed = ", ".join(f"{name_of(ranks)} ({doing})" for doing, ranks in missing.items())
    known = f"missing: {listed}" if missing else "no rank is missing"
    where = f", called at {own.place}" if own.place else ""
    return f"{name_of([own.rank])} has waited {waited_s:.1f} s in {own.text}{where}; {known}"


def left_while_awaited(rank: str, text: str, place: str) -> str:
    """Return the reason to end the job when a rank has left the program and another one waits for it.

    Args:
        rank: the rank that waits, in words.
        text: its collective.
        place: its source location, or "".
    """
    where = f", called at {place}" if place else ""
    return f"left while {rank} waits for it in {text}{where}"


def is_lowest(rank: int, lines: Sequence[RankStatus], limit_s: float) -> bool:
    """Return whether no lower rank that still responds has waited for longer than the limit."""
    now_ns = perf_counter_ns()
    waiting = [
        line.rank for line in lines
        if line.waits and line.state == "running" and now_ns - line.began_ns > limit_s * 1e9
        and now_ns - line.beat_ns < SILENT_S * 1e9
    ]  # fmt: skip
    return rank <= min(waiting, default=rank)


def _activity_of(line: RankStatus) -> str:
    if line.state == UNKNOWN:
        return "no rank on its host answers"
    if line.text == LEFT:
        return LEFT
    at = f" at {line.place}" if line.place else ""
    inside = f"in {line.text}{at}" if line.text else f"in no collective but{at or ' elsewhere'}"
    if line.state == "stopped":
        return f"stopped by SIGSTOP or a debugger, was {inside}"
    if line.state == "dead":
        return f"its process has ended, was {inside}"
    silent_s = (perf_counter_ns() - line.beat_ns) / 1e9
    return f"lets no other thread work for {silent_s:.0f} s, was {inside}" if silent_s > SILENT_S else inside


# --- The source location of a thread in the user's program: the innermost frames outside clcomm. ---

_OURS = str(Path(__file__).parents[2]) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")})


def place_of_thread(thread: int) -> str:
    """Return the location of a thread, by its identifier: "train.py:57 in load, from train.py:80 in main"."""
    with _no_collection():
        return place_of_frame(sys._current_frames().get(thread))


def stack_of_thread(thread: int) -> list[str]:
    """Return a thread's stack as a traceback shows it, outermost first."""
    with _no_collection():
        frame = sys._current_frames().get(thread)
        return [] if frame is None else [line.rstrip() for line in traceback.format_stack(frame)]


def frames_of_thread(thread: int) -> list[Frame]:
    """Return a thread's frames outside clcomm, innermost first."""
    with _no_collection():
        return [
            Frame(each.f_code.co_name, each.f_code.co_filename, each.f_lineno)
            for each in _outwards(sys._current_frames().get(thread))
            if not each.f_code.co_filename.startswith(_OURS)
        ]


def place_of_frame(frame: FrameType | None) -> str:
    """Return the innermost frame outside clcomm, and the next one outside libraries."""
    outside = [each for each in _outwards(frame) if not each.f_code.co_filename.startswith(_OURS)]
    if not outside:
        return ""
    program = next((each for each in outside[1:] if not _is_library(each)), None)
    return _name(outside[0]) + (f", from {_name(program)}" if program is not None else "")


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the garbage collector while another thread's frames are read.

    CPython 3.11 creates frame objects while it holds a lock of the interpreter. A collection at that point could free
    an object that releases the GIL (mmap's, for one), and cause a deadlock or invalid frames.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(("<", *_LIBRARIES))


def _name(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}"


# --- A rank's last operations, in two files: one to read, and one for PyTorch's flight recorder analyser. ---

Unfinished = Sequence[tuple[Call, int]]


class Dump:
    """Writes what one rank of a Communicator did last.

    Args:
        rank, size: this rank's number, and how many there are.
        recorder: has the collectives that have finished.
        resources: the Communicator's, for its name and the ranks' numbers in the world; None: it has none.
    """

    def __init__(self, rank: int, size: int, recorder: FlightRecorder, resources: MpiResources | None):
        self._rank, self._recorder = rank, recorder
        self._group: Group | None = None
        if resources is not None:
            number, members = resources.key
            self._group = Group(str(number), resources.names.name or "undefined", members or range(size))

    def write(self, folder: str, unfinished: Unfinished, thread: int, text: str = "", place: str = "") -> None:
        """Write rank-N.json and, where there are others, trace_N: N is this rank's number here and in the world.

        Raises OSError where one of the files exists or cannot be written.

        Args:
            folder: an existing one.
            unfinished: the collectives that this rank has begun, with their numbers.
            thread: the program's, whose stack the files have.
            text, place: the collective in which it is, and its source location.
        """
        self._recorder.dump(
            folder, self._rank, host=os.uname().nodename, pid=os.getpid(), collective=text, place=place,
            stack=stack_of_thread(thread),
        )  # fmt: skip
        if self._group is None:
            return
        trace = trace_of(self._recorder.last(), unfinished, self._group, frames_of_thread(thread))
        write_private(os.path.join(folder, f"trace_{self._group.ranks[self._rank]}"), trace)
