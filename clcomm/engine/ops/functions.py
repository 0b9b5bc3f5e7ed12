"""Functions of single elements, with PyTorch's names: powers, logarithms, trigonometric ones, and limits."""

from __future__ import annotations

import math
from numbers import Real

from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.activation import Activation
from clcomm.engine.ops.broadcasting import broadcast_shape, expand
from clcomm.engine.ops.elementwise import binary, folded, pair
from clcomm.engine.tensor import Tensor, empty, float_tensor
from clcomm.errors import ArgumentError

#: The largest whole power that is made of products, which is 4 ulp off at most.
_MOST_SQUARED = 8


class _Function(Activation):
    """y = f(x), of functions.cl; backward takes y."""

    source = "functions"


class _OfArgument(_Function):
    """y = f(x), of functions.cl; backward takes x."""

    keeps_result = False


class Exp(_Function):
    """e^x"""

    kernel_name = "e_to_x"


class Log(_OfArgument):
    """The natural logarithm."""

    kernel_name = "logarithm"


class Sqrt(_Function):
    """The square root."""

    kernel_name = "square_root"


class Rsqrt(_Function):
    """1 / sqrt(x)"""

    kernel_name = "reciprocal_root"


class Abs(_OfArgument):
    """|x|"""

    kernel_name = "absolute"


class Square(_OfArgument):
    """x * x"""

    kernel_name = "squared"


class Sin(_OfArgument):
    """The sine."""

    kernel_name = "sine"


class Cos(_OfArgument):
    """The cosine."""

    kernel_name = "cosine"


class Erf(_OfArgument):
    """The error function."""

    kernel_name = "error_function"


class Softplus(_OfArgument):
    """log(1 + e^x)"""

    kernel_name = "softplus"


class Power(_OfArgument):
    """x^exponent"""

    kernel_name = "power"


class WholePower(_OfArgument):
    """x^exponent, of a small whole exponent."""

    kernel_name = "whole_power"


class LogSigmoid(_OfArgument):
    """log(1 / (1 + e^-x))"""

    kernel_name = "minus_softplus_of_minus"


class Mish(_OfArgument):
    """x * tanh(softplus(x))"""

    kernel_name = "mish"


class HardSwish(_OfArgument):
    """x * relu6(x + 3) / 6"""

    kernel_name = "hard_swish"


class Elu(_OfArgument):
    """x, or alpha * (e^x - 1) where it is not positive."""

    kernel_name = "exponential_linear"


class HardTanh(_OfArgument):
    """x between two limits, else the limit; between them its gradient passes, not at them."""

    kernel_name = "hard_tangent"


class Threshold(_OfArgument):
    """x above a threshold, else a value."""

    kernel_name = "above_threshold"


class Clamp(_OfArgument):
    """x between two limits, between which its gradient passes."""

    kernel_name = "clamped"


def exp(x: Tensor) -> Tensor:
    """Return e^x of each element, 0 below -86.9; x: float32 of any shape, which the result has too."""
    return Exp.apply(float_tensor("exp", x))


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm of each element; x: float32 of any shape, which the result has too."""
    return Log.apply(float_tensor("log", x))


def sqrt(x: Tensor) -> Tensor:
    """Return the square root of each element; x: float32 of any shape, which the result has too."""
    return Sqrt.apply(float_tensor("sqrt", x))


def rsqrt(x: Tensor) -> Tensor:
    """Return 1 / sqrt(x) of each element; x: float32 of any shape, which the result has too."""
    return Rsqrt.apply(float_tensor("rsqrt", x))


def abs(x: Tensor) -> Tensor:
    """Return |x| of each element, whose gradient at 0 is 0; x: float32 of any shape, which the result has too."""
    return Abs.apply(float_tensor("abs", x))


def square(x: Tensor) -> Tensor:
    """Return x * x of each element; x: float32 of any shape, which the result has too."""
    return Square.apply(float_tensor("square", x))


def sin(x: Tensor) -> Tensor:
    """Return the sine of each element, in radians; x: float32 of any shape, which the result has too."""
    return Sin.apply(float_tensor("sin", x))


def cos(x: Tensor) -> Tensor:
    """Return the cosine of each element, in radians; x: float32 of any shape, which the result has too."""
    return Cos.apply(float_tensor("cos", x))


def erf(x: Tensor) -> Tensor:
    """Return the error function of each element; x: float32 of any shape, which the result has too."""
    return Erf.apply(float_tensor("erf", x))


def pow(x: Tensor, exponent: float) -> Tensor:
    """Return x^exponent of each element.

    x: float32 of any shape, which the result has too; exponent: a number. Raises ArgumentError for an exponent that is
    a tensor; of positive x that is exp(exponent * log(x)).
    """
    float_tensor("pow", x)
    if not isinstance(exponent, Real):
        raise ArgumentError(
            f"pow: exponent: expected a number, got {type(exponent).__name__}; of positive x use exp(exponent * log(x))"
        )
    special = {0.5: Sqrt, -0.5: Rsqrt, 2.0: Square}.get(float(exponent))
    if special is not None:
        return special.apply(x)
    if not exponent:
        return x * 0.0 + 1.0
    if float(exponent).is_integer() and -_MOST_SQUARED <= exponent <= _MOST_SQUARED:
        return WholePower.apply(x, settings=(float(exponent), 0.0))
    return Power.apply(x, settings=(float(exponent),))


def clamp(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """Return each element, or the limit beyond which it lies; NaN stays NaN.

    x: float32 of any shape, which the result has too. Raises ArgumentError without a limit.
    """
    if min is None and max is None:
        raise ArgumentError("clamp: expected min, max or both, got neither")
    least, most = -math.inf if min is None else float(min), math.inf if max is None else float(max)
    return Clamp.apply(float_tensor("clamp", x), settings=(least, most))


class _Larger(Op):
    """The larger of two, of sign 1, or the smaller, of -1; the gradient of equal ones is divided evenly."""

    keeps_columns = True
    kernel_name: str
    sign: float

    @classmethod
    def forward(cls, ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        ctx.save(a, b)
        return binary(cls.kernel_name, a, b)

    @classmethod
    def backward(cls, ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = [x if x.shape == grad.shape else expand(x, grad.shape) for x in ctx.saved]
        grads: list[Tensor | None] = []
        for index, (own, other) in enumerate(((a, b), (b, a))):
            full = empty(grad.device, grad.shape) if ctx.needs[index] else None
            if full is not None:
                kernel, size = grad.device.kernel("elementwise", "larger_grad"), grad.numel()
                grad.device.launch(kernel, *grad.device.grid(size), full, grad, own, other, cls.sign, size)
            grads.append(None if full is None else folded(ctx, index, full))
        return tuple(grads)


class Maximum(_Larger):
    """The larger of two elements."""

    kernel_name, sign = "maximum", 1.0


class Minimum(_Larger):
    """The smaller of two elements."""

    kernel_name, sign = "minimum", -1.0


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """Return the larger of each two elements, NaN where one is; a, b: float32 that broadcast to the result."""
    return Maximum.apply(*_both("maximum", a, b))


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """Return the smaller of each two elements, NaN where one is; a, b: float32 that broadcast to the result."""
    return Minimum.apply(*_both("minimum", a, b))


def _both(name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a, b = pair(name, a, b)
    broadcast_shape(name, a.shape, b.shape)
    return a, b
