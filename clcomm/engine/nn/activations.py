"""Activations as layers."""

from __future__ import annotations

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.nn.module import Module
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor


class Identity(Module):
    """x itself; arguments are taken and left out, as PyTorch's, so that it can stand for any layer."""

    def __init__(self, *args: object, **named: object):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return x


class Activation(Module):
    """An activation, which gives x its result where it is to work in place."""

    def __init__(self, inplace: bool = False):
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        return F.overwrite(x, self.of) if self.inplace else self.of(x)

    def of(self, x: Tensor) -> Tensor:
        """Return the result."""
        raise TypeError(f"{type(self).__name__} defines no of()")


class ReLU(Activation):
    """max(x, 0); inplace: x itself gets it."""

    def of(self, x: Tensor) -> Tensor:
        return F.relu(x)


class Sigmoid(Module):
    """1 / (1 + exp(-x))"""

    def forward(self, x: Tensor) -> Tensor:
        return F.sigmoid(x)


class Tanh(Module):
    """Hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        return F.tanh(x)


class GELU(Module):
    """x times the normal distribution's cumulative function at x; with `approximate` "tanh" as GPT-2 computes it."""

    def __init__(self, approximate: str = "none"):
        if approximate not in ("none", "tanh"):
            raise ArgumentError(f"GELU: expected approximate 'none' or 'tanh', got {approximate!r}")
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, self.approximate)


class SiLU(Activation):
    """x / (1 + exp(-x)); inplace: x itself gets it."""

    def of(self, x: Tensor) -> Tensor:
        return F.silu(x)


class LeakyReLU(Activation):
    """x where it is positive, else negative_slope * x; inplace: x itself gets it."""

    def __init__(self, negative_slope: float = 0.01, inplace: bool = False):
        super().__init__(inplace)
        self.negative_slope = negative_slope

    def of(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.negative_slope)


class Softmax(Module):
    """exp(x) / sum(exp(x)) along `dim`; None: PyTorch's choice, of 0, 1 and 3 dimensions the first, else 1."""

    def __init__(self, dim: int | None = None):
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(x, self.dim)


class LogSoftmax(Module):
    """x - log(sum(exp(x))) along `dim`; None: PyTorch's choice, of 0, 1 and 3 dimensions the first, else 1."""

    def __init__(self, dim: int | None = None):
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(x, self.dim)


class ELU(Activation):
    """x where it is positive, else alpha * (e^x - 1); inplace: x itself gets it."""

    def __init__(self, alpha: float = 1.0, inplace: bool = False):
        super().__init__(inplace)
        self.alpha = alpha

    def of(self, x: Tensor) -> Tensor:
        return F.elu(x, self.alpha)


class Softplus(Module):
    """log(1 + e^(beta x)) / beta"""

    def __init__(self, beta: float = 1.0, threshold: float = 20.0):
        self.beta, self.threshold = beta, threshold

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x, self.beta, self.threshold)


class Mish(Activation):
    """x * tanh(softplus(x)); inplace: x itself gets it."""

    def of(self, x: Tensor) -> Tensor:
        return F.mish(x)


class Hardtanh(Activation):
    """x between min_val and max_val, else the limit, without a gradient; inplace: x itself gets it."""

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False):
        super().__init__(inplace)
        self.min_val, self.max_val = min_val, max_val

    def of(self, x: Tensor) -> Tensor:
        return F.hardtanh(x, self.min_val, self.max_val)


class ReLU6(Activation):
    """x between 0 and 6, else the limit, without a gradient; inplace: x itself gets it."""

    def of(self, x: Tensor) -> Tensor:
        return F.relu6(x)


class Hardsigmoid(Activation):
    """relu6(x + 3) / 6; inplace: x itself gets it."""

    def of(self, x: Tensor) -> Tensor:
        return F.hardsigmoid(x)


class Hardswish(Activation):
    """x * hardsigmoid(x); inplace: x itself gets it."""

    def of(self, x: Tensor) -> Tensor:
        return F.hardswish(x)


class PReLU(Module):
    """x where it is positive, else x times `weight`: one number, or one for each channel of x [N, C, ...]."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25, *, device: Device | str | None = None):
        if not isinstance(num_parameters, int) or num_parameters < 1:
            raise ArgumentError(f"PReLU: expected num_parameters of at least 1, got {num_parameters!r}")
        self.weight = Parameter(np.full(num_parameters, init, np.float32), device)

    def forward(self, x: Tensor) -> Tensor:
        return F.prelu(x, self.weight)


class LogSigmoid(Module):
    """log(1 / (1 + exp(-x)))"""

    def forward(self, x: Tensor) -> Tensor:
        return F.logsigmoid(x)


class Threshold(Activation):
    """x above the threshold, else the value."""

    def __init__(self, threshold: float, value: float, inplace: bool = False):
        super().__init__(inplace)
        self.threshold, self.value = threshold, value

    def of(self, x: Tensor) -> Tensor:
        return F.threshold(x, self.threshold, self.value)


class GLU(Module):
    """The first half along a dimension times the sigmoid of the second."""

    def __init__(self, dim: int = -1):
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(x, self.dim)


class CosineSimilarity(Module):
    """The cosine of the angle between x1 and x2 along a dimension."""

    def __init__(self, dim: int = 1, eps: float = 1e-8):
        self.dim, self.eps = dim, eps

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:  # type: ignore[override]
        return F.cosine_similarity(x1, x2, self.dim, self.eps)
