"""netcl's `autograd`: its tape, and losses. The engine records operations by itself, so a tape has nothing to keep."""

from __future__ import annotations

from clcomm.engine.functional import cross_entropy, mse_loss, relu
from clcomm.engine.tensor import Tensor

__all__ = ["Tape", "cross_entropy", "mse_loss", "relu", "tensor"]


def tensor(data: object, requires_grad: bool = False) -> Tensor:
    """Return a tensor whose gradient `Tape.backward` computes if asked, of an array or of a tensor as it is."""
    found = data if isinstance(data, Tensor) else Tensor(data)
    if requires_grad:
        found.requires_grad = True
    return found


class Tape:
    """A block whose operations `backward` differentiates."""

    def __enter__(self) -> Tape:
        return self

    def __exit__(self, *exception: object) -> None:
        """End the block; nothing was to be recorded here."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to the parameters'."""
        loss.backward()
