"""LizarDist's modules under their own names: a script has only to import `clcomm.lizardist` instead of `lizardist`.

Signatures, defaults and counts are LizarDist's; transports and bucketing are clcomm's. Its modules, such as
`clcomm.lizardist.distributed.sync`, are this one by their own names; `clcomm.lizardist.engine.model` needs PyTorch.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

from clcomm.comm.communicator import Communicator
from clcomm.sync.synchronizer import Synchronizer as _Synchronizer

__all__ = ["Communicator", "Synchronizer", "get_logger"]


class Synchronizer(_Synchronizer):
    """A Synchronizer that sets its Communicator's `use_bucketing`, to True by default.

    Args:
        settings: further arguments of `clcomm.sync.synchronizer.Synchronizer`.
    """

    def __init__(self, comm: Communicator, use_bucketing: bool = True, **settings: Any):
        super().__init__(comm, use_bucketing, **settings)
        comm.use_bucketing = use_bucketing
        self.logger = get_logger(comm.rank, "synchronizer")

    def get_communication_stats(self) -> dict[str, float]:
        """Return the Communicator's `get_bucket_stats()`: all of its all-reduces."""
        return self.comm.get_bucket_stats()


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


for _name in ("distributed", "distributed.communicator", "distributed.sync", "engine", "utils", "utils.logger"):
    sys.modules[f"{__name__}.{_name}"] = globals()[_name.rpartition(".")[2]] = sys.modules[__name__]
