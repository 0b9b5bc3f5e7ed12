"""Short formulas of elements with PyTorch's names, made of other functions, whose gradients they have."""

from __future__ import annotations

import math

from clcomm.base.errors import ArgumentError
from clcomm.engine.fusion import chained
from clcomm.engine.ops.arrangement import narrow, pad
from clcomm.engine.ops.comparisons import equal_to, less_or_equal, less_than, logical_or, masked_fill, where
from clcomm.engine.ops.elementwise import add, div, mul, sub
from clcomm.engine.ops.functions import abs, clamp, cos, erf, exp, expm1, log, maximum, pow, sin
from clcomm.engine.ops.ordered import Ordered, extreme_over, sort
from clcomm.engine.ops.reduce import sum
from clcomm.engine.ops.rounding import log1p, trunc
from clcomm.engine.ops.shape import contiguous, reshape, unshared
from clcomm.engine.ops.types import dimension_of
from clcomm.engine.tensor import Tensor, float_tensor


@chained
def lerp(x: Tensor, end: Tensor, weight: float | Tensor) -> Tensor:
    """Return x + weight * (end - x); float32 that broadcast to the result, the weight also a number."""
    apart = sub(float_tensor("lerp", end), x)
    if isinstance(weight, Tensor):  # from the nearer end, as PyTorch's: the other may be infinite
        is_near = abs(weight.detach()) < 0.5
        return add(where(is_near, x, end), mul(apart, where(is_near, weight, sub(weight, 1.0))))
    return add(x, mul(apart, weight)) if math.fabs(weight) < 0.5 else add(end, mul(apart, weight - 1.0))


@chained
def addcmul(x: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1.0) -> Tensor:
    """Return x + value * tensor1 * tensor2; float32 that broadcast to the result."""
    return add(x, mul(mul(tensor1, float(value)), tensor2))


@chained
def addcdiv(x: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1.0) -> Tensor:
    """Return x + value * tensor1 / tensor2; float32 that broadcast to the result."""
    return add(x, div(mul(tensor1, float(value)), tensor2))


def clamp_min(x: Tensor, min: float) -> Tensor:
    """Return each element, or the limit below which it lies. See `clamp`."""
    return clamp(x, min=min)


def clamp_max(x: Tensor, max: float) -> Tensor:
    """Return each element, or the limit above which it lies. See `clamp`."""
    return clamp(x, max=max)


@chained
def tan(x: Tensor) -> Tensor:
    """Return the tangent of each element, in radians; x: float32 of any shape, which the result has too."""
    return div(sin(x), cos(x))


@chained
def sinh(x: Tensor) -> Tensor:
    """Return the hyperbolic sine of each element; x: float32 of any shape, which the result has too."""
    return mul(sub(expm1(x), expm1(mul(x, -1.0))), 0.5)


@chained
def cosh(x: Tensor) -> Tensor:
    """Return the hyperbolic cosine of each element; x: float32 of any shape, which the result has too."""
    return mul(add(exp(x), exp(mul(x, -1.0))), 0.5)


def log2(x: Tensor) -> Tensor:
    """Return the logarithm to base 2 of each element; x: float32 of any shape, which the result has too."""
    return mul(log(x), 1.0 / math.log(2.0))


def log10(x: Tensor) -> Tensor:
    """Return the logarithm to base 10 of each element; x: float32 of any shape, which the result has too."""
    return mul(log(x), 1.0 / math.log(10.0))


@chained
def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """Return log(e^a + e^b); a, b: float32 that broadcast to the result."""
    apart = masked_fill(abs(sub(a, b)), equal_to(a, b), 0.0)  # also of two infinite ones
    return add(maximum(a, b), log1p(exp(mul(apart, -1.0))))


def exp2(x: Tensor) -> Tensor:
    """Return 2^x of each element; x: float32 of any shape, which the result has too."""
    return pow(2.0, x)


def erfc(x: Tensor) -> Tensor:
    """Return 1 less the error function of each element, to float32's digits of 1; x: float32 of any shape."""
    return sub(1.0, erf(x))


def logit(x: Tensor, eps: float | None = None) -> Tensor:
    """Return log(x / (1 - x)) of each element, brought between eps and 1 - eps if eps is given; x: float32."""
    if eps is not None and not 0 <= eps <= 0.5:
        raise ArgumentError(f"logit: eps: expected None, or a number from 0 to 0.5, got {eps!r}")
    x = x if eps is None else clamp(x, float(eps), 1.0 - float(eps))
    return sub(log(x), log1p(mul(x, -1.0)))


def neg(x: Tensor) -> Tensor:
    """Return -x of each element; x: of any type but booleans."""
    return mul(x, -1)


def reciprocal(x: Tensor) -> Tensor:
    """Return 1 / x of each element; x: float32 of any shape."""
    return div(1.0, x)


def ravel(x: Tensor) -> Tensor:
    """Return the elements as one dimension; x: of any type and shape."""
    return reshape(contiguous(x), (-1,))


negative = neg


def frac(x: Tensor) -> Tensor:
    """Return the fraction of each element, with its sign; x: float32 of any shape, which the result has too."""
    return sub(x, trunc(x))


@chained
def nan_to_num(x: Tensor, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    """Return x with numbers for NaN and infinity: 0 and the largest float32 by default; no gradient passes there."""
    most = 3.4028234663852886e38
    found = masked_fill(x, x != x, float(nan))
    found = masked_fill(found, equal_to(x, math.inf), most if posinf is None else float(posinf))
    return masked_fill(found, equal_to(x, -math.inf), -most if neginf is None else float(neginf))


def isclose(a: Tensor, b: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Tensor:
    """Return whether |a - b| <= atol + rtol |b| of each two elements; float32 that broadcast to the result."""
    a, b = a.detach(), b.detach()
    near = logical_or(equal_to(a, b), less_or_equal(abs(sub(a, b)), add(mul(abs(b), rtol), atol)))
    near = near & less_than(abs(b), math.inf) | equal_to(a, b)
    return near | ((a != a) & (b != b)) if equal_nan else near


def allclose(a: Tensor, b: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Return whether all elements are close, see `isclose`; waits for the queue."""
    return bool(isclose(a, b, rtol, atol, equal_nan).numpy().all())


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have one shape and equal elements; waits for the queue."""
    return a.shape == b.shape and bool((a.numpy() == b.numpy()).all())


def amax(x: Tensor, axis: int | tuple[int, ...] | None = (), keepdims: bool = False) -> Tensor:
    """Return the largest element over dimensions, all by default; equal ones share its gradient. x: float32."""
    return extreme_over("amax", x, axis, keepdims, 1.0)


def amin(x: Tensor, axis: int | tuple[int, ...] | None = (), keepdims: bool = False) -> Tensor:
    """Return the smallest element over dimensions, all by default; equal ones share its gradient. x: float32."""
    return extreme_over("amin", x, axis, keepdims, -1.0)


def count_nonzero(x: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Return the number of elements that are not 0, of all or along a dimension, as int32; x: of any type."""
    return sum(x != 0, axis)


def nansum(x: Tensor, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    """Return the sum over dimensions, in which NaN counts as 0. See `sum`."""
    return sum(masked_fill(x, x != x, 0.0), axis, keepdims)


@unshared
def diff(x: Tensor, n: int = 1, axis: int = -1) -> Tensor:
    """Return the differences of neighbours along a dimension, n times over; x: float32."""
    for _ in range(n):
        length = x.shape[axis]
        if length < 2:
            raise ArgumentError(f"diff: expected more than {n} elements along axis {axis}, got shape {x.shape}")
        x = sub(narrow(x, axis, 1, length - 1), narrow(x, axis, 0, length - 1))
    return x


def cumprod(x: Tensor, axis: int) -> Tensor:
    """Return the products of all elements up to each along a dimension, in pairs of doubling reach; x: float32."""
    if not float_tensor("cumprod", x).ndim:
        raise ArgumentError("cumprod: expected a tensor with dimensions, got one without")
    at = dimension_of("cumprod", x.shape, axis)
    reach, length = 1, x.shape[at]
    while reach < length:
        before = pad(narrow(x, at, 0, length - reach), [(reach * (d == at), 0) for d in range(x.ndim)], value=1.0)
        x, reach = mul(x, before), 2 * reach
    return x


def kthvalue(x: Tensor, k: int, axis: int = -1, keepdims: bool = False) -> Ordered:
    """Return the k-th smallest element along a dimension, from 1 on, and its index; x: float32."""
    at = dimension_of("kthvalue", x.shape, axis)
    if not 1 <= k <= x.shape[at]:
        raise ArgumentError(f"kthvalue: k: expected 1 to {x.shape[axis]}, the dimension's size, got {k!r}")
    found = [narrow(each, axis, k - 1, 1) for each in sort(x, axis)]
    return Ordered(*found) if keepdims else Ordered(*[reshape(e, e.shape[:at] + e.shape[at + 1 :]) for e in found])


def quantile(x: Tensor, q: float, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return a quantile of all elements or along a dimension, between two of them by their distance; x: float32."""
    if not 0 <= q <= 1:
        raise ArgumentError(f"quantile: q: expected a number from 0 to 1, got {q!r}")
    own = reshape(x, (-1,)) if axis is None else x
    at = 0 if axis is None else dimension_of("quantile", x.shape, axis)
    place = q * (own.shape[at] - 1)
    order, below = sort(own, at).values, int(place)
    low, high, last = (narrow(order, at, n, 1) for n in (below, math.ceil(place), own.shape[at] - 1))
    found = where(last != last, last, lerp(low, high, place - below))  # NaN is the last one
    if axis is None:
        return reshape(found, (1,) * x.ndim if keepdims else ())
    return found if keepdims else reshape(found, found.shape[:at] + found.shape[at + 1 :])
