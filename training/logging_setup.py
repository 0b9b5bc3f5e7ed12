"""Log records with their rank: from rank 0 all, from the others warnings and errors."""

from __future__ import annotations

import logging
import sys


class _StderrHandler(logging.StreamHandler):
    """Writes to the current standard error, which is above the progress line while there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure_logging(rank: int, world_size: int, quiet: bool = False) -> logging.Logger:
    """Send clcomm's log records to stderr, each with its rank where there are several, and return its logger."""
    where = f"rank {rank}: " if world_size > 1 else ""
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(f"clcomm: {where}%(message)s"))
    logger = logging.getLogger("clcomm")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank == 0 and not quiet else logging.WARNING)
    logger.propagate = False
    return logger
