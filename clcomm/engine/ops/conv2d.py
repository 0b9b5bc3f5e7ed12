"""Two-dimensional convolution (cross-correlation, as in PyTorch), with data, weight and bias gradients.

N C H W: images, input channels, rows, columns. O: output channels. Kernels are [O, C, kernel_h, kernel_w].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from clcomm.engine.autograd import Op
from clcomm.engine.device import Device
from clcomm.engine.ops.matmul import check_bias, same_device
from clcomm.engine.tensor import Shape, Tensor, empty, float_tensor
from clcomm.errors import ArgumentError

_LANES = 8  # images in a CPU vector, as in conv2d.cl
_TILE_OUTPUTS = 4
_PACK_RUN = 4096  # features that one CPU work-item packs
_CHUNK_IMAGES = 64  # images whose weight gradients are added up by one work-item
_NEAR_CACHE = 24 * 1024  # bytes of a CPU's first-level cache that the weight gradient's rows may fill
_GROUP_OUTPUTS = 8  # outputs that a GPU work-item computes
_GROUP = 64


@dataclass(frozen=True)
class Geometry:
    """Sizes of one convolution, seen from its forward pass."""

    images: int
    channels: int
    height: int
    width: int
    outputs: int
    kernel_h: int
    kernel_w: int
    stride: int
    pad_h: int
    pad_w: int

    @property
    def out_height(self) -> int:
        """Rows of the result."""
        return (self.height + 2 * self.pad_h - self.kernel_h) // self.stride + 1

    @property
    def out_width(self) -> int:
        """Columns of the result."""
        return (self.width + 2 * self.pad_w - self.kernel_w) // self.stride + 1

    @property
    def taps(self) -> int:
        """Weights per pair of channels."""
        return self.kernel_h * self.kernel_w

    @property
    def blocks(self) -> int:
        """Blocks of images that share vectors on a CPU."""
        return -(-self.images // _LANES)


class Conv2dOp(Op):
    """y = conv2d(x, weight) + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *, geometry: Geometry) -> Tensor:
        """Queue the convolution."""
        g = geometry
        packed = pack(x)
        y = empty(x.device, (g.images, g.outputs, g.out_height, g.out_width))
        _forward(g, packed, weight, bias, y)
        ctx.geometry = g
        ctx.save(packed if ctx.needs[1] else None, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The convolution of dy with the kernel turned round, the correlation of x with dy, and dy's sums."""
        g: Geometry = ctx.geometry
        packed, weight = ctx.saved
        dx = dw = db = None
        if ctx.needs[2]:
            db = ctx.out(2)
            _bias_gradient(g, grad, db)
        packed_grad = pack(grad) if ctx.needs[0] or ctx.needs[1] else grad
        if ctx.needs[1]:
            dw = ctx.out(1)
            _weight_gradient(g, packed, packed_grad, dw)
        if ctx.needs[0]:
            dx = ctx.out(0)
            _data_gradient(g, packed_grad, weight, dx)
        return dx, dw, db


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: int | tuple[int, int] = 0,
) -> Tensor:
    """Return the convolution of x [N, C, H, W] with weight [O, C, kernel_h, kernel_w], plus bias [O].

    Rows and columns of the result number (size + 2 * padding - kernel) // stride + 1; `padding` is one number or
    (rows, columns). Padding takes no part in the sums: a weight that is Inf or NaN does not spoil the borders through
    it. Raises ArgumentError where shapes do not fit, or the kernel exceeds the padded image.
    """
    float_tensor("conv2d: x", x)
    float_tensor("conv2d: weight", weight)
    geometry = _geometry(x.shape, weight.shape, stride, padding)
    check_bias("conv2d", bias, geometry.outputs)
    same_device("conv2d", x, weight, bias)
    return Conv2dOp.apply(x, weight, bias, geometry=geometry)


def _geometry(x: Shape, weight: Shape, stride: int, padding: int | tuple[int, int]) -> Geometry:
    """Return the checked sizes."""
    if len(x) != 4:
        raise ArgumentError(f"conv2d: x: expected 4 dimensions (N, C, H, W), got shape {x}")
    if len(weight) != 4:
        raise ArgumentError(f"conv2d: weight: expected 4 dimensions (O, C, kernel_h, kernel_w), got shape {weight}")
    if x[1] != weight[1]:
        raise ArgumentError(f"conv2d: x: expected {weight[1]} channels, as weight {weight} has, got shape {x}")
    if not isinstance(stride, int) or stride < 1:
        raise ArgumentError(f"conv2d: stride: expected a whole number from 1 up, got {stride!r}")
    pads = whole_pair("conv2d: padding", padding, 0)
    geometry = Geometry(x[0], x[1], x[2], x[3], weight[0], weight[2], weight[3], stride, *pads)
    if geometry.out_height < 1 or geometry.out_width < 1:
        raise ArgumentError(
            f"conv2d: weight: expected a kernel no larger than the image with its padding, {x[2] + 2 * pads[0]} x "
            f"{x[3] + 2 * pads[1]}, got {weight[2]} x {weight[3]}"
        )
    return geometry


def whole_pair(name: str, value: int | tuple[int, int], least: int) -> tuple[int, int]:
    """Return (rows, columns) from one whole number or two; raises ArgumentError, naming `name`, below `least`."""
    pair = (value, value) if isinstance(value, int) else value
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        rows, columns = pair
        if isinstance(rows, int) and isinstance(columns, int) and min(rows, columns) >= least:
            return rows, columns
    raise ArgumentError(f"{name}: expected a whole number from {least} up, or two of them, got {value!r}")


def pack(x: Tensor) -> Tensor:
    """Return x with 8 images in each vector: [N/8, C, H, W, 8] on a CPU, x itself elsewhere."""
    device = x.device
    if not device.is_cpu:
        return x
    images, features = x.shape[0], x.size // x.shape[0]
    blocks = -(-images // _LANES)
    packed = empty(device, (blocks, *x.shape[1:], _LANES))
    grid = (-(-features // _PACK_RUN), blocks)
    device.launch(device.kernel("conv2d", "pack_lanes"), grid, (1, 1), x, packed, images, features, _PACK_RUN)
    return packed


def _forward(g: Geometry, packed: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    device = y.device
    kernel = device.kernel("conv2d", "convolve")
    device.launch(
        kernel, *_grid(device, g.outputs, g.images, g.out_height * g.out_width),
        packed, weight, weight if bias is None else bias, y,
        g.images, g.channels, g.height, g.width, g.outputs, g.out_height, g.out_width,
        g.kernel_h, g.kernel_w, g.stride, 1, g.pad_h, g.pad_w,
        0, g.channels * g.taps, g.taps, g.kernel_w, 1, int(bias is not None),
    )  # fmt: skip


def _data_gradient(g: Geometry, packed_grad: Tensor, weight: Tensor, dx: Tensor) -> None:
    """Convolve dy with the kernel read from its last tap to its first, outputs and channels swapped."""
    device = dx.device
    defines: dict[str, Any] = {"DILATED": 1} if g.stride > 1 else {}
    device.launch(
        device.kernel("conv2d", "convolve", **defines), *_grid(device, g.channels, g.images, g.height * g.width),
        packed_grad, weight, weight, dx,
        g.images, g.outputs, g.out_height, g.out_width, g.channels, g.height, g.width,
        g.kernel_h, g.kernel_w, 1, g.stride, g.kernel_h - 1 - g.pad_h, g.kernel_w - 1 - g.pad_w,
        g.taps - 1, g.taps, g.channels * g.taps, -g.kernel_w, -1, 0,
    )  # fmt: skip


def _grid(device: Device, outputs: int, images: int, plane: int) -> tuple[tuple[int, int], tuple[int, int]]:
    if device.is_cpu:
        return (-(-outputs // _TILE_OUTPUTS), -(-images // _LANES)), (1, 1)
    groups = -(-images * plane // _GROUP)
    return (groups * _GROUP, -(-outputs // _GROUP_OUTPUTS)), (_GROUP, 1)


def _weight_gradient(g: Geometry, packed: Tensor, packed_grad: Tensor, dw: Tensor) -> None:
    device = dw.device
    kernel = device.kernel("conv2d", "weight_gradient")
    sizes = (g.channels, g.height, g.width, g.outputs, g.out_height, g.out_width)
    taps = (g.kernel_h, g.kernel_w, g.stride, g.pad_h, g.pad_w)
    if not device.is_cpu:
        group = device.row_group
        grid = (g.channels * g.taps * group, -(-g.outputs // _GROUP_OUTPUTS))
        device.launch(kernel, grid, (group, 1), packed, packed_grad, dw, g.images, *sizes, *taps)
        return
    chunk, rows = _CHUNK_IMAGES // _LANES, _rows_each(g.width, g.out_width, g.stride)
    chunks = -(-g.blocks // chunk)
    partial = empty(device, (chunks, dw.size, _LANES))
    grid = (-(-g.outputs // _TILE_OUTPUTS), chunks)
    device.launch(kernel, grid, (1, 1), packed, packed_grad, partial, g.blocks, chunk, *sizes, *taps, rows)
    add = device.kernel("conv2d", "add_partials")
    device.launch(add, *device.grid(dw.size), partial, dw, dw.size, chunks)


@lru_cache(maxsize=256)
def _rows_each(width: int, out_width: int, stride: int) -> int:
    """Return how many rows of dy, and of x below them, a CPU's nearest cache holds."""
    row_bytes = 4 * _LANES * (_TILE_OUTPUTS * out_width + 3 * width * stride)
    return max(1, _NEAR_CACHE // row_bytes)


def _bias_gradient(g: Geometry, grad: Tensor, db: Tensor) -> None:
    device = db.device
    group = device.row_group
    kernel = device.kernel("conv2d", "bias_gradient")
    plane = g.out_height * g.out_width
    device.launch(kernel, (g.outputs * group,), (group,), grad, db, g.images, g.outputs, plane)
