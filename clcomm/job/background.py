"""Collectives that run in threads beside the program: they end before Python and MPI do.

MPI_Finalize crashes while another thread is in MPI, and a thread that Python's end stops within a function of C++ ends
the process by SIGABRT.
"""

from __future__ import annotations

import time
import weakref
from typing import Protocol


class Queue(Protocol):
    """Collectives that a thread of their own runs one after another."""

    def close(self, within_s: float | None = None) -> bool:
        """Complete what was started and end the thread; return whether it has ended within this time, None: any."""


_open: weakref.WeakSet[Queue] = weakref.WeakSet()


def register(queue: Queue) -> None:
    """Let `finish` close a queue."""
    _open.add(queue)


def finish(within_s: float | None = None) -> bool:
    """Complete all that was started and end the threads; return whether they have ended within this time, None: any."""
    began_s = time.monotonic()
    left_s = None
    ended = []
    for queue in list(_open):
        if within_s is not None:
            left_s = max(0.0, began_s + within_s - time.monotonic())
        ended.append(queue.close(left_s))
    return all(ended)
