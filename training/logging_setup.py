"""Log records with their rank: from rank 0 all, from the others warnings and errors."""

from __future__ import annotations

import logging
import sys


class _StderrHandler(logging.StreamHandler):
    """Writes to the current sys.stderr, which a progress line replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure_logging(rank: int, world_size: int, quiet: bool = False) -> logging.Logger:
    """Send clcomm's log records to stderr, each with its rank if there are several, and return its logger.

    With `quiet` rank 0 also logs only warnings and errors.
    """
    where = f"rank {rank}: " if world_size > 1 else ""
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(f"clcomm: {where}%(message)s"))
    logger = logging.getLogger("clcomm")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank == 0 and not quiet else logging.WARNING)
    logger.propagate = False
    return logger
