"""Processes that a failed test has left: ended, so that no later test meets them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def children(process: int | str = "self") -> Iterator[int]:
    """Yield the processes that this one, or another, has started and that still run."""
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{process}/task").iterdir():
            yield from map(int, (thread / "children").read_text().split())


def kill_with_descendants(process: int) -> None:
    """Stop a process first, so that it starts no other one in the meantime."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGSTOP)
        for child in list(children(process)):
            kill_with_descendants(child)
        os.kill(process, signal.SIGKILL)
