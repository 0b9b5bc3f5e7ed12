"""Two-dimensional convolution (cross-correlation, as in PyTorch), alone or fused with ReLU and 2 x 2 max-pooling.

N C H W: images, input channels, rows, columns. O: output channels. Kernels are [O, C, kernel_h, kernel_w].
"""

from __future__ import annotations

from typing import Any

from clcomm.engine.autograd import Op
from clcomm.engine.ops import convolution, convolution_products
from clcomm.engine.ops.activation import relu
from clcomm.engine.ops.convolution import Geometry
from clcomm.engine.ops.matmul import check_bias, same_device
from clcomm.engine.ops.pool import max_pool2d, whole_pair
from clcomm.engine.tensor import Shape, Tensor, empty, float_tensor
from clcomm.errors import ArgumentError


class Conv2dOp(Op):
    """y = conv2d(x, weight) + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *, geometry: Geometry) -> Tensor:
        """Queue the convolution."""
        g = geometry
        y = empty(x.device, (g.images, g.outputs, g.out_height, g.out_width))
        ctx.geometry = g
        if convolution_products.suit(g, x.device):
            convolution_products.convolve(g, x, weight, bias, y)
            ctx.save(x if ctx.needs[1] else None, weight)
        else:
            packed = convolution.pack(x)
            convolution.convolve(g, packed, weight, bias, y)
            ctx.save(packed if ctx.needs[1] else None, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Queue dx, dy convolved with the reversed kernel; dw, the correlation of x with dy; and db, the sums of dy."""
        db = ctx.out(2) if ctx.needs[2] else None
        if convolution_products.suit(ctx.geometry, grad.device):
            if db is not None:
                convolution_products.bias_gradient(ctx.geometry, grad, db)
            return *_product_gradients(convolution_products, ctx, grad, *ctx.saved), db
        packed_grad = convolution.pack_gradient(ctx.geometry, grad, db)
        return *_product_gradients(convolution, ctx, packed_grad, *ctx.saved), db


class ConvReluPoolOp(Op):
    """y = max_pool2d(relu(conv2d(x, weight) + bias), 2)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *, geometry: Geometry) -> Tensor:
        """Queue all three in one kernel, which keeps the place of each maximum."""
        g = geometry
        packed = convolution.pack(x)
        y = empty(x.device, (g.images, g.outputs, g.out_height // 2, g.out_width // 2))
        places = convolution.convolve_relu_pool(g, packed, weight, bias, y)
        ctx.geometry = g
        ctx.save(packed if ctx.needs[1] else None, weight, places)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
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


def _product_gradients(way: Any, ctx: Any, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
    """Return dx and dw, None where not needed, from dy and x as this way of computing, a module, has them."""
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
    stride: int = 1,
    padding: int | tuple[int, int] = 0,
) -> Tensor:
    """Return the convolution of x with weight, plus bias.

    The result has (size + 2 * padding - kernel) // stride + 1 rows and columns. Padding is left out of the sums, so
    that a weight of Inf or NaN does not make the borders NaN.

    Args:
        x: [N, C, H, W].
        weight: [O, C, kernel_h, kernel_w].
        bias: [O], or None.
        stride: one number for both directions.
        padding: one number, or (rows, columns).

    Raises:
        ArgumentError: shapes do not fit, or the kernel exceeds the padded image.
    """
    geometry = _checked("conv2d", x, weight, bias, stride, padding)
    return Conv2dOp.apply(x, weight, bias, geometry=geometry)


def conv_relu_pool(x: Tensor, weight: Tensor, bias: Tensor | None = None, padding: int | tuple[int, int] = 0) -> Tensor:
    """Return max_pool2d(relu(conv2d(x, weight, bias, padding=padding)), 2), in one kernel where possible.

    That is on a CPU if the convolution keeps the width, see `can_fuse_pool`, and is not computed as products. Arguments
    and errors are those of conv2d and max_pool2d.
    """
    geometry = _checked("conv_relu_pool", x, weight, bias, 1, padding)
    if convolution.can_fuse_pool(geometry, x.device) and not convolution_products.suit(geometry, x.device):
        return ConvReluPoolOp.apply(x, weight, bias, geometry=geometry)
    return max_pool2d(relu(Conv2dOp.apply(x, weight, bias, geometry=geometry)), 2)


def _checked(
    function: str, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int | tuple[int, int]
) -> Geometry:
    """Return the sizes of a convolution after checking its arguments."""
    float_tensor(f"{function}: x", x)
    float_tensor(f"{function}: weight", weight)
    geometry = _geometry(function, x.shape, weight.shape, stride, padding)
    check_bias(function, bias, geometry.outputs)
    same_device(function, x, weight, bias)
    return geometry


def _geometry(function: str, x: Shape, weight: Shape, stride: int, padding: int | tuple[int, int]) -> Geometry:
    if len(x) != 4:
        raise ArgumentError(f"{function}: x: expected 4 dimensions (N, C, H, W), got shape {x}")
    if len(weight) != 4:
        raise ArgumentError(f"{function}: weight: expected 4 dimensions (O, C, kernel_h, kernel_w), got shape {weight}")
    if x[1] != weight[1]:
        raise ArgumentError(f"{function}: x: expected {weight[1]} channels, as weight {weight} has, got shape {x}")
    if not isinstance(stride, int) or stride < 1:
        raise ArgumentError(f"{function}: stride: expected a whole number from 1 up, got {stride!r}")
    pads = whole_pair(f"{function}: padding", padding, 0)
    geometry = Geometry(x[0], x[1], x[2], x[3], weight[0], weight[2], weight[3], stride, *pads)
    if geometry.out_height < 1 or geometry.out_width < 1:
        raise ArgumentError(
            f"{function}: weight: expected a kernel no larger than the image with its padding, {x[2] + 2 * pads[0]} x "
            f"{x[3] + 2 * pads[1]}, got {weight[2]} x {weight[3]}"
        )
    return geometry
