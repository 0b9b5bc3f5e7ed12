"""LizarDist's logger, which writes the rank before each message."""

from __future__ import annotations

import logging


class _OfRank(logging.StreamHandler):
    """Writes a logger's messages to stderr, with a rank."""


def get_logger(rank: int, name: str = "lizardist", level: int = logging.INFO) -> logging.Logger:
    """Return the logger of this name, which writes each message of this level or above with the rank."""
    logger = logging.getLogger(name)
    logger.setLevel(level)
    for handler in [each for each in logger.handlers if isinstance(each, _OfRank)]:
        logger.removeHandler(handler)  # of an earlier call
    handler = _OfRank()
    handler.setFormatter(logging.Formatter(f"[Rank {rank}] %(asctime)s - %(name)s - %(levelname)s - %(message)s"))
    logger.addHandler(handler)
    return logger
