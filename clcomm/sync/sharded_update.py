"""What the Synchronizer asks of an optimizer that reduces a model's gradients itself."""

from __future__ import annotations

from typing import Protocol


class ShardedUpdate(Protocol):
    """What reduces a model's gradients in its own step, in place of `sync_gradients`: see DistributedOptimizer."""

    def expect_step(self, weight: float) -> None:
        """Note that the gradients are complete, and count `weight` times in the mean."""

    def clip_grad_norm(self, max_norm: float) -> float:
        """Average the gradients, clip them and return their norm before; collective."""

    def require_same_settings(self) -> None:
        """Raise MismatchError on every rank where the ranks' settings differ; collective."""
