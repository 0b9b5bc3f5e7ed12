"""Differentiable exchanges between tensor-parallel ranks, with their forward and backward communication.

Tensors that are the same on all ranks have gradients that are the same on all ranks; a tensor that ranks use in
different ways, or of which each has a part, has a gradient of its own on each. Source: Shoeybi et al., "Megatron-LM",
2019 (copy, reduce), and Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022
(gather, reduce-scatter), whose names these are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.tensor import Tensor, empty, float_tensor
from clcomm.parallel.exchange import ACTIVATIONS, INPUT_GRADIENTS, Exchange

#: Returns the tensor to write a result to; None: a new one.
Out = Callable[[], Tensor] | None


def _keep(ranks: Exchange, x: Tensor, axis: int, label: str, out: Out = None) -> Tensor:
    return x


def _sum(ranks: Exchange, x: Tensor, axis: int, label: str, out: Out = None) -> Tensor:
    return x if ranks.size == 1 else ranks.summed(x, label, out)


def _take_part(ranks: Exchange, x: Tensor, axis: int, label: str, out: Out = None) -> Tensor:
    shape = (*x.shape[:axis], x.shape[axis] // ranks.size, *x.shape[axis + 1 :])
    return ranks.own_part(x, axis, empty(x.device, shape) if out is None else out())


def _gather(ranks: Exchange, x: Tensor, axis: int, label: str, out: Out = None) -> Tensor:
    return ranks.gather(x, axis, label, out)


def _sum_part(ranks: Exchange, x: Tensor, axis: int, label: str, out: Out = None) -> Tensor:
    return ranks.summed_part(x, axis, label, out)


class Moved(Op):
    """A tensor moved between the ranks: `there` in forward, and its gradient `back` in backward."""

    there: ClassVar[Callable[..., Tensor]]
    back: ClassVar[Callable[..., Tensor]]

    @classmethod
    def forward(cls, ctx: Context, x: Tensor, *, ranks: Exchange, axis: int = 0) -> Tensor:
        ctx.ranks, ctx.axis = ranks, axis
        y = cls.there(ranks, x, axis, ACTIVATIONS)
        return y.alias(y.shape) if y is x else y

    @classmethod
    def backward(cls, ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (cls.back(ctx.ranks, grad, ctx.axis, INPUT_GRADIENTS, partial(ctx.out, 0)),)


class CopyToRanks(Moved):
    there, back = staticmethod(_keep), staticmethod(_sum)


class ReduceFromRanks(Moved):
    there, back = staticmethod(_sum), staticmethod(_keep)


class ScatterToRanks(Moved):
    there, back = staticmethod(_take_part), staticmethod(_gather)


class GatherFromRanks(Moved):
    there, back = staticmethod(_gather), staticmethod(_take_part)


class GatherAndSumBack(Moved):
    there, back = staticmethod(_gather), staticmethod(_sum_part)


class ReduceScatterToRanks(Moved):
    there, back = staticmethod(_sum_part), staticmethod(_gather)


def copy_to_ranks(x: Tensor, ranks: Exchange) -> Tensor:
    """Return x, which is the same on all ranks and which each uses in its own way; backward sums their gradients."""
    return CopyToRanks.apply(float_tensor("copy_to_ranks", x), ranks=ranks)


def reduce_from_ranks(x: Tensor, ranks: Exchange) -> Tensor:
    """Return the sum of all ranks' x, in rank order, which all use alike; backward passes the gradient on."""
    return ReduceFromRanks.apply(float_tensor("reduce_from_ranks", x), ranks=ranks)


def scatter_to_ranks(x: Tensor, ranks: Exchange, axis: int = -1) -> Tensor:
    """Return this rank's part of x, which is the same on all ranks, along `axis`; backward gathers the gradients.

    Raises ArgumentError for a dimension that x does not have, or that the ranks do not divide.
    """
    return ScatterToRanks.apply(x, ranks=ranks, axis=_divided("scatter_to_ranks", x, ranks, axis))


def gather_from_ranks(x: Tensor, ranks: Exchange, axis: int = -1, *, sums: bool = False) -> Tensor:
    """Return all ranks' x one after the other along `axis`; backward gives each rank the gradient of its part.

    Args:
        sums: whether the ranks use the result in different ways, so that backward sums their gradients.

    Raises ArgumentError for a dimension that x does not have.
    """
    op = GatherAndSumBack if sums else GatherFromRanks
    return op.apply(x, ranks=ranks, axis=_dimension("gather_from_ranks", x, axis))


def reduce_scatter_to_ranks(x: Tensor, ranks: Exchange, axis: int = -1) -> Tensor:
    """Return this rank's part, along `axis`, of the sum of all ranks' x in rank order; backward gathers the gradients.

    Raises ArgumentError for a dimension that x does not have, or that the ranks do not divide.
    """
    return ReduceScatterToRanks.apply(x, ranks=ranks, axis=_divided("reduce_scatter_to_ranks", x, ranks, axis))


def _dimension(name: str, x: Tensor, axis: int) -> int:
    if not -float_tensor(name, x).ndim <= axis < x.ndim:
        raise ArgumentError(f"{name}: axis {axis} does not fit a tensor of shape {x.shape}")
    return axis % x.ndim


def _divided(name: str, x: Tensor, ranks: Exchange, axis: int) -> int:
    at = _dimension(name, x, axis)
    if x.shape[at] % ranks.size:
        raise ArgumentError(
            f"{name}: expected a dimension {at} that {ranks.size} ranks divide, got {x.shape[at]} in shape {x.shape}"
        )
    return at
