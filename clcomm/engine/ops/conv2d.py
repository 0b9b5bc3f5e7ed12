"""Two-dimensional convolution (cross-correlation, as in PyTorch), alone or fused with ReLU and 2 x 2 max-pooling.

N C H W: images, input channels, rows, columns. O: output channels. Kernels are [O, C, kernel_h, kernel_w].
"""

from __future__ import annotations

import math
from typing import Any

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.device import Device
from clcomm.engine.ops import convolution, convolution_products, convolution_winograd
from clcomm.engine.ops.activation import relu
from clcomm.engine.ops.arrangement import padded
from clcomm.engine.ops.blocks import concat, split, take
from clcomm.engine.ops.convolution import Geometry
from clcomm.engine.ops.elementwise import add
from clcomm.engine.ops.matmul import check_bias, same_device
from clcomm.engine.ops.pool import max_pool2d, whole_pair
from clcomm.engine.ops.shape import reshape
from clcomm.engine.tensor import Shape, Tensor, empty, float_tensor


class Conv2dOp(Op):
    """y = conv2d(x, weight) + bias."""

    @classmethod
    def shape_of_none(cls, x: Tensor, weight: Tensor, bias: Tensor | None, *, geometry: Geometry) -> Shape | None:
        return None if x.shape[0] else (0, geometry.groups * geometry.outputs, geometry.out_height, geometry.out_width)

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, *, geometry: Geometry) -> Tensor:
        g = geometry
        y = empty(x.device, (g.images, g.groups * g.outputs, g.out_height, g.out_width))
        ctx.geometry = g
        if convolution_products.suit(g, x.device):
            _products(g, x.device).convolve(g, x, weight, bias, y)
            ctx.save(x if ctx.needs[1] else None, weight)
        else:
            packed = convolution.pack(x)
            convolution.convolve(g, packed, weight, bias, y)
            ctx.save(packed if ctx.needs[1] else None, weight)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Queue dx, dy convolved with the reversed kernel; dw, the correlation of x with dy; and db, the sums of dy."""
        db = ctx.out(2) if ctx.needs[2] else None
        if convolution_products.suit(ctx.geometry, grad.device):
            if db is not None:
                convolution_products.bias_gradient(ctx.geometry, grad, db)
            return *_product_gradients(_products(ctx.geometry, grad.device), ctx, grad, *ctx.saved), db
        packed_grad = convolution.pack_gradient(ctx.geometry, grad, db)
        return *_product_gradients(convolution, ctx, packed_grad, *ctx.saved), db


class ConvTranspose2dOp(Op):
    """The gradient for x of the convolution of `geometry`, as a function of its y."""

    @classmethod
    def shape_of_none(cls, x: Tensor, weight: Tensor, *, geometry: Geometry) -> Shape | None:
        return None if x.shape[0] else (0, geometry.groups * geometry.channels, geometry.height, geometry.width)

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, *, geometry: Geometry) -> Tensor:
        """Queue x convolved with the reversed kernel, spread out by the stride."""
        g = geometry
        y = empty(x.device, (g.images, g.groups * g.channels, g.height, g.width))
        way: Any = _products(g, x.device) if convolution_products.suit(g, x.device) else convolution
        given = convolution.pack_gradient(g, x, None) if way is convolution else x
        way.data_gradient(g, given, weight, y)
        ctx.geometry, ctx.way = g, way
        ctx.save(given if ctx.needs[1] else None, weight)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Queue dx, the convolution of dy; and dw, the correlation of dy with x."""
        given, weight = ctx.saved
        up = convolution.pack(grad) if ctx.way is convolution else grad
        dx = dw = None
        if ctx.needs[1]:
            dw = ctx.out(1)
            ctx.way.weight_gradient(ctx.geometry, up, given, dw)
        if ctx.needs[0]:
            dx = ctx.out(0)
            ctx.way.convolve(ctx.geometry, up, weight, None, dx)
        return dx, dw


class ConvReluPoolOp(Op):
    """y = max_pool2d(relu(conv2d(x, weight) + bias), 2)."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, *, geometry: Geometry) -> Tensor:
        """Queue all three in one kernel, which keeps the place of each maximum."""
        g = geometry
        packed = convolution.pack(x)
        y = empty(x.device, (g.images, g.outputs, g.out_height // 2, g.out_width // 2))
        places = convolution.convolve_relu_pool(g, packed, weight, bias, y)
        ctx.geometry = g
        ctx.save(packed if ctx.needs[1] else None, weight, places)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Queue the unpooling of dy to the places of the maxima, then the gradients as in Conv2dOp.

        Where dx is not needed and rows of dy fit into local memory, the weight gradient's kernel unpools them there.
        """
        g: Geometry = ctx.geometry
        packed, weight, places = ctx.saved
        db = ctx.out(2) if ctx.needs[2] else None
        if ctx.needs[0] or not convolution.can_unpool_locally(g):
            packed_grad = convolution.unpool_gradient(g, grad, places, db)
            return *_product_gradients(convolution, ctx, packed_grad, packed, weight), db
        packed_grad = convolution.pack_pooled_gradient(g, grad, places, db)
        dw = None
        if ctx.needs[1]:
            dw = ctx.out(1)
            convolution.weight_gradient(g, packed, packed_grad, dw, places)
        return None, dw, db


def _products(g: Geometry, device: Device) -> Any:
    return convolution_winograd if convolution_winograd.suit(g, device) else convolution_products


def _product_gradients(way: Any, ctx: Context, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
    """Return dx and dw, None where not needed, computed from dy and x by this module of kernels."""
    dx = dw = None
    if ctx.needs[1]:
        dw = ctx.out(1)
        way.weight_gradient(ctx.geometry, x, grad, dw)
    if ctx.needs[0]:
        dx = ctx.out(0)
        way.data_gradient(ctx.geometry, grad, weight, dx)
    return dx, dw


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> Tensor:
    """Return the convolution of x with weight, plus bias: [N, O, rows, columns].

    The result has (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 rows and columns. Padding is left
    out of the sums, so that a weight of Inf or NaN does not make the borders NaN. Where an output's gradient has one,
    all of its weights' gradients may be NaN.

    Args:
        x: float32 [N, C, H, W].
        weight: float32 [O, C / groups, kernel_h, kernel_w].
        bias: float32 [O], or None.
        stride: one number, or (rows, columns); of two different ones, results between them are left out.
        padding: one number, or (rows, columns); "valid": none; "same": as many results as pixels, of a stride of 1.
        dilation: pixels from a tap of the kernel to the next, likewise.
        groups: divides input and output channels into so many groups; outputs see the channels of their own.
            Where groups are large enough for matrix products, they are computed one after the other.

    Raises:
        ArgumentError: shapes do not fit, or the kernel exceeds the padded image.
    """
    if isinstance(padding, str):
        x, padding = _same(x, weight, stride, padding, dilation)
    pair = whole_pair("conv2d: stride", stride, 1)
    step = math.gcd(*pair)
    if pair != (step, step):
        y = conv2d(x, weight, bias, step, padding, dilation, groups)
        return take(y, (..., slice(None, None, pair[0] // step), slice(None, None, pair[1] // step)))
    geometry = _checked("conv2d", x, weight, bias, step, padding, dilation, groups)
    if groups > 1 and convolution_products.suit(geometry._replace(groups=1), x.device):
        return _group_by_group(x, weight, bias, geometry)
    return Conv2dOp.apply(x, weight, bias, geometry=geometry)


def _same(
    x: Tensor, weight: Tensor, stride: int | tuple[int, int], padding: str, dilation: int | tuple[int, int]
) -> tuple[Tensor, tuple[int, int]]:
    """Return x and its padding; where that is uneven, x has one row or column more at the end."""
    if padding not in ("same", "valid") or (padding == "same" and stride not in (1, (1, 1))):
        raise ArgumentError(
            f"conv2d: padding: expected numbers, 'valid', or 'same' with a stride of 1, got {padding!r} with {stride!r}"
        )
    if padding == "valid":
        return x, (0, 0)
    apart = whole_pair("conv2d: dilation", dilation, 1)
    around = [step * (kernel - 1) for step, kernel in zip(apart, weight.shape[2:], strict=True)]
    return padded(x, [(0, 0), (0, 0), *((0, each % 2) for each in around)]), (around[0] // 2, around[1] // 2)


def _group_by_group(x: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry) -> Tensor:
    xs, weights = split(x, g.channels, 1), split(weight, g.outputs)
    biases = (None,) * g.groups if bias is None else split(bias, g.outputs)
    parts = zip(xs, weights, biases, strict=True)
    return concat([Conv2dOp.apply(*part, geometry=g._replace(groups=1)) for part in parts], 1)


def _with_zeros_between(x: Tensor, steps: tuple[int, int]) -> Tensor:
    """Return x [N, C, H, W] with its rows and columns `steps` apart, and zeros between them."""
    n, channels, height, width = x.shape
    apart = padded(
        reshape(x, (n, channels, height, 1, width, 1)), [(0, 0)] * 3 + [(0, steps[0] - 1), (0, 0), (0, steps[1] - 1)]
    )
    whole = reshape(apart, (n, channels, height * steps[0], width * steps[1]))
    return take(whole, (..., slice((height - 1) * steps[0] + 1), slice((width - 1) * steps[1] + 1)))


def conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    output_padding: int | tuple[int, int] = 0,
    groups: int = 1,
    dilation: int | tuple[int, int] = 1,
) -> Tensor:
    """Return the transposed convolution of x with weight, plus bias: the gradient of conv2d for its x.

    The result is [N, O, rows, columns], with (size - 1) * stride - 2 * padding + dilation * (kernel - 1) +
    output_padding + 1 rows and columns.

    Args:
        x: float32 [N, C, H, W].
        weight: float32 [C, O / groups, kernel_h, kernel_w].
        bias: float32 [O], or None.
        stride: one number, or (rows, columns); of two different ones, zeros between x's elements stand for them.
        padding: one number, or (rows, columns).
        output_padding: further rows and columns at the end, likewise; below the stride or the dilation.
        groups: divides input and output channels into so many groups; outputs see the channels of their own.
        dilation: pixels from a tap of the kernel to the next: one number, or (rows, columns).

    Raises:
        ArgumentError: shapes do not fit, or nothing is left.
    """
    name = "conv_transpose2d"
    _check_groups(name, groups)
    float_tensor(f"{name}: x", x)
    float_tensor(f"{name}: weight", weight)
    if x.ndim != 4 or weight.ndim != 4 or x.shape[1] != weight.shape[0] or x.shape[1] % groups:
        raise ArgumentError(
            f"{name}: expected x [N, C, H, W] and weight [C, O / groups, kernel_h, kernel_w], C divided by {groups}, "
            f"got shapes {x.shape} and {weight.shape}"
        )
    steps = whole_pair(f"{name}: stride", stride, 1)
    pads, more = whole_pair(f"{name}: padding", padding, 0), whole_pair(f"{name}: output_padding", output_padding, 0)
    apart = whole_pair(f"{name}: dilation", dilation, 1)
    if any(added >= max(step, reach) for added, step, reach in zip(more, steps, apart, strict=True)):
        raise ArgumentError(
            f"{name}: output_padding: expected less than the stride {stride} or the dilation {dilation}, got "
            f"{output_padding!r}"
        )
    stride = steps[0]
    if steps[0] != steps[1]:
        x, stride = _with_zeros_between(x, steps), 1
    height, width = (
        (size - 1) * stride - 2 * side + step * (kernel - 1) + added + 1
        for size, side, step, kernel, added in zip(x.shape[2:], pads, apart, weight.shape[2:], more, strict=True)
    )
    if min(height, width) < 1:
        raise ArgumentError(f"{name}: padding: expected to leave rows and columns, got {height} x {width}")
    check_bias(name, bias, groups * weight.shape[1])
    same_device(name, x, weight, bias)
    # More rows than a stride at the end are those of further zeros in x.
    x = padded(x, [(0, 0), (0, 0), *((0, added // stride) for added in more)])
    kernel_h, kernel_w = weight.shape[2:]
    geometry = Geometry(
        x.shape[0],
        weight.shape[1],
        height,
        width,
        x.shape[1] // groups,
        kernel_h,
        kernel_w,
        stride,
        *pads,
        *apart,
        groups,
    )
    y = ConvTranspose2dOp.apply(x, weight, geometry=geometry)
    return y if bias is None else add(y, reshape(bias, (bias.numel(), 1, 1)))


def conv_relu_pool(x: Tensor, weight: Tensor, bias: Tensor | None = None, padding: int | tuple[int, int] = 0) -> Tensor:
    """Return max_pool2d(relu(conv2d(x, weight, bias, padding=padding)), 2), in one kernel where possible.

    x: float32 [N, C, H, W]; weight: float32 [O, C, kernel_h, kernel_w]; the result has half as many rows and columns as
    conv2d's, rounded down.

    That is on a CPU if the convolution keeps the width, see `can_fuse_pool`, and is not computed as products. Arguments
    and errors are those of conv2d and max_pool2d.
    """
    geometry = _checked("conv_relu_pool", x, weight, bias, 1, padding)
    if convolution.can_fuse_pool(geometry, x.device) and not convolution_products.suit(geometry, x.device):
        return ConvReluPoolOp.apply(x, weight, bias, geometry=geometry)
    return max_pool2d(relu(Conv2dOp.apply(x, weight, bias, geometry=geometry)), 2)


def _checked(
    function: str, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int | tuple[int, int],
    dilation: int | tuple[int, int] = 1, groups: int = 1,
) -> Geometry:  # fmt: skip
    """Return the sizes of a convolution after checking its arguments."""
    float_tensor(f"{function}: x", x)
    float_tensor(f"{function}: weight", weight)
    geometry = _geometry(function, x.shape, weight.shape, stride, padding, dilation, groups)
    check_bias(function, bias, groups * geometry.outputs)
    same_device(function, x, weight, bias)
    return geometry


def _geometry(
    function: str, x: Shape, weight: Shape, stride: int, padding: int | tuple[int, int],
    dilation: int | tuple[int, int], groups: int,
) -> Geometry:  # fmt: skip
    _check_groups(function, groups)
    if len(x) != 4:
        raise ArgumentError(f"{function}: x: expected 4 dimensions (N, C, H, W), got shape {x}")
    if len(weight) != 4:
        raise ArgumentError(f"{function}: weight: expected 4 dimensions (O, C, kernel_h, kernel_w), got shape {weight}")
    if groups > 1 and (x[1] != groups * weight[1] or weight[0] % groups):
        raise ArgumentError(
            f"{function}: groups: expected x [N, C, H, W] and weight [O, C / {groups}, kernel_h, kernel_w], O divided "
            f"by {groups}, got shapes {x} and {weight}"
        )
    if x[1] != groups * weight[1]:
        raise ArgumentError(f"{function}: x: expected {weight[1]} channels, as weight {weight} has, got shape {x}")
    _check_stride(function, stride)
    pads, apart = whole_pair(f"{function}: padding", padding, 0), whole_pair(f"{function}: dilation", dilation, 1)
    sizes = weight[1], x[2], x[3], weight[0] // groups, weight[2], weight[3]
    geometry = Geometry(x[0], *sizes, stride, *pads, *apart, groups)
    if geometry.out_height < 1 or geometry.out_width < 1:
        raise ArgumentError(
            f"{function}: weight: expected a kernel no larger than the image with its padding, {x[2] + 2 * pads[0]} x "
            f"{x[3] + 2 * pads[1]}, got {geometry.reach_h} x {geometry.reach_w}"
        )
    return geometry


def _check_groups(function: str, groups: int) -> None:
    if not isinstance(groups, int) or groups < 1:
        raise ArgumentError(f"{function}: groups: expected a whole number from 1 up, got {groups!r}")


def _check_stride(function: str, stride: int) -> None:
    if not isinstance(stride, int) or stride < 1:
        raise ArgumentError(f"{function}: stride: expected a whole number from 1 up, got {stride!r}")
