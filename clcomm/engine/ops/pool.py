"""Max and average pooling over windows of N C H W images, and average pooling to a given size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.arrangement import padded
from clcomm.engine.ops.elementwise import mul
from clcomm.engine.ops.reduce import mean
from clcomm.engine.tensor import INT32, Shape, Tensor, empty, float_tensor, wrap

#: height, width, out_height, out_width, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w: as in pool.cl
Window = tuple[int, int, int, int, int, int, int, int, int, int]


class MaxPool2dOp(Op):
    """The largest element of each window."""

    @classmethod
    def shape_of_none(cls, x: Tensor, *, window: Window) -> Shape | None:
        return None if x.shape[0] else _out_shape(x, window)

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, window: Window) -> Tensor:
        """Queue the maxima; their places are kept for backward."""
        device, shape = x.device, _out_shape(x, window)
        y, places = empty(device, shape), empty(device, shape, INT32)
        rows = y.numel() // window[3]
        grid, count = (device.row_grid(rows, window[3]), rows) if device.is_cpu else (device.grid(y.numel()), y.numel())
        device.launch(device.kernel("pool", "max_pool"), *grid, x, y, places, count, *window)
        ctx.window = window
        ctx.save(places)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Queue dx: each gradient is added at the place of its window's maximum."""
        (places,) = ctx.saved
        dx = ctx.out(0)
        _launch_gradient("max_pool_gradient", (grad, places), dx, ctx.window)
        return (dx,)


class AvgPool2dOp(Op):
    """The mean of each window, padding counted as zeros."""

    is_linear = True

    @classmethod
    def shape_of_none(cls, x: Tensor, *, window: Window) -> Shape | None:
        return None if x.shape[0] else _out_shape(x, window)

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, window: Window) -> Tensor:
        device = x.device
        y = empty(device, _out_shape(x, window))
        device.launch(device.kernel("pool", "average_pool"), *device.grid(y.numel()), x, y, y.numel(), *window)
        ctx.window = window
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Queue dx: each gradient is divided evenly over its window."""
        dx = ctx.out(0)
        _launch_gradient("average_pool_gradient", (grad,), dx, ctx.window)
        return (dx,)


class AdaptiveAvgPool2dOp(Op):
    """The means of windows that cover the image in `size` rows and columns."""

    is_linear = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, size: tuple[int, int]) -> Tensor:
        device, y = x.device, empty(x.device, (*x.shape[:2], *size))
        ctx.sizes = (x.shape[0] * x.shape[1], *x.shape[2:], *size)
        device.launch(device.kernel("pool", "adaptive_average_pool"), *device.grid(y.numel()), y, x, *ctx.sizes)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx = ctx.out(0)
        kernel = dx.device.kernel("pool", "adaptive_average_pool_gradient")
        dx.device.launch(kernel, *dx.device.grid(dx.numel()), dx, grad, *ctx.sizes)
        return (dx,)


def max_pool2d(
    x: Tensor,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    dilation: int = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """Return the maxima of the windows of x: [N, C, out_h, out_w].

    The result has (size + 2 * padding - kernel) // stride + 1 rows and columns, rounded up with
    `ceil_mode`. The maximum of a window that holds NaN is NaN.

    Args:
        x: float32 [N, C, H, W].
        kernel_size: of a window: one number, or (rows, columns).
        stride: from window to window, likewise; None: the kernel size.
        padding: likewise, at most half of the kernel size.
        dilation: 1.
        ceil_mode: whether there are windows that begin inside and end behind x and its padding.

    Raises:
        ArgumentError: sizes that do not fit, another dilation.
    """
    if dilation not in (1, (1, 1)):
        raise ArgumentError(f"max_pool2d: dilation: expected 1, as windows have no gaps here, got {dilation!r}")
    window = _window("max_pool2d", x, kernel_size, stride, padding)
    if ceil_mode and any(_behind(window)):
        x = padded(x, [(0, 0), (0, 0), *((0, more) for more in _behind(window))], -math.inf)
        window = _window("max_pool2d", x, kernel_size, stride, padding)
    return MaxPool2dOp.apply(x, window=window)


def avg_pool2d(
    x: Tensor,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Return the means of the windows of x [N, C, H, W]; sizes as for max_pool2d.

    x: float32 [N, C, H, W]; the result is [N, C, out_h, out_w]. Padding counts as zeros, with `count_include_pad`
    False not at all; sums are divided by `divisor_override` where it is given.
    """
    window = _window("avg_pool2d", x, kernel_size, stride, padding)
    more = _behind(window) if ceil_mode else (0, 0)
    if not any(more) and count_include_pad and divisor_override is None:
        return AvgPool2dOp.apply(x, window=window)
    sizes, kernel, strides, pads = x.shape[2:], window[4:6], window[6:8], window[8:10]
    around = padded(x, [(0, 0), (0, 0), *((0, each) for each in more)])
    window = _window("avg_pool2d", around, kernel_size, stride, padding)
    counts = []
    for n, length, step, before, results in zip(sizes, kernel, strides, pads, window[2:4], strict=True):
        first = np.arange(results) * step - before
        last = np.minimum(first + length, n + (before if count_include_pad else 0))
        counts.append(last - (first if count_include_pad else np.maximum(first, 0)))
    divisors = np.outer(*counts) if divisor_override is None else np.full(window[2:4], divisor_override)
    factors = np.float32(kernel[0] * kernel[1]) / divisors.astype(np.float32)
    buffer = x.device.keep(("pooled", factors.shape, factors.tobytes()), lambda: factors)
    return mul(AvgPool2dOp.apply(around, window=window), wrap(x.device, buffer, factors.shape))


def _behind(window: Window) -> tuple[int, int]:
    """Return how many rows and columns more than x the windows reach that begin inside x or the padding before it."""
    more = []
    for size, kernel, stride, before in zip(window[:2], window[4:6], window[6:8], window[8:10], strict=True):
        results = -(-(size + 2 * before - kernel) // stride) + 1
        results -= (results - 1) * stride >= size + before
        more.append(max((results - 1) * stride + kernel - (size + 2 * before), 0))
    return more[0], more[1]


def adaptive_avg_pool2d(x: Tensor, output_size: int | tuple[int | None, int | None] | None) -> Tensor:
    """Return the means of windows that cover x [N, C, H, W] in `output_size` rows and columns, as PyTorch's.

    Window i of n in a direction goes from i * size / n, rounded down, to (i + 1) * size / n, rounded up.

    Args:
        x: float32 [N, C, H, W]; the result is [N, C, *output_size].
        output_size: one number, or (rows, columns); None: as many as x has.

    Raises ArgumentError for sizes below 1, and where x has other dimensions.
    """
    size = size_of_parts("adaptive_avg_pool2d", x, output_size)
    if size == (1, 1):
        return mean(x, (2, 3), True)
    kernel = x.shape[2] // size[0], x.shape[3] // size[1]
    if (kernel[0] * size[0], kernel[1] * size[1]) == x.shape[2:]:
        return avg_pool2d(x, kernel)
    return AdaptiveAvgPool2dOp.apply(x, size=size)


def size_of_parts(name: str, x: Tensor, output_size: Any) -> tuple[int, int]:
    """Return the rows and columns of an adaptive pooling's result after checking its arguments."""
    _require_images(name, x)
    given = output_size if isinstance(output_size, (tuple, list)) else (output_size, output_size)
    sizes: Any = tuple([n if own is None else own for own, n in zip(given, x.shape[2:], strict=False)])
    return whole_pair(f"{name}: output_size", sizes if len(given) == 2 else output_size, 1)


def _require_images(name: str, x: Tensor) -> None:
    if float_tensor(f"{name}: x", x).ndim != 4:
        raise ArgumentError(f"{name}: x: expected 4 dimensions (N, C, H, W), got shape {x.shape}")


def _window(
    function: str,
    x: Tensor,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] | None,
    padding: int | tuple[int, int],
) -> Window:
    """Return the sizes of a pooling after checking its arguments."""
    _require_images(function, x)
    kernel = whole_pair(f"{function}: kernel_size", kernel_size, 1)
    strides = kernel if stride is None else whole_pair(f"{function}: stride", stride, 1)
    pads = whole_pair(f"{function}: padding", padding, 0)
    if 2 * pads[0] > kernel[0] or 2 * pads[1] > kernel[1]:
        raise ArgumentError(f"{function}: padding: expected at most half of the kernel {kernel}, got {padding}")
    height, width = x.shape[2:]
    out_h = (height + 2 * pads[0] - kernel[0]) // strides[0] + 1
    out_w = (width + 2 * pads[1] - kernel[1]) // strides[1] + 1
    if out_h < 1 or out_w < 1:
        raise ArgumentError(
            f"{function}: kernel_size: expected a window no larger than the image with its padding, "
            f"{height + 2 * pads[0]} x {width + 2 * pads[1]}, got {kernel[0]} x {kernel[1]}"
        )
    return (height, width, out_h, out_w, *kernel, *strides, *pads)


def whole_pair(name: str, value: int | tuple[int, int], least: int) -> tuple[int, int]:
    """Return (rows, columns) from one whole number or two; raises ArgumentError, naming `name`, below `least`."""
    pair = (value, value) if isinstance(value, int) else value
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        rows, columns = pair
        if isinstance(rows, int) and isinstance(columns, int) and min(rows, columns) >= least:
            return rows, columns
    raise ArgumentError(f"{name}: expected a whole number from {least} up, or two of them, got {value!r}")


def _out_shape(x: Tensor, window: Window) -> Shape:
    return (x.shape[0], x.shape[1], window[2], window[3])


def _launch_gradient(name: str, inputs: tuple[Tensor, ...], dx: Tensor, window: Window) -> None:
    device = dx.device
    plane = window[0] * window[1]
    planes = dx.numel() // plane
    grid = device.row_grid(planes, plane) if device.is_cpu else device.grid(dx.numel())
    device.launch(device.kernel("pool", name), *grid, *inputs, dx, planes, *window)
