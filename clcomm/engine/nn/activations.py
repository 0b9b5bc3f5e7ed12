"""Activations as layers."""

from __future__ import annotations

from typing import Any

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


class FunctionLayer(Module):
    """A layer that calls a function of `functional` with those of its attributes that are the function's settings."""

    _function: Any
    _settings: tuple[str, ...] = ()

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        result: Tensor = self._function(*inputs, **named, **{name: getattr(self, name) for name in self._settings})
        return result


class Activation(FunctionLayer):
    """An activation, which gives x its result where it is to work in place."""

    def __init__(self, inplace: bool = False):
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        return F.overwrite(x, self.of) if self.inplace else self.of(x)

    def of(self, x: Tensor) -> Tensor:
        """Return the result."""
        return super().forward(x)


class ReLU(Activation):
    """max(x, 0); inplace: x itself gets it."""

    _function = staticmethod(F.relu)


class Sigmoid(FunctionLayer):
    """1 / (1 + exp(-x))"""

    _function = staticmethod(F.sigmoid)


class Tanh(FunctionLayer):
    """Hyperbolic tangent."""

    _function = staticmethod(F.tanh)


class GELU(FunctionLayer):
    """x times the normal distribution's cumulative function at x; with `approximate` "tanh" as GPT-2 computes it."""

    _function, _settings = staticmethod(F.gelu), ("approximate",)

    def __init__(self, approximate: str = "none"):
        if approximate not in ("none", "tanh"):
            raise ArgumentError(f"GELU: expected approximate 'none' or 'tanh', got {approximate!r}")
        self.approximate = approximate


class SiLU(Activation):
    """x / (1 + exp(-x)); inplace: x itself gets it."""

    _function = staticmethod(F.silu)


class LeakyReLU(Activation):
    """x where it is positive, else negative_slope * x; inplace: x itself gets it."""

    _function, _settings = staticmethod(F.leaky_relu), ("negative_slope",)

    def __init__(self, negative_slope: float = 0.01, inplace: bool = False):
        super().__init__(inplace)
        self.negative_slope = negative_slope


class Softmax(FunctionLayer):
    """exp(x) / sum(exp(x)) along `dim`; None: PyTorch's choice, of 0, 1 and 3 dimensions the first, else 1."""

    _function, _settings = staticmethod(F.softmax), ("dim",)

    def __init__(self, dim: int | None = None):
        self.dim = dim


class LogSoftmax(FunctionLayer):
    """x - log(sum(exp(x))) along `dim`; None: PyTorch's choice, of 0, 1 and 3 dimensions the first, else 1."""

    _function, _settings = staticmethod(F.log_softmax), ("dim",)

    def __init__(self, dim: int | None = None):
        self.dim = dim


class ELU(Activation):
    """x where it is positive, else alpha * (e^x - 1); inplace: x itself gets it."""

    _function, _settings = staticmethod(F.elu), ("alpha",)

    def __init__(self, alpha: float = 1.0, inplace: bool = False):
        super().__init__(inplace)
        self.alpha = alpha


class Softplus(FunctionLayer):
    """log(1 + e^(beta x)) / beta"""

    _function, _settings = staticmethod(F.softplus), ("beta", "threshold")

    def __init__(self, beta: float = 1.0, threshold: float = 20.0):
        self.beta, self.threshold = beta, threshold


class Mish(Activation):
    """x * tanh(softplus(x)); inplace: x itself gets it."""

    _function = staticmethod(F.mish)


class Hardtanh(Activation):
    """x between min_val and max_val, else the limit, without a gradient; inplace: x itself gets it."""

    _function, _settings = staticmethod(F.hardtanh), ("min_val", "max_val")

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False):
        super().__init__(inplace)
        self.min_val, self.max_val = min_val, max_val


class ReLU6(Activation):
    """x between 0 and 6, else the limit, without a gradient; inplace: x itself gets it."""

    _function = staticmethod(F.relu6)


class Hardsigmoid(Activation):
    """relu6(x + 3) / 6; inplace: x itself gets it."""

    _function = staticmethod(F.hardsigmoid)


class Hardswish(Activation):
    """x * hardsigmoid(x); inplace: x itself gets it."""

    _function = staticmethod(F.hardswish)


class PReLU(FunctionLayer):
    """x where it is positive, else x times `weight`: one number, or one for each channel of x [N, C, ...]."""

    _function, _settings = staticmethod(F.prelu), ("weight",)

    def __init__(self, num_parameters: int = 1, init: float = 0.25, *, device: Device | str | None = None):
        if not isinstance(num_parameters, int) or num_parameters < 1:
            raise ArgumentError(f"PReLU: expected num_parameters of at least 1, got {num_parameters!r}")
        self.weight = Parameter(np.full(num_parameters, init, np.float32), device)


class LogSigmoid(FunctionLayer):
    """log(1 / (1 + exp(-x)))"""

    _function = staticmethod(F.logsigmoid)


class Threshold(Activation):
    """x above the threshold, else the value."""

    _function, _settings = staticmethod(F.threshold), ("threshold", "value")

    def __init__(self, threshold: float, value: float, inplace: bool = False):
        super().__init__(inplace)
        self.threshold, self.value = threshold, value


class GLU(FunctionLayer):
    """The first half along a dimension times the sigmoid of the second."""

    _function, _settings = staticmethod(F.glu), ("dim",)

    def __init__(self, dim: int = -1):
        self.dim = dim


class CosineSimilarity(FunctionLayer):
    """The cosine of the angle between x1 and x2 along a dimension."""

    _function, _settings = staticmethod(F.cosine_similarity), ("dim", "eps")

    def __init__(self, dim: int = 1, eps: float = 1e-8):
        self.dim, self.eps = dim, eps
