"""Logging that knows its rank: rank 0 tells what goes on, the others only what goes wrong."""

from __future__ import annotations

import logging
import sys


def configure(rank: int, world_size: int, quiet: bool = False) -> logging.Logger:
    """Send clcomm's log records to stderr, each with its rank where there are several, and return its logger."""
    where = f"rank {rank}: " if world_size > 1 else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"clcomm: {where}%(message)s"))
    logger = logging.getLogger("clcomm")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank == 0 and not quiet else logging.WARNING)
    logger.propagate = False
    return logger
