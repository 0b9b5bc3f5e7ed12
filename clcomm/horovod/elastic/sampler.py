"""A sampler that divides what is left of an epoch among the ranks that are left."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from clcomm.horovod import world


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Gives each rank its part of the samples that this epoch has not processed yet.

    Make it part of a TorchState, call `record_batch` after each batch, and `set_epoch` at the end of each epoch.

    Args:
        dataset: of constant length.
        shuffle: whether samples are shuffled, anew in each epoch.
        seed: of the shuffle, the same on every rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0):
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with all samples to process."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed a batch of `batch_size` samples; batch_idx, its number, is not needed."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of samples processed in it, over all ranks."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, with today's ranks."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide what is left among the ranks of now."""
        self.rank, self.num_replicas = world.rank(), world.size()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices; the first ones repeat where the ranks would have unequal numbers."""
        left = self.remaining_indices
        for position in range(self.rank, self.total_size, self.num_replicas):
            yield left[position % len(left)]

    def __len__(self) -> int:
        return self.num_samples
