"""Logging that knows its rank: rank 0 tells what goes on, the others only what goes wrong."""

from __future__ import annotations

import logging
import sys


class _StderrHandler(logging.StreamHandler):
    """Writes to what standard error is at the moment: while a bar is shown, that is above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure(rank: int, world_size: int, quiet: bool = False) -> logging.Logger:
    """Send clcomm's log records to stderr, each with its rank where there are several, and return its logger."""
    where = f"rank {rank}: " if world_size > 1 else ""
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(f"clcomm: {where}%(message)s"))
    logger = logging.getLogger("clcomm")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank == 0 and not quiet else logging.WARNING)
    logger.propagate = False
    return logger
