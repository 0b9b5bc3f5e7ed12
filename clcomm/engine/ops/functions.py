"""Functions of single elements, with PyTorch's names: powers, logarithms, trigonometric ones, and limits."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

import math
from numbers import Real

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.ops.elements import LARGER, SMALLER, elements, of_elements
from clcomm.engine.ops.types import is_whole, pair, to_float
from clcomm.engine.tensor import Tensor, constant, float_tensor

#: The largest whole power that is made of products, which is 4 ulp off at most.
_MOST_SQUARED = 8


PowerOf = elements(
    "pow", ("x", "exponent"), (), "pow(x, exponent)",
    "g * (0 if exponent == 0 else exponent * pow(x, exponent - 1))",
    "g * (0 if (x == 0) & (exponent >= 0) else pow(x, exponent) * log(x))",
)  # fmt: skip
Power = elements(
    "power", ("x",), ("exponent",), "power_of(x, exponent)",
    "g * (0 if exponent == 0 else exponent * power(x, exponent - 1))",
)  # fmt: skip
WholePower = elements(
    "whole_power", ("x",), ("exponent",), "whole_power_of(x, exponent)",
    "g * (0 if exponent == 0 else exponent * whole_power(x, exponent - 1))",
)  # fmt: skip
Clamp = elements(
    "clamp", ("x",), ("least", "most"),
    "most if (least if x < least else x) > most else (least if x < least else x)",
    "g if (x >= least) & (x <= most) else 0",
)  # fmt: skip
Maximum = elements(
    "maximum", ("a", "b"), (), LARGER,
    "0.5 * g if a == b else 0 if a < b else g", "0.5 * g if a == b else 0 if b < a else g",
)  # fmt: skip
Minimum = elements(
    "minimum", ("a", "b"), (), SMALLER,
    "0.5 * g if a == b else 0 if b < a else g", "0.5 * g if a == b else 0 if a < b else g",
)  # fmt: skip


@of_elements("exponential(x)", "g * y")
def exp(x: Tensor) -> Tensor:
    """Return e^x of each element, 0 below -86.9; x: float32 of any shape, which the result has too."""


@of_elements("log(x)", "g * (1 / x)")
def log(x: Tensor) -> Tensor:
    """Return the natural logarithm of each element; x: float32 of any shape, which the result has too."""


@of_elements("sqrt(x)", "g * (0.5 / y)")
def sqrt(x: Tensor) -> Tensor:
    """Return the square root of each element; x: float32 of any shape, which the result has too."""


@of_elements("1 / sqrt(x)", "g * (-0.5 * y * y * y)")
def rsqrt(x: Tensor) -> Tensor:
    """Return 1 / sqrt(x) of each element; x: float32 of any shape, which the result has too."""


@of_elements("size_of(x)", "g * (1 if x > 0 else -1 if x < 0 else 0)")
def abs(x: Tensor) -> Tensor:
    """Return |x| of each element, whose gradient at 0 is 0; x: float32 of any shape, which the result has too."""


@of_elements("x * x", "2 * g * x")  # 2 x may be infinite where g is 0
def square(x: Tensor) -> Tensor:
    """Return x * x of each element; x: float32 of any shape, which the result has too."""


@of_elements("sine_of(x)", "g * cos(x)")
def sin(x: Tensor) -> Tensor:
    """Return the sine of each element, in radians; x: float32 of any shape, which the result has too."""


@of_elements("cosine_of(x)", "g * -sin(x)")
def cos(x: Tensor) -> Tensor:
    """Return the cosine of each element, in radians; x: float32 of any shape, which the result has too."""


@of_elements("error_function_of(x)", "g * (1.12837916709551257 * exp(-x * x))")
def erf(x: Tensor) -> Tensor:
    """Return the error function of each element; x: float32 of any shape, which the result has too."""


@of_elements("expm1(x)", "g * (y + 1)")
def expm1(x: Tensor) -> Tensor:
    """Return e^x - 1 of each element, exact near 0; x: float32 of any shape, which the result has too."""


@of_elements("atan(x)", "g * (1 / (1 + x * x))")
def atan(x: Tensor) -> Tensor:
    """Return the angle with a tangent, in radians, of each element; x: float32 of any shape, which the result has."""


@of_elements("asin(x)", "g * (1 / sqrt(1 - x * x))")
def asin(x: Tensor) -> Tensor:
    """Return the angle with a sine, in radians, of each element; x: float32 of any shape, which the result has too."""


@of_elements("acos(x)", "g * (-1 / sqrt(1 - x * x))")
def acos(x: Tensor) -> Tensor:
    """Return the angle with a cosine, in radians, of each element; x: float32 of any shape, which the result has."""


@of_elements(
    "atan2(a, b)",
    "g * (0 if hypot(a, b) == 0 else b / hypot(a, b) / hypot(a, b))",
    "g * -(0 if hypot(a, b) == 0 else a / hypot(a, b) / hypot(a, b))",
)
def atan2(a: Tensor, b: Tensor) -> Tensor:
    """Return the angle of the point (b, a) from the first axis, from -pi to pi; a, b: float32 that broadcast."""


@of_elements("hypot(a, b)", "g * (a / y)", "g * (b / y)")
def hypot(a: Tensor, b: Tensor) -> Tensor:
    """Return sqrt(a^2 + b^2) of each two elements, also where a^2 is too large; a, b: float32 that broadcast."""


@of_elements("0 if (a == 0) & (b == b) else a * log(b)", "g * (0 if (a == 0) & (b <= 0) else log(b))", "g * (a / b)")
def xlogy(a: Tensor, b: Tensor) -> Tensor:
    """Return a log(b), 0 where a is 0 and b no NaN; a, b: float32 that broadcast to the result."""


def pow(x: Tensor | float, exponent: float | Tensor) -> Tensor:
    """Return x^exponent of each element, NaN of a negative x unless the exponent is whole.

    x: float32 of any shape, which the result has too; exponent: a number. One of both may be a number; two tensors
    broadcast. The gradient of an exponent is 0 where x is 0, as PyTorch's.
    """
    if isinstance(exponent, Tensor):
        base = x if isinstance(x, Tensor) else constant(exponent.device, float(x))
        return PowerOf.apply(*pair("pow", base, exponent))
    float_tensor("pow", x)
    if not isinstance(exponent, Real):
        raise ArgumentError(f"pow: exponent: expected a number or a tensor, got {type(exponent).__name__}")
    special = {0.5: sqrt, -0.5: rsqrt, 2.0: square}.get(float(exponent))
    if special is not None:
        return special(x)
    if exponent and float(exponent).is_integer() and -_MOST_SQUARED <= exponent <= _MOST_SQUARED:
        return WholePower.apply(x, settings=(float(exponent),))
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


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """Return the larger of each two elements, NaN where one is; a, b: float32 that broadcast to the result."""
    return Maximum.apply(*pair("maximum", a, b))


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """Return the smaller of each two elements, NaN where one is; a, b: float32 that broadcast to the result."""
    return Minimum.apply(*pair("minimum", a, b))
