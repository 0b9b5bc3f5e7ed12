"""Extremes, sorting, and running sums along a dimension, as PyTorch's: results of two parts are (values, indices)."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.blocks import split, take
from clcomm.engine.ops.comparisons import equal_to, logical_or, masked_fill, not_equal_to, to_bool, to_int, where
from clcomm.engine.ops.elements import elements
from clcomm.engine.ops.elementwise import mul
from clcomm.engine.ops.functions import abs, maximum, minimum, pow, square
from clcomm.engine.ops.indexing import gather
from clcomm.engine.ops.norms import var
from clcomm.engine.ops.reduce import mean, reduced, sum
from clcomm.engine.ops.shape import reshape
from clcomm.engine.ops.types import dimension_of, is_whole, on_host, to_float
from clcomm.engine.tensor import INT32, Tensor, empty, float_tensor, whole_rows

#: With a gradient of 0 at 0, as that of PyTorch's norm and std.
Root = elements("root", ("x",), (), "sqrt(x)", "0 if y == 0 else g * 0.5 / y")
#: MOST_FIRST of kernels/ordered.cl: so many elements are chosen without sorting the rest.
_MOST_FIRST = 64


class Ordered(NamedTuple):
    """The values, which gradients pass through, and their int32 indices along the dimension."""

    values: Tensor
    indices: Tensor


def _along(name: str, x: Tensor, axis: int, *, takes_none: bool = False) -> tuple[int, int, int, int]:
    """Return the dimension, and x's sizes before, along and behind it."""
    whole_rows(name, float_tensor(name, x))
    at = dimension_of(name, x.shape, axis)
    if 0 in x.shape and not takes_none:
        raise ArgumentError(f"{name}: expected one element or more, got a tensor of shape {x.shape}")
    return at, math.prod(x.shape[:at]), x.shape[at], math.prod(x.shape[at + 1 :])


def _extreme(name: str, x: Tensor, axis: int, sign: float) -> Tensor:
    """Return the indices of the largest elements, of sign 1, or the smallest, of -1; the dimension stays, as 1."""
    at, outer, length, inner = _along(name, x, axis)
    out, device = empty(x.device, (*x.shape[:at], 1, *x.shape[at + 1 :]), INT32), x.device
    device.launch(device.kernel("ordered", "extreme"), *device.grid(out.numel()), out, x, sign, outer, length, inner)
    return out


def _without(x: Tensor, axis: int, keepdims: bool) -> Tensor:
    at = axis % x.ndim
    return x if keepdims else reshape(x, (*x.shape[:at], *x.shape[at + 1 :]))


def _all_of(x: Tensor, result: Tensor, keepdims: bool) -> Tensor:
    """Return the result over all dimensions of x, with them if `keepdims`."""
    return reshape(result, (1,) * x.ndim) if keepdims else result


class Extreme(Op):
    """The largest element, of sign 1, the smallest, of -1, or the median, of 0; equal ones share its gradient.

    Over all dimensions, or over `axes`, which stay, as 1, and of which there is no median.
    """

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, *, sign: float, axes: tuple[int, ...] | None = None, of_nan: bool = True
    ) -> Tensor:
        result, ctx.of_nan = x.detach(), of_nan
        if axes is None:
            line = result.alias((x.numel(),))
            result = gather(line, 0, _extreme("max", line, 0, sign) if sign else _middle(line, 0)).alias(())
        for axis in axes or ():
            result = gather(result, axis, _extreme("max", result, axis, sign))
        ctx.axes = axes
        ctx.save(x, result)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, result = ctx.saved
        x = x.detach()
        shares = equal_to(x, result.detach())
        shares = to_float(logical_or(shares, x != x) if ctx.of_nan else shares)
        return (mul(shares, grad.detach() / sum(shares, ctx.axes, ctx.axes is not None)),)


def extreme_over(name: str, x: Tensor, axis: Any, keepdims: bool, sign: float, of_nan: bool = False) -> Tensor:
    """Return the largest element over dimensions, or of sign -1 the smallest; equal ones share its gradient.

    of_nan: where it is NaN, all that are share it, else the gradient is NaN, as PyTorch's.
    """
    if is_whole(x):
        return on_host(np.max if sign > 0 else np.min, x, axis, keepdims)
    axes, shape = reduced(name, x, axis, keepdims)
    return reshape(Extreme.apply(x, sign=sign, axes=axes, of_nan=of_nan), shape)


def max(x: Tensor, axis: int | Tensor | None = None, keepdims: bool = False) -> Tensor | Ordered:
    """Return the largest element, or along a dimension (values, indices), of equal ones the first; NaN is larger.

    x: float32 of any shape. With a tensor in place of `axis`, `maximum` of both.
    """
    return _reduced("max", x, axis, keepdims, 1.0)


def min(x: Tensor, axis: int | Tensor | None = None, keepdims: bool = False) -> Tensor | Ordered:
    """Return the smallest element, or along a dimension (values, indices), of equal ones the first; NaN is smaller.

    x: float32 of any shape. With a tensor in place of `axis`, `minimum` of both.
    """
    return _reduced("min", x, axis, keepdims, -1.0)


def _reduced(name: str, x: Tensor, axis: int | Tensor | None, keepdims: bool, sign: float) -> Tensor | Ordered:
    if isinstance(axis, Tensor):
        if keepdims:
            raise ArgumentError(f"{name}: expected a dimension with keepdim, got a tensor")
        return (maximum if sign > 0 else minimum)(x, axis)
    if is_whole(x) and axis is None:
        return on_host(np.max if sign > 0 else np.min, x, None, keepdims)
    if axis is None:
        whole_rows(name, float_tensor(name, x))
        return _all_of(x, Extreme.apply(x, sign=sign), keepdims)
    if is_whole(x):
        parts = (np.max, np.argmax) if sign > 0 else (np.min, np.argmin)
        return Ordered(*[on_host(each, x, axis, keepdims) for each in parts])
    indices = _extreme(name, x, axis, sign)
    values = gather(x, axis, indices)
    return Ordered(_without(values, axis, keepdims), _without(indices, axis, keepdims))


def median(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor | Ordered:
    """Return the median of all elements, or along a dimension (values, indices); of two the lower, NaN if there is one.

    x: float32 of any shape.
    """
    if axis is None:
        if keepdims:
            raise ArgumentError("median: keepdim: expected a dimension with it, got none")
        whole_rows("median", float_tensor("median", x))
        return Extreme.apply(x, sign=0.0)
    indices = _middle(x, axis)
    return Ordered(_without(gather(x, axis, indices), axis, keepdims), _without(indices, axis, keepdims))


def _middle(x: Tensor, axis: int) -> Tensor:
    """Return the indices of the medians; the dimension stays, as 1."""
    at, _, length, _ = _along("median", x, axis)
    if length > 1 << 24:  # float32 has the indices exactly up to 2^24
        raise ArgumentError(f"median: expected a dimension of at most 2^24 elements, got {length}")
    middle = take(to_float(argsort(x, at)), (slice(None),) * at + (slice((length - 1) // 2, (length + 1) // 2),))
    first = _extreme("median", x, at, 1.0)  # of several NaN
    greatest = gather(x.detach(), at, first)
    return to_int(where(not_equal_to(greatest, greatest), to_float(first), middle))


def any(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return whether any element is not 0, of all or along a dimension; x: of any type and shape."""
    if axis is None and 0 in x.shape:
        return _all_of(x, Tensor(False, x.device), keepdims)
    return to_bool(_value(max(to_float(to_bool(x)), axis, keepdims)))


def all(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return whether no element is 0, of all or along a dimension; x: of any type and shape."""
    if axis is None and 0 in x.shape:
        return _all_of(x, Tensor(True, x.device), keepdims)
    return to_bool(_value(min(to_float(to_bool(x)), axis, keepdims)))


def _value(found: Tensor | Ordered) -> Tensor:
    return found.values if isinstance(found, Ordered) else found


def argmax(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the int32 index of the largest element along a dimension, or of all; the first of equals, and of NaN.

    x: float32 of any shape.
    """
    return _index("argmax", x, axis, keepdims, 1.0)


def argmin(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the int32 index of the smallest element along a dimension, or of all; the first of equals, and of NaN.

    x: float32 of any shape.
    """
    return _index("argmin", x, axis, keepdims, -1.0)


def _index(name: str, x: Tensor, axis: int | None, keepdims: bool, sign: float) -> Tensor:
    if is_whole(x):
        return on_host(np.argmax if sign > 0 else np.argmin, x, axis, keepdims)
    if axis is None:
        whole_rows(name, float_tensor(name, x))
        line = x.detach().alias((x.numel(),))
        return _extreme(name, line, 0, sign).alias((1,) * x.ndim if keepdims else ())
    return _without(_extreme(name, x, axis, sign), axis, keepdims)


def argsort(x: Tensor, axis: int = -1, descending: bool = False) -> Tensor:
    """Return the int32 indices that sort x along a dimension, equal elements in their order, NaN as the largest.

    x: float32 of any shape, which the result has too.
    """
    _, outer, length, inner = _along("argsort", x, axis, takes_none=True)
    device, sign = x.device, -1.0 if descending else 1.0
    out, scratch = empty(device, x.shape, INT32), empty(device, (4 * x.numel(),), INT32)
    if not x.numel():
        return out
    kernel = device.kernel("ordered", "sorted")
    device.launch(kernel, *device.grid(outer * inner), out, scratch, x, sign, outer, length, inner)
    return out


def sort(x: Tensor, axis: int = -1, descending: bool = False, *, stable: bool = True) -> Ordered:
    """Return x sorted along a dimension and the indices of its elements, as `argsort` has them.

    x: float32 of any shape, or integers, which are sorted on the host. stable: it always is.
    """
    if is_whole(x):
        values = -x.numpy().astype(np.int64) if descending else x.numpy()
        order = np.argsort(values, axis, kind="stable")
        return Ordered(*[Tensor(e, x.device) for e in (np.take_along_axis(x.numpy(), order, axis), order)])
    indices = argsort(x, axis, descending)
    return Ordered(gather(x, axis, indices), indices)


def topk(x: Tensor, k: int, axis: int = -1, largest: bool = True, sorted: bool = True) -> Ordered:
    """Return the k largest elements along a dimension, or the smallest, the first of them first, and their indices.

    x: float32 of any shape. sorted: they always are. Raises ArgumentError for more than the dimension has.
    """
    at, outer, length, inner = _along("topk", x, axis)
    if not 1 <= k <= length:
        raise ArgumentError(f"topk: k: expected 1 to {length}, the dimension's size, got {k!r}")
    if k > _MOST_FIRST:
        order = take(argsort(x, at, descending=largest), (slice(None),) * at + (slice(k),))
    else:
        device, order = x.device, empty(x.device, (*x.shape[:at], k, *x.shape[at + 1 :]), INT32)
        kernel, sign = device.kernel("ordered", "first"), -1.0 if largest else 1.0
        device.launch(kernel, *device.grid(outer * inner), order, x, sign, k, outer, length, inner)
    return Ordered(gather(x, at, order), order)


class Running(Op):
    """The sums of all elements up to each along a dimension."""

    is_linear = True
    keeps_shape = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, sizes: tuple[int, int, int]) -> Tensor:
        ctx.sizes = sizes
        return _running(x, sizes, 0, empty(x.device, x.shape))

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_running(grad, ctx.sizes, 1, ctx.out(0)),)


def _running(x: Tensor, sizes: tuple[int, int, int], from_end: int, out: Tensor) -> Tensor:
    outer, length, inner = sizes
    kernel = x.device.kernel("ordered", "running")
    x.device.launch(kernel, *x.device.grid(outer * inner), out, x, from_end, outer, length, inner)
    return out


def cumsum(x: Tensor, axis: int) -> Tensor:
    """Return the sums of all elements up to each along a dimension; x: float32 or integers, of the result's shape."""
    if is_whole(x):
        return on_host(lambda values, axis, keepdims: np.cumsum(values, axis, np.int64), x, axis, False)
    return Running.apply(x, sizes=_along("cumsum", x, axis, takes_none=True)[1:])


class Product(Op):
    """The product along a dimension, which stays, as 1."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, at: int, sizes: tuple[int, int, int]) -> Tensor:
        ctx.sizes, (outer, length, inner) = sizes, sizes
        ctx.save(x)
        out, device = empty(x.device, (*x.shape[:at], 1, *x.shape[at + 1 :])), x.device
        device.launch(device.kernel("ordered", "product"), *device.grid(out.numel()), out, x, outer, length, inner)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (outer, length, inner), dx = ctx.saved, ctx.sizes, ctx.out(0)
        kernel = x.device.kernel("ordered", "product_grad")
        x.device.launch(kernel, *x.device.grid(outer * inner), dx, grad, x, outer, length, inner)
        return (dx,)


def prod(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the product of all elements, or along a dimension, which `keepdims` keeps with size 1.

    x: float32 of any shape; of all dimensions the result has the shape ().
    """
    if axis is None:
        return _all_of(x, prod(reshape(float_tensor("prod", x), (x.numel(),)), 0), keepdims)
    at, *sizes = _along("prod", x, axis)
    return _without(Product.apply(x, at=at, sizes=tuple(sizes)), axis, keepdims)


def std(
    x: Tensor,
    axis: int | tuple[int, ...] | None = None,
    unbiased: bool = True,
    keepdims: bool = False,
    *,
    correction: int = 1,
) -> Tensor:
    """Return the square root of `var`, of the same arguments."""
    return Root.apply(var(x, axis, unbiased, keepdims, correction=correction))


def var_mean(
    x: Tensor, axis: int | tuple[int, ...] | None = None, unbiased: bool = True, keepdims: bool = False, *,
    correction: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `var` and `mean`, of the same arguments."""
    return var(x, axis, unbiased, keepdims, correction=correction), mean(x, axis, keepdims)


def std_mean(
    x: Tensor, axis: int | tuple[int, ...] | None = None, unbiased: bool = True, keepdims: bool = False, *,
    correction: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `std` and `mean`, of the same arguments."""
    return std(x, axis, unbiased, keepdims, correction=correction), mean(x, axis, keepdims)


def norm(x: Tensor, p: float | str = 2, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    """Return the norm of order p of all elements, or over dimensions; the gradient at 0 is 0.

    x: float32 of any shape; p: a number, infinity included, or "fro", which is 2.
    """
    float_tensor("norm", x)
    if p in (2, "fro"):
        return Root.apply(sum(square(x), axis, keepdims))
    if p == 1:
        return sum(abs(x), axis, keepdims)
    if p in (math.inf, -math.inf):
        return extreme_over("norm", abs(x), axis, keepdims, math.copysign(1.0, p), True)
    if p == 0:
        return sum(masked_fill(mul(x, 0.0), x != 0.0, 1.0), axis, keepdims)
    if not isinstance(p, Real):
        raise ArgumentError(f"norm: p: expected a number or 'fro', got {p!r}")
    # No gradient passes where an element, or all of them, are 0: slopes of powers may be infinite there.
    powers = sum(pow(masked_fill(abs(x), x == 0.0, 0.0), float(p)), axis, keepdims)
    is_zero = powers == 0.0
    return masked_fill(pow(masked_fill(powers, is_zero, 1.0), 1.0 / float(p)), is_zero, 0.0)


def chunk(x: Tensor, chunks: int, axis: int = 0) -> tuple[Tensor, ...]:
    """Return at most `chunks` parts along a dimension, of equal size but the last; x: of any type and shape."""
    length = x.shape[dimension_of("chunk", x.shape, axis)]
    if chunks < 1:
        raise ArgumentError(f"chunk: chunks: expected 1 or more, got {chunks!r}")
    return split(x, -(-length // chunks) if length else [0] * chunks, axis)
