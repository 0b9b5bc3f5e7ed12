"""Samplers: which samples each rank takes, in which order; NumPy only, no communication.

Every rank computes the same global order from (seed, epoch) and takes its own part of it. Legend: N samples, W ranks,
batches of b samples a rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from clcomm.base.errors import ArgumentError, CheckpointError
from clcomm.jobs.checkpoint import whole_number

if TYPE_CHECKING:
    from clcomm.sync.logical_shards import LogicalShards

#: The least and the largest valid value of each entry of a checkpoint.
_RANGES = {
    "length": (1, (1 << 63) - 1),
    "world_size": (1, (1 << 31) - 1),
    "seed": (0, (1 << 64) - 1),
    "shuffle": (0, 1),
    "epoch": (0, (1 << 63) - 1),
}


#: Keys from this number up are sorted faster by parts of their bits.
_MANY = 8192


class Sampler(Protocol):
    """This rank's sample indices of the current epoch, for a loader."""

    epoch: int
    equal_shards: bool

    def __len__(self) -> int: ...
    def set_epoch(self, epoch: int) -> None: ...
    def indices(self) -> np.ndarray: ...
    def batches(self, batch_size: int) -> list[np.ndarray]: ...
    def batch_count(self, batch_size: int) -> int: ...
    def check_batch_size(self, batch_size: int) -> None: ...
    @property
    def longest_shard(self) -> int: ...
    def state_dict(self) -> dict[str, int]: ...
    def load_state_dict(self, state: dict[str, int]) -> None: ...


def shuffled(length: int, seed: int, epoch: int, stream: int = 0) -> np.ndarray:
    """Return a permutation of range(length), int64, that depends only on (seed, epoch, stream).

    The samples are sorted by Philox's raw 64-bit output, which NumPy guarantees to keep (unlike its Generator
    methods), so a checkpoint resumes with the same order under any NumPy.
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    return _stable_order(np.random.Philox(key=key, counter=counter).random_raw(length))


def _stable_order(keys: np.ndarray) -> np.ndarray:
    """Return np.argsort(keys, kind="stable") of uint64 keys, int64.

    NumPy sorts 16 bits by radix, so that many keys are sorted 16 bits at a time, from bit 16 up: in a third of the
    time, at the start of each epoch. Keys that differ in the lowest bits alone are rare.
    """
    if len(keys) >= _MANY:
        order = np.argsort((keys >> np.uint64(16)).astype(np.uint16), kind="stable")
        for shift in (32, 48):
            order = order[np.argsort((keys >> np.uint64(shift)).astype(np.uint16)[order], kind="stable")]
        upper = keys[order] >> np.uint64(16)
        if (upper[1:] != upper[:-1]).all():
            return order.astype(np.int64, copy=False)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


class _ShardSampler(ABC):
    """Base of the samplers: checked arguments, epoch, length, state."""

    equal_shards = True

    def __init__(self, length: int, rank: int, world_size: int, shuffle: bool, seed: int) -> None:
        self.length = _whole(length, "length", 1, "the number of samples")
        self.world_size = _whole(world_size, "world_size", 1, "the number of ranks")
        self.rank = _whole(rank, "rank", 0, "a rank of the world")
        if rank >= world_size:
            raise ArgumentError(f"rank: expected 0 to {world_size - 1} of {world_size} ranks, got {rank}")
        self.seed = _whole(seed, "seed", 0, "a seed of at most 64 bits")
        self.shuffle = bool(shuffle)
        self.epoch = 0
        self.done = 0  # samples of the epoch that a job of another size has processed

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is used from now on; call it on every rank."""
        if epoch != self.epoch:
            self.done = 0
        self.epoch = _whole(epoch, "epoch", 0, "the epoch's number")

    @abstractmethod
    def indices(self) -> np.ndarray:
        """Return this rank's sample indices in order, int64, (len(self),)."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist())

    def batches(self, batch_size: int) -> list[np.ndarray]:
        """Return this rank's indices batch by batch, of which the last may be shorter."""
        indices = self.indices()
        return [indices[start : start + batch_size] for start in range(0, len(indices), batch_size)]

    def batch_count(self, batch_size: int) -> int:
        """Return the number of this rank's batches in an epoch."""
        return -(-len(self) // batch_size)

    def check_batch_size(self, batch_size: int) -> None:
        """Raise ArgumentError where `batch_size` is not positive or exceeds this rank's shard.

        Shards are equally long, so every rank raises or none does; unequal shards have no upper bound.
        """
        _whole(batch_size, "batch_size", 1, "samples a rank and step")
        if self.equal_shards and batch_size > len(self):
            ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
            raise ArgumentError(
                f"batch_size: expected at most {len(self)}, a rank's shard of {self.length} samples over "
                f"{ranks}, got {batch_size}; take a smaller batch, fewer ranks or more data"
            )

    def __len__(self) -> int:
        return len(self.indices())

    @property
    def longest_shard(self) -> int:
        """Length of the longest shard of all ranks."""
        return len(self) if self.equal_shards else -(-(self.length - self.done) // self.world_size)

    def state_dict(self) -> dict[str, int]:
        """Return what determines the order, as integers for a checkpoint."""
        return {
            "length": self.length,
            "world_size": self.world_size,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "epoch": self.epoch,
            "done": self.done,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set seed, shuffle and epoch from `state`; CheckpointError, changing nothing, if it does not fit this job."""
        self._load(state, same=("length", "world_size"))

    def _load(self, state: dict[str, int], same: tuple[str, ...]) -> None:
        found = {name: whole_number(f"sampler.{name}", state.get(name), *_RANGES[name]) for name in _RANGES}
        for name in same:
            if found[name] != getattr(self, name):
                raise CheckpointError(
                    f"sampler {name}: the checkpoint was written with {found[name]}, this job has "
                    f"{getattr(self, name)}; resume with the same data and number of ranks"
                )
        whole_number("sampler.done", state.get("done", 0), 0, self.length - 1)
        self.seed, self.shuffle = found["seed"], bool(found["shuffle"])
        self.set_epoch(found["epoch"])


class DistributedSampler(_ShardSampler):
    """Rank r gets every W-th sample of one global order: G[r], G[r + W], G[r + 2W], …

    Step s of W ranks at batch b covers G[s*W*b : (s+1)*W*b], the same samples as one rank at batch W*b.
    Shards are equally long: the order is padded by wrapping to its start (no sample is lost, fewer than W
    are repeated), or with `drop_last` cut to a multiple of W. With `pad=False` each sample occurs exactly once, and the
    first N mod W ranks have one more than the others.
    """

    def __init__(
        self,
        length: int,
        rank: int,
        world_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        pad: bool = True,
    ) -> None:
        super().__init__(length, rank, world_size, shuffle, seed)
        self.drop_last = drop_last
        self.equal_shards = pad or drop_last
        if drop_last and length < world_size:
            raise ArgumentError(
                f"drop_last: {length} samples leave {world_size} ranks without any; use drop_last=False"
            )

    def leave_out(self, done: int) -> None:
        """Skip the first `done` samples of the epoch's global order, which a job of another size has processed."""
        self.done = _whole(done, "done", 0, "samples of the epoch")
        if done >= self.length:
            raise ArgumentError(f"done: expected fewer than the {self.length} samples of an epoch, got {done}")

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set seed, shuffle, epoch and samples done from `state`; CheckpointError if it does not fit this job.

        After a job of another size, call `leave_out` with the number of samples that it had processed.
        """
        self._load(state, same=("length",))
        self.leave_out(int(state.get("done", 0)))

    def __len__(self) -> int:
        whole, rest = divmod(self.length - self.done, self.world_size)
        if self.drop_last or not rest:
            return whole
        return whole + (self.equal_shards or self.rank < rest)

    def global_order(self) -> np.ndarray:
        """Return the order that all ranks share, int64, without the samples done.

        (W * len(self),), padding included; without `pad` only the remaining samples.
        """
        order = shuffled(self.length, self.seed, self.epoch) if self.shuffle else np.arange(self.length)
        rest = order[self.done :]
        return np.resize(rest, len(self) * self.world_size) if self.equal_shards else rest

    def indices(self) -> np.ndarray:
        return self.global_order()[self.rank :: self.world_size]


class ShardBatches:
    """The samples of a rank's logical shards, batch by batch, as a PyTorch DataLoader's `batch_sampler` takes them.

    A batch has the samples of the rank's shards one after another. Each shard has those of a DistributedSampler's rank
    of its number, so that the samples of a step are the same on any number of ranks.

    Args:
        shards: how the ranks share them out.
        length: of the dataset.
        batch_size: the samples of a step on all ranks, which the shards divide.
        shuffle, seed, drop_last: as DistributedSampler's.
    """

    def __init__(
        self, shards: LogicalShards, length: int, batch_size: int, shuffle: bool = True, seed: int = 0,
        drop_last: bool = False,
    ):  # fmt: skip
        self._own, self._count = shards.own, shards.count
        self._sampler = DistributedSampler(length, 0, shards.count, shuffle, seed, drop_last)
        self._size, rest = divmod(_whole(batch_size, "batch_size", 1, "samples of all ranks together"), shards.count)
        if rest:
            raise ArgumentError(f"batch_size: expected a multiple of the {shards} shards, got {batch_size}")
        self._sampler.check_batch_size(self._size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is used from now on; call it on every rank."""
        self._sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return self._sampler.batch_count(self._size)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._sampler.global_order()
        own = [order[shard :: self._count] for shard in self._own]
        for start in range(0, len(self._sampler), self._size):
            yield np.concatenate([indices[start : start + self._size] for indices in own]).tolist()


class BalancedSampler(DistributedSampler):
    """Step s of W ranks covers G[s*W*b : (s+1)*W*b] of the global order, of which each rank gets its share.

    Those are the samples of a DistributedSampler's step, each of the epoch exactly once. A shorter last step is divided
    in the same proportions, so that some ranks may get nothing of it.

    Attributes:
        shares: the samples of each rank in a whole step, which add up to W * b; may be set between steps.

    Raises ArgumentError unless there is a share of at least 1 for each rank.
    """

    def __init__(
        self, length: int, rank: int, world_size: int, shares: Sequence[int], shuffle: bool = True, seed: int = 0
    ) -> None:
        super().__init__(length, rank, world_size, shuffle, seed, pad=False)
        self.equal_shards = False  # even where they are: shares may change
        if len(shares) != world_size or min(shares) < 1 or sum(shares) % world_size:
            expected = f"{world_size} numbers of at least 1 that add up to a multiple of {world_size}"
            raise ArgumentError(f"shares: expected {expected}, got {list(shares)}")
        self.shares = tuple(shares)

    def batches(self, batch_size: int) -> list[np.ndarray]:
        self._check_shares(batch_size)
        order, whole = self.global_order(), sum(self.shares)
        steps = [order[start : start + whole] for start in range(0, len(order), whole)]
        return [step[slice(*self._own_part(len(step)))] for step in steps][: self.batch_count(batch_size)]

    def batch_count(self, batch_size: int) -> int:
        self._check_shares(batch_size)
        steps, last = self._steps()
        start, stop = self._own_part(last)
        return steps - (start == stop)

    def samples_of_all(self, batch: int, count: int) -> int:
        """Return the samples of all ranks in `count` batches from the epoch's batch number `batch` on."""
        whole = sum(self.shares)
        return max(0, min(count * whole, self.length - self.done - batch * whole))

    def indices(self) -> np.ndarray:
        return np.concatenate([np.empty(0, np.int64), *self.batches(sum(self.shares) // self.world_size)])

    def __len__(self) -> int:
        steps, last = self._steps()
        start, stop = self._own_part(last)
        return (steps - 1) * self.shares[self.rank] + stop - start

    def _steps(self) -> tuple[int, int]:
        """Return the number of steps in the epoch, and the samples of the last one."""
        left, whole = self.length - self.done, sum(self.shares)
        steps = -(-left // whole)
        return steps, left - (steps - 1) * whole

    def _own_part(self, samples: int) -> tuple[int, int]:
        """Return where this rank's part of a step of so many samples begins and ends."""
        before, whole = sum(self.shares[: self.rank]), sum(self.shares)
        return before * samples // whole, (before + self.shares[self.rank]) * samples // whole

    def _check_shares(self, batch_size: int) -> None:
        if sum(self.shares) != batch_size * self.world_size:
            raise ArgumentError(f"batch_size: expected {sum(self.shares) // self.world_size}, got {batch_size}")


class ContiguousSampler(_ShardSampler):
    """Rank r gets one contiguous block of the dataset, shuffled within the block, as in LizarDist.

    Where W does not divide N the first N mod W ranks hold one sample more (LizarDist gives the last rank the
    whole remainder). With `pad` the shorter shards repeat their first sample, so all ranks make equally many
    steps; with `pad=False` each sample occurs exactly once and shards differ by one.
    """

    def __init__(
        self,
        length: int,
        rank: int,
        world_size: int,
        shuffle: bool = True,
        seed: int = 0,
        pad: bool = True,
    ) -> None:
        super().__init__(length, rank, world_size, shuffle, seed)
        self.equal_shards = pad or length % world_size == 0
        whole, rest = divmod(length, world_size)
        self.start = rank * whole + min(rank, rest)
        self.stop = self.start + whole + (rank < rest)

    def __len__(self) -> int:
        return -(-self.length // self.world_size) if self.equal_shards else self.stop - self.start

    def indices(self) -> np.ndarray:
        own = self.stop - self.start
        if own == 0 and self.equal_shards:
            return np.array([self.rank % self.length], dtype=np.int64)
        order = shuffled(own, self.seed, self.epoch, self.rank) if self.shuffle else np.arange(own)
        return np.resize(self.start + order, len(self)) if own else order


class EvaluationSampler(ContiguousSampler):
    """Each sample exactly once over all ranks, in the dataset's order; shards differ by at most one."""

    def __init__(self, length: int, rank: int, world_size: int) -> None:
        super().__init__(length, rank, world_size, shuffle=False, pad=False)
        self.equal_shards = False  # a batch larger than a shard is harmless here, for any length


def _whole(value: int, name: str, least: int, meaning: str) -> int:
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_whole or not least <= value < 1 << 64:
        raise ArgumentError(f"{name}: expected a whole number from {least} up, {meaning}, got {value!r}")
    return int(value)
