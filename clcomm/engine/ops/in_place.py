"""Operations in place: a tensor gets the result of an operation on it, as all who have it see."""

from __future__ import annotations

from collections.abc import Callable

from clcomm.engine.autograd import is_recording
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor, copy_into, empty, float_tensor
from clcomm.errors import ArgumentError


def overwrite(x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
    """Give x the values of operation(x), and its place on the tape; return x.

    x: float32; tensors that share its memory, as those of `reshape` and `detach` do, get the values too, and not the
    place. Operations that kept x for their backward raise an error there.

    Raises ArgumentError for a result of another shape, and for a leaf that needs a gradient outside of `no_grad`.
    """
    float_tensor("in place", x)
    is_leaf = x._node is None
    if x.requires_grad and is_leaf and is_recording():
        raise ArgumentError(
            "in place: expected a tensor that is no leaf, or no_grad() around it, got a leaf that needs a gradient"
        )
    before = x.detach()
    before._node, before._requires_grad = x._node, x._requires_grad
    result = operation(before)
    if result is before:
        return x
    if result.shape != x.shape:
        raise ArgumentError(f"in place: expected a result of shape {x.shape}, got {result.shape}")
    _keep(before, result)
    if type(x) in (Tensor, Parameter):
        copy_into(x, result)
        x.note_write()
    else:  # its memory is made where it is used
        x.copy_from(result.numpy())
    if result._node is not None:
        x._node, x._requires_grad = result._node, True
    return x


def _keep(before: Tensor, result: Tensor) -> None:
    """Give the operation a copy of the values that it kept of its input, which are about to be overwritten."""
    node = result._node
    if node is None or all(kept is not before for kept in node.saved):
        return
    copied = empty(before.device, before.shape)
    copy_into(copied, before)
    node.saved = tuple([copied if kept is before else kept for kept in node.saved])
