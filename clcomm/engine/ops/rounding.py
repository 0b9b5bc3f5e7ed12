"""Whole numbers near an element, the rest of a division, and log(1 + x), with PyTorch's names."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

import math
from numbers import Real

from clcomm.base.errors import ArgumentError
from clcomm.engine.ops.comparisons import where
from clcomm.engine.ops.elements import elements, of_elements
from clcomm.engine.ops.elementwise import div as quotient
from clcomm.engine.ops.elementwise import mul
from clcomm.engine.ops.functions import abs
from clcomm.engine.ops.types import are_whole, floats, is_whole, of_integers, pair
from clcomm.engine.tensor import Tensor, constant, float_tensor

Round = elements("round", ("x",), (), "rint(x)", "0")
Remainder = elements("remainder", ("x",), ("divisor",), "rest_of_division(x, divisor)", "g")
Rest = elements("rest", ("a", "b"), (), "with_sign_of(fmod(a, b), b)", "g", "g * -whole_quotient(a, b)")
WholeQuotient = elements(
    "whole_quotient", ("a", "b"), (),
    "a / b if b == 0 else rounded_down_from(rint((a - fmod(a, b)) / b), fmod(a, b), b)", "0", "0",
)  # fmt: skip


def _pair(name: str, a: Tensor | float, b: Tensor) -> tuple[Tensor, Tensor]:
    return pair(name, a if isinstance(a, Tensor) else constant(b.device, float(a)), float_tensor(name, b))


@of_elements("log1p(x)", "g * (1 / (1 + x))")
def log1p(x: Tensor) -> Tensor:
    """Return log(1 + x) of each element; x: float32 of any shape, which the result has too."""


@of_elements("floor(x)", "0")
def floor(x: Tensor) -> Tensor:
    """Return the next whole number below each element, with a gradient of 0; x: float32 of any shape."""


@of_elements("ceil(x)", "0")
def ceil(x: Tensor) -> Tensor:
    """Return the next whole number above each element, with a gradient of 0; x: float32 of any shape."""


def round(x: Tensor, *, decimals: int = 0) -> Tensor:
    """Return the nearest whole number, the even one of two, or that of `decimals` digits behind it; gradients are 0."""
    if decimals:
        return quotient(round(mul(x, 10.0**decimals)), 10.0**decimals)
    return Round.apply(float_tensor("round", x))


@of_elements("trunc(x)", "0")
def trunc(x: Tensor) -> Tensor:
    """Return each element without its fraction, with a gradient of 0; x: float32 of any shape."""


@of_elements("1 if x > 0 else -1 if x < 0 else 0", "0")
def sign(x: Tensor) -> Tensor:
    """Return 1, 0 or -1 of each element, with a gradient of 0; x: float32 of any shape."""


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
    if isinstance(b, Tensor):
        return WholeQuotient.apply(*_pair("floor_divide", a, b))
    whole = float_tensor("floor_divide", a)  # not one of booleans
    return WholeQuotient.apply(whole, constant(whole.device, float(b)))


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
