"""Functions of single elements, with PyTorch's names: powers, logarithms, trigonometric ones, and limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.activation import Activation
from clcomm.engine.ops.elementwise import binary, folded, pair
from clcomm.engine.ops.types import broadcast_shape, expand, is_whole, to_float
from clcomm.engine.tensor import Tensor, constant, empty, float_tensor

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


class Expm1(_Function):
    """e^x - 1"""

    source, kernel_name = "rarer_functions", "e_to_x_less_1"


class Atan(_OfArgument):
    """The inverse of the tangent."""

    source, kernel_name = "rarer_functions", "arc_tangent"


class Asin(_OfArgument):
    """The inverse of the sine."""

    source, kernel_name = "rarer_functions", "arc_sine"


class Acos(_OfArgument):
    """The inverse of the cosine."""

    source, kernel_name = "rarer_functions", "arc_cosine"


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


def expm1(x: Tensor) -> Tensor:
    """Return e^x - 1 of each element, exact near 0; x: float32 of any shape, which the result has too."""
    return Expm1.apply(float_tensor("expm1", x))


def atan(x: Tensor) -> Tensor:
    """Return the angle with a tangent, in radians, of each element; x: float32 of any shape, which the result has."""
    return Atan.apply(float_tensor("atan", x))


def asin(x: Tensor) -> Tensor:
    """Return the angle with a sine, in radians, of each element; x: float32 of any shape, which the result has too."""
    return Asin.apply(float_tensor("asin", x))


def acos(x: Tensor) -> Tensor:
    """Return the angle with a cosine, in radians, of each element; x: float32 of any shape, which the result has."""
    return Acos.apply(float_tensor("acos", x))


def atan2(a: Tensor, b: Tensor) -> Tensor:
    """Return the angle of the point (b, a) from the first axis, from -pi to pi; a, b: float32 that broadcast."""
    return Angle.apply(*both("atan2", a, b))


def hypot(a: Tensor, b: Tensor) -> Tensor:
    """Return sqrt(a^2 + b^2) of each two elements, also where a^2 is too large; a, b: float32 that broadcast."""
    return Length.apply(*both("hypot", a, b))


def xlogy(a: Tensor, b: Tensor) -> Tensor:
    """Return a log(b), 0 where a is 0 and b no NaN; a, b: float32 that broadcast to the result."""
    return TimesLogarithm.apply(*both("xlogy", a, b))


def pow(x: Tensor | float, exponent: float | Tensor) -> Tensor:
    """Return x^exponent of each element, NaN of a negative x unless the exponent is whole.

    x: float32 of any shape, which the result has too; exponent: a number. One of both may be a number; two tensors
    broadcast. The gradient of an exponent is 0 where x is 0, as PyTorch's.
    """
    if isinstance(exponent, Tensor):
        base = x if isinstance(x, Tensor) else constant(exponent.device, float(x))
        return PowerOf.apply(*both("pow", base, exponent))
    float_tensor("pow", x)
    if not isinstance(exponent, Real):
        raise ArgumentError(f"pow: exponent: expected a number or a tensor, got {type(exponent).__name__}")
    special = {0.5: Sqrt, -0.5: Rsqrt, 2.0: Square}.get(float(exponent))
    if special is not None:
        return special.apply(x)
    if exponent and float(exponent).is_integer() and -_MOST_SQUARED <= exponent <= _MOST_SQUARED:
        return WholePower.apply(x, settings=(float(exponent), 0.0))
    return Power.apply(x, settings=(float(exponent),))


def clamp(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """Return each element, or the limit beyond which it lies; NaN stays NaN.

    x: float32 of any shape, which the result has too; of integers with whole limits integers. Raises ArgumentError
    without a limit.
    """
    if min is None and max is None:
        raise ArgumentError("clamp: expected min, max or both, got neither")
    if is_whole(x):
        whole = [limit for limit in (min, max) if isinstance(limit, (int, np.integer))]
        if len(whole) == (min is not None) + (max is not None):
            return Tensor(np.clip(x.numpy().astype(np.int64), min, max), x.device)
        x = to_float(x)
    least, most = -math.inf if min is None else float(min), math.inf if max is None else float(max)
    if least != least or most != most:
        raise ArgumentError(f"clamp: expected numbers, got {min!r} and {max!r}")
    return Clamp.apply(float_tensor("clamp", x), settings=(least, most))


class OfTwo(Op):
    """A function of two elements, of rarer_functions.cl; `slopes` are its gradients divided by the result's."""

    keeps_columns = True
    kernel_name: str

    @classmethod
    def forward(cls, ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        out = empty(a.device, broadcast_shape(cls.kernel_name, a.shape, b.shape))
        whole = [x if x.shape == out.shape else expand(x, out.shape) for x in (a, b)]
        kernel, size = a.device.kernel("rarer_functions", cls.kernel_name), out.numel()
        a.device.launch(kernel, *a.device.grid(size), out, *whole, size)
        ctx.save(a, b)
        return out

    @classmethod
    def backward(cls, ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = (x.detach() for x in ctx.saved)
        return tuple([
            folded(ctx, index, grad.detach() * slope(a, b)) if ctx.needs[index] else None
            for index, slope in enumerate(cls.slopes)
        ])  # fmt: skip

    slopes: tuple[Callable[[Tensor, Tensor], Tensor | float], ...]


def _of_exponent(x: Tensor, exponent: Tensor) -> Tensor:
    """Return x^exponent log(x), 0 where x is 0 and the exponent is not negative."""
    flat = (x == 0.0) & (exponent >= 0.0)
    return (pow(x, exponent) * log(x)).masked_fill(flat, 0.0)


class PowerOf(OfTwo):
    """x^y"""

    kernel_name = "power_of_two"
    slopes = (lambda x, y: (y * pow(x, y - 1.0)).masked_fill(y == 0.0, 0.0), _of_exponent)


class Angle(OfTwo):
    """The angle of the point (y, x)."""

    kernel_name = "angle_of_two"
    slopes = (lambda x, y: _turned(y, x, y), lambda x, y: -_turned(x, x, y))


def _turned(side: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return side / (x^2 + y^2), 0 at the origin."""
    size = hypot(x, y)
    return (side / size / size).masked_fill(size == 0.0, 0.0)


class Length(OfTwo):
    """The distance of the point (x, y) from the origin."""

    kernel_name = "length_of_two"
    slopes = (lambda x, y: x / hypot(x, y), lambda x, y: y / hypot(x, y))


class TimesLogarithm(OfTwo):
    """x log(y)"""

    kernel_name = "times_logarithm"
    slopes = (lambda x, y: log(y).masked_fill((x == 0.0) & (y <= 0.0), 0.0), lambda x, y: x / y)


class Entropy(OfTwo):
    """-(y log(x) + (1 - y) log(1 - x)) of probabilities, with logarithms of at least -100."""

    kernel_name = "entropy_of_two"
    slopes = (
        lambda x, y: (x - y) / clamp((1.0 - x) * x, min=1e-12),
        lambda x, y: clamp(log(1.0 - x), min=-100.0) - clamp(log(x), min=-100.0),
    )


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
    return Maximum.apply(*both("maximum", a, b))


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """Return the smaller of each two elements, NaN where one is; a, b: float32 that broadcast to the result."""
    return Minimum.apply(*both("minimum", a, b))


def both(name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a, b = pair(name, a, b)
    broadcast_shape(name, a.shape, b.shape)
    return a, b
