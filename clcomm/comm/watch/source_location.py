"""The source location of a thread in the user's program: the innermost frames outside clcomm."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from clcomm.comm.stats.fr_trace import Frame

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
