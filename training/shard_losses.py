"""The losses of an epoch by logical shard, so that their mean has the same bits whichever ranks compute the shards."""

from __future__ import annotations

from clcomm.comm.communicator import Communicator
from clcomm.sync.logical_shards import METRICS, LogicalShards


class ShardLosses:
    """Sums of losses times samples, and samples, of this rank's shards in an epoch."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, int]] = {}

    def clear(self) -> None:
        """Begin an epoch."""
        self._sums.clear()

    def add(self, shard: int, loss: float, samples: int) -> None:
        """Count a batch of a shard with its mean loss."""
        before, counted = self._sums.get(shard, (0.0, 0))
        self._sums[shard] = before + loss * samples, counted + samples

    def deal(self, comm: Communicator, shards: LogicalShards) -> None:
        """Hand the sums of shards that this rank no longer has to those that have them; collective."""
        for theirs in comm.all_gather_object(self._sums, label=METRICS):
            self._sums.update(theirs)
        self._sums = {shard: sums for shard, sums in self._sums.items() if shard in shards.own}

    def total(self, comm: Communicator, shards: LogicalShards) -> tuple[float, float]:
        """Return the sums of all shards, in their order; collective."""
        loss, samples = shards.total(comm, self._sums, 2)
        return loss, samples
