"""Losses of margins, of likelihoods and of pairs, made of other functions, with PyTorch's names and gradients.

reduction: "mean", "sum" or "none" in all. Raises ArgumentError for another.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

import math

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.fusion import chained
from clcomm.engine.ops.activation import tanh
from clcomm.engine.ops.comparisons import equal_to, logical_and, one_hot, where
from clcomm.engine.ops.composed import logsigmoid, reduced_loss, softplus
from clcomm.engine.ops.dropout import check_probability, dropout
from clcomm.engine.ops.elements import of_elements
from clcomm.engine.ops.elementwise import add, div, mul, sub
from clcomm.engine.ops.formulas import amax
from clcomm.engine.ops.functions import abs, clamp, exp, log, minimum, sqrt, square
from clcomm.engine.ops.indexing import gather
from clcomm.engine.ops.loss import check_pair
from clcomm.engine.ops.matrices import pairwise_distance
from clcomm.engine.ops.norms import group_norm
from clcomm.engine.ops.reduce import broadcast_to, mean, sum
from clcomm.engine.ops.shape import reshape, swap_dimensions, unsqueeze
from clcomm.engine.ops.softmax import softmax
from clcomm.engine.ops.types import to_float
from clcomm.engine.random_stream import RandomStream
from clcomm.engine.tensor import Tensor, float_tensor


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
    above = add(sub(margin, gather(rows, 1, index)), rows)
    # NaN counts as 0, also in the gradient
    others = where(logical_and(above > 0, one_hot(reshape(target, (-1,)), rows.shape[1]) != 1), above, 0.0)
    losses = div(sum(others if p == 1 else square(others), 1), float(rows.shape[1]))
    return reduced_loss(losses if x.ndim > 1 else reshape(losses, ()), reduction)


def multilabel_soft_margin_loss(
    x: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean"
) -> Tensor:
    """Return the mean over classes of -(y log(sigmoid(x)) + (1 - y) log(sigmoid(-x))); x, target: float32 [N, C]."""
    check_pair("multilabel_soft_margin_loss", x, target, reduction)
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


# --- Activations that few models have, made of other functions, with PyTorch's names and gradients. ---

#: The two numbers of Klambauer et al., "Self-Normalizing Neural Networks", 2017.
_ALPHA, _SCALE = 1.6732632423543772, 1.0507009873554805


@of_elements(
    "elu(x, 1.6732632423543772) * 1.0507009873554805",
    "g * 1.0507009873554805 * (1.6732632423543772 * exp(x) if x <= 0 else 1)",
)
def selu(x: Tensor) -> Tensor:
    """Return the scaled ELU that keeps mean 0 and variance 1; x: float32. Source: Klambauer et al., 2017."""


@of_elements("elu(x / alpha, 1) * alpha if x <= 0 else x", "g * alpha * exp(x / alpha) / alpha if x <= 0 else g")
def celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """Return x where it is positive, else alpha * (e^(x / alpha) - 1); x: float32. Source: Barron, 2017."""


@chained
def softsign(x: Tensor) -> Tensor:
    """Return x / (1 + |x|) of each element; x: float32 of any shape."""
    return div(x, add(abs(x), 1.0))


@chained
def tanhshrink(x: Tensor) -> Tensor:
    """Return x - tanh(x) of each element; x: float32 of any shape."""
    return sub(x, tanh(x))


def softmin(x: Tensor, axis: int | None = None) -> Tensor:
    """Return the softmax of -x along a dimension, of PyTorch's choice without one; x: float32."""
    return softmax(mul(x, -1.0), axis)


@of_elements("0 if (x >= -lambd) & (x <= lambd) else x", "0 if (x >= -lambd) & (x <= lambd) else g")
def hardshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """Return x, or 0 where it is at most `lambd` from 0; x: float32 of any shape."""


@of_elements("x - clamp(x, -lambd, lambd)", "0 if (x >= -lambd) & (x <= lambd) else g")
def softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """Return x brought nearer to 0 by `lambd`, or 0 where it is at most as far from it; x: float32 of any shape."""


def alpha_dropout(x: Tensor, p: float = 0.5, training: bool = False) -> Tensor:
    """Return x with elements dropped to SELU's limit, scaled and shifted to mean 0 and variance 1, if `training`.

    x: float32 of any shape; p: the probability. The mask is `dropout`'s, not PyTorch's. Source: Klambauer et al., 2017.
    """
    check_probability("alpha_dropout", p)
    if not training or p == 0:
        return float_tensor("alpha_dropout", x)
    if p == 1:
        return mul(x, 0.0)
    limit, kept = -_ALPHA * _SCALE, 1.0 - p
    scale = 1.0 / math.sqrt(kept * (1.0 + p * limit**2))
    # What is dropped becomes 0 + limit: x - limit, dropped, less what keeping has scaled it up by.
    apart = mul(dropout(sub(x, limit), p), kept)
    return add(mul(add(apart, limit), scale), -scale * limit * p)


def dropout2d(x: Tensor, p: float = 0.5, training: bool = True, *, stream: RandomStream | None = None) -> Tensor:
    """Return x [N, C, ...] with channels set to 0 with probability p, else divided by 1 - p; x if not `training`."""
    check_probability("dropout2d", p)
    if not training or p == 0:
        return float_tensor("dropout2d", x)
    whole = Tensor(np.ones((*x.shape[:2], *[1] * (x.ndim - 2)), np.float32), x.device)
    return mul(x, dropout(whole, p, stream=stream))


dropout1d = dropout3d = dropout2d


def gumbel_softmax(logits: Tensor, tau: float = 1.0, hard: bool = False, eps: float = 1e-10, axis: int = -1) -> Tensor:
    """Return the softmax of (logits + Gumbel's noise) / tau along a dimension; with `hard` 1 at the largest, 0 else.

    The gradient is that of the softmax in both. The noise is drawn on the host, by the generator that `manual_seed`
    seeds, and is not PyTorch's: a step with it is not replayed. eps: not used. Source: Jang, Gu and Poole,
    "Categorical reparameterization with Gumbel-softmax", 2017.
    """
    unit = Tensor(np.zeros(logits.shape, np.float32), logits.device).uniform_(2.0**-25, 1.0)
    noise = log(mul(log(unit), -1.0))
    soft = softmax(div(sub(logits, noise), float(tau)), axis)
    if not hard:
        return soft
    largest = to_float(equal_to(soft.detach(), broadcast_to(amax(soft.detach(), axis, True), soft.shape)))
    return add(sub(largest, soft.detach()), soft)


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    """Return x [N, C, ...] with the channels of the groups in turn: the first of each, then the second of each."""
    n, channels, *rest = x.shape
    if channels % groups:
        raise ArgumentError(f"channel_shuffle: expected channels that {groups} divides, got shape {x.shape}")
    return reshape(swap_dimensions(reshape(x, (n, groups, channels // groups, *rest)), 1, 2), x.shape)


def instance_norm(
    x: Tensor, running_mean: None = None, running_var: None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Return x [N, C, ...] normalised in each channel of each sample, times the weight plus the bias.

    Raises ArgumentError for running statistics, which are not kept here.
    """
    if running_mean is not None or running_var is not None or not use_input_stats:
        raise ArgumentError("instance_norm: expected statistics of the input, got running ones")
    return group_norm(x, x.shape[1], weight, bias, eps)
