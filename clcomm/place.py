"""Where in the program a thread is, in a line that its author knows: the innermost frames that are not clcomm's own."""

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

_OURS = str(Path(__file__).parent) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")})


def place_of_thread(thread: int) -> str:
    """Return where a thread is, by its identity: "train.py:57 in load, from train.py:80 in main"."""
    with _no_collection():
        return place_of(sys._current_frames().get(thread))


def stack_of_thread(thread: int) -> list[str]:
    """Return a thread's stack as a traceback shows it, outermost first."""
    with _no_collection():
        frame = sys._current_frames().get(thread)
        return [] if frame is None else [line.rstrip() for line in traceback.format_stack(frame)]


def place_of(frame: FrameType | None) -> str:
    """Return the innermost frame that is not clcomm's own, and the next one that is no library's."""
    outside = [each for each in _outwards(frame) if not each.f_code.co_filename.startswith(_OURS)]
    if not outside:
        return ""
    program = next((each for each in outside[1:] if not _is_library(each)), None)
    return _name(outside[0]) + (f", from {_name(program)}" if program is not None else "")


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


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(("<", *_LIBRARIES))


def _name(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}"
