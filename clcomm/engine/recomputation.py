"""Activations that are computed again in backward instead of being kept, as by torch.utils.checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op, backward_again
from clcomm.engine.launch_queue import orders
from clcomm.engine.modes import is_recording, modes, surrounded
from clcomm.engine.random_stream import RandomStream
from clcomm.engine.tape import nodes_since
from clcomm.engine.tensor import Tensor

__all__ = ["checkpoint"]


class Recomputed(Op):
    """The result of a function, which backward runs again; the inputs are all that needs a gradient before it."""

    @staticmethod
    def forward(
        ctx: Context, *inputs: Tensor, result: Tensor, again: Callable[[Tensor], None], given: list[Tensor]
    ) -> Tensor:
        ctx.again, ctx.given = again, given
        ctx.save(*inputs)
        return result.detach()

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.again(grad)
        return (None,) * len(ctx.needs)


def checkpoint(
    function: Callable[..., Tensor],
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    **named: Any,
) -> Tensor:
    """Return function(*args, **named) without keeping for backward what it computes, which backward computes again.

    Results and gradients have the same bits as without it, those of dropout and of batch norm included, which counts a
    batch once. Source: Chen et al., "Training deep nets with sublinear memory cost", 2016.

    Args:
        function: returns one tensor, and the same in a second call; it writes to no tensor in place that it was given.
        use_reentrant: PyTorch's; there is one way.
        preserve_rng_state: False: random numbers of the second call are others.

    Raises ArgumentError for another result, and for a tensor that the function wrote to.
    """
    if not is_recording():
        return function(*args, **named)
    tensors = [each for each in (*args, *named.values()) if isinstance(each, Tensor)]
    if not tensors:
        raise ArgumentError("checkpoint: expected a Tensor among the arguments, got none")
    states, begun = RandomStream.copies(tensors[0].device) if preserve_rng_state else None, next(orders)
    result = function(*args, **named)
    if not isinstance(result, Tensor):
        raise ArgumentError(f"checkpoint: expected a function that returns a Tensor, got {type(result).__name__}")
    if result._node is None or result._node.order < begun:
        return result
    before: dict[int, Tensor] = {}
    for node in nodes_since(begun, result):
        for x, producer, needed in zip(node.inputs, node.producers, node.needs, strict=True):
            if needed and (producer is None or producer.order < begun):
                before[id(x)] = x
    if any(each.written_at > begun for each in (*tensors, *before.values())):
        raise ArgumentError("checkpoint: expected a function that leaves its arguments as they are, got one that wrote")

    surroundings = modes.surroundings

    def called_again() -> Tensor:
        with surrounded(surroundings):
            return function(*args, **named)

    def again(grad: Tensor) -> None:
        with nullcontext() if states is None else RandomStream.as_at(states):
            backward_again(called_again, grad)

    return Recomputed.apply(*before.values(), result=result, again=again, given=tensors)
