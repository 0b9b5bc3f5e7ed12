"""Signals that come while a command, or a rank of `clcomm run`, still loads its modules."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

from clcomm.base.host.launcher import launched_rank

#: The signals that end a program, and what is said of them.
ENDED_BY = {
    signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM", signal.SIGHUP: "ended by SIGHUP",
}  # fmt: skip


def handle_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """Set the handler of these signals, but of those that this process was started to ignore."""
    for number in ENDED_BY:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def say_ended(number: int) -> None:
    """Print what ends this process, for all ranks one line."""
    if not launched_rank():
        os.write(2, f"clcomm: {ENDED_BY[signal.Signals(number)]}\n".encode())


def leave_to_python() -> None:
    """Give the signals to Python and the program again."""
    handle_signals(signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
