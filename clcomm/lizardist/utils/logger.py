"""LizarDist's logger, which writes the rank before each message."""

from __future__ import annotations

import logging
from typing import TextIO


class _RankHandler(logging.StreamHandler[TextIO]):
    """The handler that `get_logger` adds; its class distinguishes it from the program's own handlers."""


def get_logger(rank: int, name: str = "lizardist", level: int = logging.INFO) -> logging.Logger:
    """Return the logger of a name, which writes messages of a level or above to stderr, with the rank."""
    logger = logging.getLogger(name)
    logger.setLevel(level)
    for handler in [each for each in logger.handlers if isinstance(each, _RankHandler)]:
        logger.removeHandler(handler)  # else a second call would write each message twice
    handler = _RankHandler()
    handler.setFormatter(logging.Formatter(f"[Rank {rank}] %(asctime)s - %(name)s - %(levelname)s - %(message)s"))
    logger.addHandler(handler)
    return logger
