"""The samples of a rank that computes several logical shards of each step."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from clcomm.sync.sampler import DistributedSampler


class ShardSampler:
    """Samplers of one rank's logical shards as one: batch b of each shard, in the shards' order, then batch b + 1.

    Args:
        shards: a sampler of each, all equally long: that of a rank in a world of as many ranks as there are shards.
    """

    equal_shards = True

    def __init__(self, shards: Sequence[DistributedSampler]):
        self._shards = tuple(shards)
        self.epoch = shards[0].epoch

    def __copy__(self) -> ShardSampler:
        return ShardSampler([copy.copy(shard) for shard in self._shards])

    @property
    def longest_shard(self) -> int:
        """Length of one shard."""
        return self._shards[0].longest_shard

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def deal(self, shards: range) -> None:
        """Take these logical shards' samples from now on."""
        self._shards = tuple(copy.copy(self._shards[0]) for _ in shards)
        for shard, sampler in zip(shards, self._shards, strict=True):
            sampler.rank = shard

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is used from now on."""
        for shard in self._shards:
            shard.set_epoch(epoch)
        self.epoch = epoch

    def indices(self) -> np.ndarray:
        """Return the shards' indices, one shard after another."""
        return np.concatenate([shard.indices() for shard in self._shards])

    def batches(self, batch_size: int) -> list[np.ndarray]:
        """Return the indices of each batch, of which each shard has as many."""
        order = self._shards[0].global_order()  # once, as it is the same for all
        own = [order[shard.rank :: shard.world_size] for shard in self._shards]
        starts = range(0, self.longest_shard, batch_size)
        return [indices[start : start + batch_size] for start in starts for indices in own]

    def batch_count(self, batch_size: int) -> int:
        """Return the number of batches of all of this rank's shards in an epoch."""
        return sum(shard.batch_count(batch_size) for shard in self._shards)

    def check_batch_size(self, batch_size: int) -> None:
        """Raise ArgumentError where `batch_size` is not positive or exceeds a shard."""
        self._shards[0].check_batch_size(batch_size)

    def state_dict(self) -> dict[str, int]:
        """Return what determines the order; the same on every number of ranks."""
        return self._shards[0].state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set what `state_dict` returned; CheckpointError, changing nothing, if it does not fit."""
        for shard in self._shards:
            shard.load_state_dict(state)
        self.epoch = self._shards[0].epoch
