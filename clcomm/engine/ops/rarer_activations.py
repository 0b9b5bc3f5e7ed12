"""Activations that few models have, made of other functions, with PyTorch's names and gradients."""

from __future__ import annotations

import math

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.fusion import chained
from clcomm.engine.ops.activation import tanh
from clcomm.engine.ops.casts import to_float
from clcomm.engine.ops.comparisons import equal_to, logical_and, masked_fill, where
from clcomm.engine.ops.composed import elu
from clcomm.engine.ops.dropout import check_probability, dropout
from clcomm.engine.ops.elementwise import add, div, mul, sub
from clcomm.engine.ops.formulas import amax
from clcomm.engine.ops.functions import abs, clamp, log
from clcomm.engine.ops.group_norm import group_norm
from clcomm.engine.ops.names import pytorch_names
from clcomm.engine.ops.reduce import broadcast_to
from clcomm.engine.ops.shape import reshape, swap_dimensions
from clcomm.engine.ops.softmax import softmax
from clcomm.engine.random_stream import RandomStream
from clcomm.engine.tensor import Tensor, float_tensor

#: The two numbers of Klambauer et al., "Self-Normalizing Neural Networks", 2017.
_ALPHA, _SCALE = 1.6732632423543772, 1.0507009873554805


@chained
def selu(x: Tensor) -> Tensor:
    """Return the scaled ELU that keeps mean 0 and variance 1; x: float32. Source: Klambauer et al., 2017."""
    return mul(elu(x, _ALPHA), _SCALE)


@chained
def celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """Return x where it is positive, else alpha * (e^(x / alpha) - 1); x: float32. Source: Barron, 2017."""
    return where(x > 0, x, mul(elu(div(clamp(x, max=0.0), float(alpha))), float(alpha)))


@chained
def softsign(x: Tensor) -> Tensor:
    """Return x / (1 + |x|) of each element; x: float32 of any shape."""
    return div(x, add(abs(x), 1.0))


@chained
def tanhshrink(x: Tensor) -> Tensor:
    """Return x - tanh(x) of each element; x: float32 of any shape."""
    return sub(x, tanh(x))


@pytorch_names
def softmin(x: Tensor, axis: int | None = None) -> Tensor:
    """Return the softmax of -x along a dimension, of PyTorch's choice without one; x: float32."""
    return softmax(mul(x, -1.0), axis)


@chained
def hardshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """Return x, or 0 where it is at most `lambd` from 0; x: float32 of any shape."""
    return masked_fill(x, logical_and(x >= -lambd, x <= lambd), 0.0)


@chained
def softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """Return x brought nearer to 0 by `lambd`, or 0 where it is at most as far from it; x: float32 of any shape."""
    return sub(x, clamp(x, -float(lambd), float(lambd)))


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


@pytorch_names
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
