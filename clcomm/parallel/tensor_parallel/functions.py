"""Differentiable exchanges between tensor-parallel ranks, with their forward and backward communication.

Tensors that are the same on all ranks have gradients that are the same on all ranks; a tensor that ranks use in
different ways, or of which each has a part, has a gradient of its own on each. Source: Shoeybi et al., "Megatron-LM",
2019 (copy, reduce), and Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022
(gather, reduce-scatter), whose names these are.
"""

from __future__ import annotations

from functools import partial

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.tensor import Tensor, empty, float_tensor
from clcomm.parallel.exchange import ACTIVATIONS, INPUT_GRADIENTS, Exchange


class CopyToRanks(Op):
    """x, the same on all ranks; backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, ranks: Exchange) -> Tensor:
        ctx.ranks = ranks
        return x.alias(x.shape)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.ranks.size == 1:
            return (grad,)
        return (ctx.ranks.summed(grad, INPUT_GRADIENTS, partial(ctx.out, 0)),)


class ReduceFromRanks(Op):
    """The sum of the ranks' x; its gradient is each rank's."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, ranks: Exchange) -> Tensor:
        return x.alias(x.shape) if ranks.size == 1 else ranks.summed(x, ACTIVATIONS)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad,)


class ScatterToRanks(Op):
    """Each rank's part of x, which is the same on all ranks; backward gathers the parts' gradients."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, ranks: Exchange, axis: int) -> Tensor:
        ctx.ranks, ctx.axis = ranks, axis
        part = empty(x.device, (*x.shape[:axis], x.shape[axis] // ranks.size, *x.shape[axis + 1 :]))
        return ranks.own_part(x, axis, part)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (ctx.ranks.gather(grad, ctx.axis, INPUT_GRADIENTS, partial(ctx.out, 0)),)


class GatherFromRanks(Op):
    """All ranks' parts; backward takes this rank's part, of the ranks' sum with `sums`."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, ranks: Exchange, axis: int, sums: bool) -> Tensor:
        ctx.ranks, ctx.axis, ctx.sums = ranks, axis, sums
        return ranks.gather(x, axis, ACTIVATIONS)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sums:
            return (ctx.ranks.summed_part(grad, ctx.axis, INPUT_GRADIENTS, partial(ctx.out, 0)),)
        return (ctx.ranks.own_part(grad, ctx.axis, ctx.out(0)),)


class ReduceScatterToRanks(Op):
    """Each rank's part of the sum of the ranks' x; backward gathers the parts' gradients."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, ranks: Exchange, axis: int) -> Tensor:
        ctx.ranks, ctx.axis = ranks, axis
        return ranks.summed_part(x, axis, ACTIVATIONS)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (ctx.ranks.gather(grad, ctx.axis, INPUT_GRADIENTS, partial(ctx.out, 0)),)


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
    at = _dimension("gather_from_ranks", x, axis)
    return GatherFromRanks.apply(x, ranks=ranks, axis=at, sums=bool(sums))


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
