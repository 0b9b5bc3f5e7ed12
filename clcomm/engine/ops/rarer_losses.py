"""Losses of margins, of likelihoods and of pairs, made of other functions, with PyTorch's names and gradients.

reduction: "mean", "sum" or "none" in all. Raises ArgumentError for another.
"""

from __future__ import annotations

import math

from clcomm.base.errors import ArgumentError
from clcomm.engine.fusion import chained
from clcomm.engine.ops.activation import relu
from clcomm.engine.ops.comparisons import one_hot, where
from clcomm.engine.ops.composed import logsigmoid, reduced_loss, softplus
from clcomm.engine.ops.elementwise import add, div, mul, sub
from clcomm.engine.ops.functions import clamp, exp, log, minimum, sqrt, square
from clcomm.engine.ops.indexing import gather
from clcomm.engine.ops.matrices import pairwise_distance
from clcomm.engine.ops.reduce import mean, sum
from clcomm.engine.ops.shape import reshape, unsqueeze
from clcomm.engine.tensor import Tensor


@chained
def margin_ranking_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, *, reduction: str = "mean"
) -> Tensor:
    """Return max(0, margin - y (a - b)) of inputs a and b, y 1 where a is to be larger, else -1; float32."""
    return reduced_loss(clamp(sub(margin, mul(target, sub(input1, input2))), min=0.0), reduction)


@chained
def hinge_embedding_loss(x: Tensor, target: Tensor, margin: float = 1.0, *, reduction: str = "mean") -> Tensor:
    """Return x where the target is 1, max(0, margin - x) where it is -1; float32 of one shape."""
    return reduced_loss(_of_signs(target, x, clamp(sub(margin, x), min=0.0)), reduction)


def _of_signs(target: Tensor, alike: Tensor, apart: Tensor) -> Tensor:
    """Return what counts unless the target is -1, and what counts unless it is 1."""
    return add(where(target != -1, alike, 0.0), where(target != 1, apart, 0.0))


@chained
def soft_margin_loss(x: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return log(1 + e^(-y x)) with y 1 or -1; float32 of one shape."""
    return reduced_loss(softplus(mul(mul(target, x), -1.0)), reduction)


def cosine_embedding_loss(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, *, reduction: str = "mean"
) -> Tensor:
    """Return 1 - cos(input1, input2) of rows where the target is 1, max(0, cos - margin) where it is -1.

    input1, input2: float32 [N, D], or [D]; target: [N], or a single one.
    """
    sizes = [add(sum(square(x), -1), 1e-12) for x in (input1, input2)]
    cosine = div(sum(mul(input1, input2), -1), sqrt(mul(*sizes)))
    alike, apart = (
        where(target == 1, sub(1.0, cosine), 0.0),
        where(target == -1, clamp(sub(cosine, margin), min=0.0), 0.0),
    )
    return reduced_loss(add(alike, apart), reduction)


def triplet_margin_loss(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, p: float = 2.0, eps: float = 1e-6,
    swap: bool = False, *, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Return max(0, d(anchor, positive) - d(anchor, negative) + margin) of rows [N, D], d a norm of order p.

    swap: the negative may be nearer to the positive than to the anchor, and then that distance counts.
    """
    near, far = (pairwise_distance(anchor, each, p, eps) for each in (positive, negative))
    if swap:
        far = minimum(far, pairwise_distance(positive, negative, p, eps))
    return reduced_loss(clamp(add(sub(near, far), margin), min=0.0), reduction)


def multi_margin_loss(x: Tensor, target: Tensor, p: int = 1, margin: float = 1.0, *, reduction: str = "mean") -> Tensor:
    """Return the mean over other classes of max(0, margin - x[target] + x)^p; x: float32 [N, C], target: int32 [N]."""
    if p not in (1, 2):
        raise ArgumentError(f"multi_margin_loss: p: expected 1 or 2, got {p!r}")
    rows = x if x.ndim > 1 else unsqueeze(x, 0)
    index = reshape(target, (-1, 1))
    above = relu(add(sub(margin, gather(rows, 1, index)), rows))  # whose gradient at 0 is 0
    others = where(one_hot(reshape(target, (-1,)), rows.shape[1]) == 1, 0.0, above if p == 1 else square(above))
    losses = div(sum(others, 1), float(rows.shape[1]))
    return reduced_loss(losses if x.ndim > 1 else reshape(losses, ()), reduction)


def multilabel_soft_margin_loss(
    x: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean"
) -> Tensor:
    """Return the mean over classes of -(y log(sigmoid(x)) + (1 - y) log(sigmoid(-x))); x, target: float32 [N, C]."""
    losses = add(mul(target, logsigmoid(x)), mul(sub(1.0, target), logsigmoid(mul(x, -1.0))))
    return reduced_loss(mul(mean(losses if weight is None else mul(losses, weight), -1), -1.0), reduction)


@chained
def poisson_nll_loss(
    x: Tensor, target: Tensor, log_input: bool = True, full: bool = False, *, eps: float = 1e-8,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Return e^x - y x, or x - y log(x + eps) without `log_input`: minus Poisson's log-likelihood of counts y.

    full: with Stirling's y log(y) - y + log(2 pi y) / 2 for counts above 1.
    """
    losses = sub(exp(x), mul(target, x)) if log_input else sub(x, mul(target, log(add(x, eps))))
    if full:
        count = where(target > 1, target, 2.0)
        stirling = add(sub(mul(count, log(count)), count), mul(log(mul(count, 2.0 * math.pi)), 0.5))
        losses = add(losses, where(target > 1, stirling, 0.0))
    return reduced_loss(losses, reduction)


@chained
def gaussian_nll_loss(
    x: Tensor, target: Tensor, var: Tensor, full: bool = False, eps: float = 1e-6, *, reduction: str = "mean"
) -> Tensor:
    """Return (log(v) + (x - y)^2 / v) / 2 with the variance v, or eps where it is less; float32 that broadcast.

    full: with log(2 pi) / 2. A variance below eps has the gradient of eps, as PyTorch's.
    """
    known = add(var, clamp(sub(float(eps), var.detach()), min=0.0))
    losses = mul(add(log(known), div(square(sub(x, target)), known)), 0.5)
    return reduced_loss(add(losses, 0.5 * math.log(2.0 * math.pi)) if full else losses, reduction)
