"""LizarDist's Synchronizer: clcomm's with LizarDist's defaults and counts."""

from __future__ import annotations

from typing import Any

from clcomm.communicator import Communicator
from clcomm.lizardist.utils.logger import get_logger
from clcomm.synchronizer import Synchronizer as _Synchronizer


class Synchronizer(_Synchronizer):
    """A Synchronizer that sets its Communicator's `use_bucketing`, to True by default.

    Args:
        settings: further arguments of `clcomm.synchronizer.Synchronizer`.
    """

    def __init__(self, comm: Communicator, use_bucketing: bool = True, **settings: Any):
        super().__init__(comm, use_bucketing, **settings)
        comm.use_bucketing = use_bucketing
        self.logger = get_logger(comm.rank, "synchronizer")

    def get_communication_stats(self) -> dict[str, float]:
        """Return the Communicator's `get_bucket_stats()`: all of its all-reduces."""
        return self.comm.get_bucket_stats()
