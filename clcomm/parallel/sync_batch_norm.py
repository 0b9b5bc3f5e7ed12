"""SyncBatchNorm: batch norm over the batches of all data-parallel ranks."""

from __future__ import annotations

from copy import copy
from typing import Any, TypeVar

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.engine import Device, Tensor
from clcomm.engine.nn.module import Module
from clcomm.engine.nn.norms import BatchNorm
from clcomm.parallel.exchange import Exchange
from clcomm.parallel.mesh import require_communicator
from clcomm.sync.sharded_steps import ShardTurns

M = TypeVar("M", bound=Module)


class SyncBatchNorm(BatchNorm):
    """x [N, C, ...] -> the same, normalised in each channel over the batches of all ranks, as PyTorch's SyncBatchNorm.

    Ranks that share a batch then train as one rank with all of it. In training, forward and backward are collective;
    batches may differ in size: `expect_samples` of the Synchronizer or DistributedDataParallel, before backward, then
    weighs the ranks' losses. In `eval()` it is a BatchNorm. Statistics are exchanged in shared memory on one host, and
    summed in rank order.

    Args:
        comm: the ranks, such as `mesh["dp"]`. The other arguments are a BatchNorm's.

    Raises ArgumentError for sizes below 1, and for an x of other dimensions or channels.
    """

    _dims = (2, 3, 4, 5)
    _comm: Communicator

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        comm: Communicator,
        device: Device | str | None = None,
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device)
        require_communicator(comm, "mesh['dp']")
        self._comm = comm

    def forward(self, x: Tensor) -> Tensor:
        self._exchange(x.device)
        return super().forward(x)

    @property
    def mixes_ranks(self) -> bool:
        """Whether its backward, in its present mode, adds up gradients of several ranks."""
        return self._comm.size > 1 and (self.training or self.running_mean is None)

    def weigh(self, weight: float, device: Device) -> None:
        """Weight this rank's loss in the coming gradients by `weight`: see `Synchronizer.expect_samples`."""
        self._exchange(device)
        assert isinstance(self._ranks, Exchange), "shards count alike"
        self._ranks.weigh(weight)

    def _exchange(self, device: Device) -> None:
        if self._ranks is None:
            self._ranks = Exchange(self._comm, device)

    def over_shards(self, comm: Communicator, turns: ShardTurns | None, count: int) -> None:
        """Take the statistics of all logical shards, `count` of them, which `turns` gathers; None: a rank has one.

        Raises ArgumentError where this layer is of other ranks than the shards.
        """
        if (self._comm.rank, self._comm.size) != (comm.rank, comm.size):
            raise ArgumentError(
                f"shards: expected a SyncBatchNorm of the Synchronizer's {comm.size} ranks, got {self._comm.size}"
            )
        if turns is not None:
            self._ranks = ShardExchange(turns, count)
        elif isinstance(self._ranks, ShardExchange):  # of another Synchronizer
            self._ranks = None

    @classmethod
    def convert_sync_batchnorm(cls, module: M, comm: Communicator) -> M:
        """Return the module with a SyncBatchNorm in place of each BatchNorm in it, with its parameters and buffers.

        Args:
            module: is changed; one that is a BatchNorm itself is replaced.
            comm: the ranks, such as `mesh["dp"]`.
        """
        require_communicator(comm, "mesh['dp']")
        ranks = Exchange(comm, next(module.parameters()).device)
        made: dict[int, Module] = {}  # by the id of the layer, which several modules may share
        for _, each in tuple(module.named_modules()):
            for name, inner in tuple(each._modules.items()):
                if isinstance(inner, BatchNorm) and not isinstance(inner, cls):
                    setattr(each, name, made.setdefault(id(inner), cls._converted(inner, ranks)))
        if isinstance(module, BatchNorm) and not isinstance(module, cls):
            replaced: M = cls._converted(module, ranks)
            return replaced
        return module

    @classmethod
    def _converted(cls, layer: BatchNorm, ranks: Exchange) -> Any:
        converted: Any = cls.__new__(cls)
        converted.__dict__.update(copy(layer).__dict__)
        converted._comm, converted._ranks = ranks.comm, ranks
        return converted


class ShardExchange:
    """The exchange of SyncBatchNorm between logical shards: parts, and sums, in the shards' order."""

    def __init__(self, turns: ShardTurns, count: int):
        self.size, self._turns = count, turns

    def __deepcopy__(self, memo: dict[int, object]) -> ShardExchange:
        return self

    def gather(self, part: Tensor, axis: int, label: str) -> Tensor:
        """Return all shards' parts one after the other; collective."""
        return Tensor(self._rows(part, label).reshape(-1), part.device)

    def weighted(self, x: Tensor, label: str) -> Tensor:
        """Return the sum of all shards' x, which count alike; collective."""
        rows = self._rows(x, label)
        total = rows[0].copy()
        for row in rows[1:]:
            total += row
        return Tensor(total, x.device)

    def _rows(self, x: Tensor, label: str) -> np.ndarray:
        x.device.not_replayable("exchanges statistics of logical shards")
        return self._turns.gather(x.numpy(), label)
