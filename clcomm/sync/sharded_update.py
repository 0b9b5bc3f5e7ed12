"""What the Synchronizer asks of an optimizer that reduces a model's gradients itself."""

from __future__ import annotations

from typing import Protocol

from clcomm.base.flat_space.buckets import Bucket
from clcomm.sync.shared_space import SharedSpace


class ShardedUpdate(Protocol):
    """What reduces a model's gradients in its own step, in place of `sync_gradients`: see DistributedOptimizer."""

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What it reduces at a time."""

    def shard(self, space: SharedSpace) -> None:
        """Divide a model's memory between the ranks, after all have the same parameters; collective, once a model."""

    def expect_step(self, weight: float) -> None:
        """Note that the gradients are complete, and count `weight` times in the mean."""

    def clip_grad_norm(self, max_norm: float) -> float:
        """Average the gradients, clip them and return their norm before; collective."""

    def require_same_settings(self) -> None:
        """Raise MismatchError on every rank where the ranks' settings differ; collective."""
