"""Whole numbers near an element, the rest of a division, and log(1 + x), with PyTorch's names."""

from __future__ import annotations

import math
from numbers import Real

from clcomm.base.errors import ArgumentError
from clcomm.engine.ops.activation import Activation
from clcomm.engine.ops.comparisons import where
from clcomm.engine.ops.elementwise import div as quotient
from clcomm.engine.ops.elementwise import mul
from clcomm.engine.ops.functions import OfTwo, abs, both
from clcomm.engine.ops.types import are_whole, floats, is_whole, of_integers
from clcomm.engine.tensor import Tensor, constant, float_tensor


class _Rounding(Activation):
    """y = f(x), of rounding.cl; backward takes x."""

    source, keeps_result = "rounding", False


class Log1p(_Rounding):
    """log(1 + x)"""

    kernel_name = "log_of_more"


class Floor(_Rounding):
    """The next whole number below."""

    kernel_name = "rounded_down"


class Ceil(_Rounding):
    """The next whole number above."""

    kernel_name = "rounded_up"


class Round(_Rounding):
    """The nearest whole number."""

    kernel_name = "rounded"


class Trunc(_Rounding):
    """The next whole number towards 0."""

    kernel_name = "without_fraction"


class Sign(_Rounding):
    """1, 0 or -1."""

    kernel_name = "sign_of"


class Remainder(_Rounding):
    """What a division by a number leaves."""

    kernel_name = "rest_of_division"


class Rest(OfTwo):
    """What the division of x by y leaves, with y's sign."""

    kernel_name = "rest_of_two"
    slopes = (lambda x, y: 1.0, lambda x, y: mul(floor_divide(x, y), -1.0))


class WholeQuotient(OfTwo):
    """x / y, rounded down."""

    kernel_name = "whole_quotient"
    slopes = (lambda x, y: 0.0, lambda x, y: 0.0)


def _pair(name: str, a: Tensor | float, b: Tensor) -> tuple[Tensor, Tensor]:
    return both(name, a if isinstance(a, Tensor) else constant(b.device, float(a)), float_tensor(name, b))


def log1p(x: Tensor) -> Tensor:
    """Return log(1 + x) of each element; x: float32 of any shape, which the result has too."""
    return Log1p.apply(float_tensor("log1p", x))


def floor(x: Tensor) -> Tensor:
    """Return the next whole number below each element, with a gradient of 0; x: float32 of any shape."""
    return Floor.apply(float_tensor("floor", x))


def ceil(x: Tensor) -> Tensor:
    """Return the next whole number above each element, with a gradient of 0; x: float32 of any shape."""
    return Ceil.apply(float_tensor("ceil", x))


def round(x: Tensor, *, decimals: int = 0) -> Tensor:
    """Return the nearest whole number, the even one of two, or that of `decimals` digits behind it; gradients are 0."""
    if decimals:
        return quotient(round(mul(x, 10.0**decimals)), 10.0**decimals)
    return Round.apply(float_tensor("round", x))


def trunc(x: Tensor) -> Tensor:
    """Return each element without its fraction, with a gradient of 0; x: float32 of any shape."""
    return Trunc.apply(float_tensor("trunc", x))


def sign(x: Tensor) -> Tensor:
    """Return 1, 0 or -1 of each element, with a gradient of 0; x: float32 of any shape."""
    return Sign.apply(float_tensor("sign", x))


def remainder(a: Tensor | float, b: float | Tensor) -> Tensor:
    """Return what the division of each element by b leaves, with b's sign, as Python's `%`.

    a, b: float32 that broadcast, or integers; one may be a number, b one other than 0. Raises ArgumentError for others.
    """
    if is_whole(a) or is_whole(b):
        return of_integers("remainder", a, b) if are_whole(a, b) else remainder(*floats(a, b))
    if isinstance(b, Tensor):
        return Rest.apply(*_pair("remainder", a, b))
    if not isinstance(b, Real) or not b:
        raise ArgumentError(f"remainder: expected a number other than 0 or a tensor to divide by, got {b!r}")
    return Remainder.apply(float_tensor("remainder", a), settings=(float(b),))


def floor_divide(a: Tensor | float, b: float | Tensor) -> Tensor:
    """Return each element divided by b, rounded down, with a gradient of 0; arguments as of `remainder`."""
    if is_whole(a) or is_whole(b):
        return of_integers("floor_divide", a, b) if are_whole(a, b) else floor_divide(*floats(a, b))
    if not isinstance(b, Real | Tensor):
        raise ArgumentError(f"floor_divide: expected a number or a tensor to divide by, got {b!r}")
    return WholeQuotient.apply(*_pair("floor_divide", a, b if isinstance(b, Tensor) else constant(a.device, float(b))))


def div(a: Tensor | float, b: Tensor | float, *, rounding_mode: str | None = None) -> Tensor:
    """Return a / b, see `elementwise.div`; rounded down with "floor", as `floor_divide`, or towards 0 with "trunc".

    Integers that are rounded stay integers. Raises ArgumentError for another mode.
    """
    if rounding_mode is None:
        return quotient(a, b)
    if rounding_mode == "floor":
        return floor_divide(a, b)
    if rounding_mode != "trunc":
        raise ArgumentError(f"div: rounding_mode: expected None, 'floor' or 'trunc', got {rounding_mode!r}")
    if (is_whole(a) or is_whole(b)) and are_whole(a, b):
        return of_integers("trunc_divide", a, b)
    return trunc(quotient(a, b))


def fmod(x: Tensor, other: float | Tensor) -> Tensor:
    """Return what the division of each element leaves, with the element's sign; arguments as of `remainder`."""
    size = abs(other) if isinstance(other, Tensor) else math.fabs(other)
    return where(float_tensor("fmod", x) < 0, mul(remainder(mul(x, -1.0), size), -1.0), remainder(x, size))
