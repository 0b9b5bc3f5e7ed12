"""Activations that few models have, made of other functions, with PyTorch's names and gradients."""

from __future__ import annotations

import math

from clcomm.engine.ops.activation import tanh
from clcomm.engine.ops.comparisons import logical_and, masked_fill, where
from clcomm.engine.ops.composed import elu
from clcomm.engine.ops.dropout import check_probability, dropout
from clcomm.engine.ops.elementwise import add, div, mul, sub
from clcomm.engine.ops.functions import abs, clamp
from clcomm.engine.ops.names import pytorch_names
from clcomm.engine.ops.softmax import softmax
from clcomm.engine.tensor import Tensor, float_tensor

#: The two numbers of Klambauer et al., "Self-Normalizing Neural Networks", 2017.
_ALPHA, _SCALE = 1.6732632423543772, 1.0507009873554805


def selu(x: Tensor) -> Tensor:
    """Return the scaled ELU that keeps mean 0 and variance 1; x: float32. Source: Klambauer et al., 2017."""
    return mul(elu(x, _ALPHA), _SCALE)


def celu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """Return x where it is positive, else alpha * (e^(x / alpha) - 1); x: float32. Source: Barron, 2017."""
    return where(x > 0, x, mul(elu(div(clamp(x, max=0.0), float(alpha))), float(alpha)))


def softsign(x: Tensor) -> Tensor:
    """Return x / (1 + |x|) of each element; x: float32 of any shape."""
    return div(x, add(abs(x), 1.0))


def tanhshrink(x: Tensor) -> Tensor:
    """Return x - tanh(x) of each element; x: float32 of any shape."""
    return sub(x, tanh(x))


@pytorch_names
def softmin(x: Tensor, axis: int = -1) -> Tensor:
    """Return the softmax of -x along a dimension; x: float32."""
    return softmax(mul(x, -1.0), axis)


def hardshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """Return x, or 0 where it is at most `lambd` from 0; x: float32 of any shape."""
    return masked_fill(x, logical_and(x >= -lambd, x <= lambd), 0.0)


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
