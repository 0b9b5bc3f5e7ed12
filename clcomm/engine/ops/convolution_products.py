"""The launches of conv2d as sums of matrix products, one for each tap: the kernels of conv2d_products.cl, for CPUs.

N C H W: images, input channels, rows, columns. O: output channels. Kernels are [O, C, kernel_h, kernel_w].
"""

from __future__ import annotations

from typing import Any

from clcomm.engine.device import Device
from clcomm.engine.ops.convolution import Geometry
from clcomm.engine.tensor import Tensor, empty

_DEPTH = 256  # terms added in registers; not tunable, as it decides where long sums are split
_PANELS = 4  # panels that a work-item holds, while a tile of weights is in the L1 cache
_LEAST_CHANNELS = 16  # terms of a tap's product from which it pays to add its tiles to memory


def suit(g: Geometry, device: Device) -> bool:
    """Return whether products are the faster way: with many channels, or few images for conv2d.cl's vectors.

    It depends on the shapes alone, as the two ways differ in the order of their sums.
    """
    return device.is_cpu and min(g.channels, g.outputs) >= _LEAST_CHANNELS


def convolve(g: Geometry, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Queue y = conv2d(x, weight) + bias."""
    packed = _pack_weights(weight, g.outputs, g.channels, g.taps, (g.channels * g.taps, g.taps), is_reversed=False)
    sizes = (g.channels, g.height, g.width, g.outputs, g.out_height, g.out_width)
    _convolve(g, x, packed, bias, y, 0, sizes, g.stride, 1, (-g.pad_h, -g.pad_w))


def data_gradient(g: Geometry, grad: Tensor, weight: Tensor, dx: Tensor) -> None:
    """Queue dx: dy convolved with the reversed kernel, once for each phase of the stride."""
    packed = _pack_weights(weight, g.channels, g.outputs, g.taps, (g.taps, g.channels * g.taps), is_reversed=True)
    phases = dx if g.stride == 1 else empty(dx.device, dx.shape)
    first = 0
    for row in range(g.stride):
        for column in range(g.stride):
            height, width = -(-(g.height - row) // g.stride), -(-(g.width - column) // g.stride)
            sizes = (g.outputs, g.out_height, g.out_width, g.channels, height, width)
            shifts = (row - (g.kernel_h - 1 - g.pad_h), column - (g.kernel_w - 1 - g.pad_w))
            _convolve(g, grad, packed, None, phases, first, sizes, 1, g.stride, shifts)
            first += g.images * g.channels * height * width
    if g.stride > 1:
        planes = g.images * g.channels
        kernel = _kernel(dx.device, "join_phases")
        dx.device.launch(kernel, *dx.device.grid(dx.size), phases, dx, planes, g.height, g.width, g.stride)


def weight_gradient(g: Geometry, x: Tensor, grad: Tensor, dw: Tensor) -> None:
    """Queue dw: for each tap the product of dy with the pixels of x that the tap sees."""
    device = dw.device
    panels = g.taps * -(-g.channels // device.tuning.gemm_tile[1])
    sums = dw if g.taps == 1 else empty(device, dw.shape)
    pixels = g.out_height * g.out_width
    runs = -(-pixels // _DEPTH)
    device.launch(
        _kernel(device, "weight_products"), (-(-panels // _PANELS),), (1,), x, grad, sums,
        g.images, g.channels, g.height, g.width, g.outputs, g.out_height, g.out_width,
        g.kernel_h, g.kernel_w, g.stride, g.pad_h, g.pad_w, -(-pixels // (8 * runs)) * 8,
    )  # fmt: skip
    if g.taps > 1:
        rows = g.outputs * g.channels
        device.launch(_kernel(device, "order_taps"), *device.grid(dw.size), sums, dw, rows, g.taps)


def bias_gradient(g: Geometry, grad: Tensor, db: Tensor) -> None:
    """Queue db: the sums of dy over images and pixels."""
    device = db.device
    grid = device.row_grid(g.outputs, grad.size // g.outputs)
    device.launch(
        _kernel(device, "channel_sums"), *grid, grad, db, g.images, g.outputs, g.out_height * g.out_width
    )  # fmt: skip


def _kernel(device: Device, name: str) -> Any:
    return device.kernel("conv2d_products", name, DEPTH=_DEPTH, PANELS=_PANELS)


def _pack_weights(
    weight: Tensor, rows: int, depth: int, taps: int, strides: tuple[int, int], *, is_reversed: bool
) -> Tensor:
    """Return the weights in the order in which tiles read them; `strides` are those of rows and of terms."""
    device = weight.device
    tile = device.tuning.gemm_tile[0]
    tiles = -(-rows // tile)
    packed = empty(device, (taps, tiles, depth, tile))
    grid = (min(tiles, device.compute_units),)
    kernel = _kernel(device, "pack_weights")
    device.launch(kernel, grid, (1,), weight, packed, rows, depth, taps, *strides, int(is_reversed))
    return packed


def _convolve(
    g: Geometry, x: Tensor, packed: Tensor, bias: Tensor | None, y: Tensor, first: int, sizes: tuple[int, ...],
    stride: int, dilation: int, shifts: tuple[int, int],
) -> None:  # fmt: skip
    """Queue the convolution of one phase of y, from its element `first` on."""
    device = y.device
    groups = -(-sizes[4] * sizes[5] // (_PANELS * device.tuning.gemm_tile[1]))
    if groups:
        device.launch(
            _kernel(device, "convolve_products"), (groups, g.images), (1, 1),
            x, packed, packed if bias is None else bias, y, first,
            *sizes, g.kernel_h, g.kernel_w, stride, dilation, *shifts, int(bias is not None),
        )  # fmt: skip
