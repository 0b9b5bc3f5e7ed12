"""The launches of conv2d by Winograd's algorithm: 3x3 with stride 1, for CPUs.

The kernels are those of conv2d_winograd.cl and conv2d_winograd_weights.cl.

Its pixels and weights are transformed, multiplied and transformed back, 2.25 times fewer products than the sum has.
Where a number is infinite, NaN or near the largest, the kernels of conv2d_products.cl compute everything.
"""

from __future__ import annotations

from clcomm.engine.device import Device
from clcomm.engine.ops import convolution_products
from clcomm.engine.ops.convolution import Geometry
from clcomm.engine.program import Kernel
from clcomm.engine.tensor import Tensor, empty

_PANELS = 4  # of tiles in a block, or of channels in a group
_SUMMED_TILES = 128  # of a weight gradient; not tunable, as it decides where long sums are split
_POINTS = 16
_MANY_CHANNELS = 64
_LEAST_TILES = 32  # for which transforming the weights is worth its time
_LEAST_SUMMED_TILES = 64  # for which transforming their gradient is


def suit(g: Geometry, device: Device) -> bool:
    """Return whether this is the fastest way, by the shapes alone, as its order of sums is its own."""
    is_plain = (g.kernel_h, g.kernel_w, g.stride, g.groups, g.apart_h, g.apart_w) == (3, 3, 1, 1, 1, 1)
    if not (device.is_cpu and is_plain) or max(g.pad_h, g.pad_w) > 2:
        return False
    pixels = min(g.out_height * g.out_width, g.height * g.width)
    return min(g.channels, g.outputs) >= _MANY_CHANNELS and g.images * pixels >= 4 * _LEAST_TILES


def convolve(g: Geometry, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    flags = _convolve(x, weight, bias, y, (g.pad_h, g.pad_w), (0, 1, 9 * g.channels, 9))
    convolution_products.convolve(g, x, weight, bias, y, flags)


def data_gradient(g: Geometry, grad: Tensor, weight: Tensor, dx: Tensor) -> None:
    """Queue dx: the convolution of dy with the reversed kernel, with outputs and channels exchanged."""
    flags = _convolve(grad, weight, None, dx, (2 - g.pad_h, 2 - g.pad_w), (8, -1, 9, 9 * g.channels))
    convolution_products.data_gradient(g, grad, weight, dx, flags)


def weight_gradient(g: Geometry, x: Tensor, grad: Tensor, dw: Tensor) -> None:
    """Queue dw: sums over tiles in each place of the kernels, transformed back; of few tiles, as products."""
    if g.images * g.out_height * g.out_width < 4 * _LEAST_SUMMED_TILES:
        convolution_products.weight_gradient(g, x, grad, dw)
        return
    device, panel = dw.device, dw.device.tuning.gemm_tile[1]
    group = _PANELS * panel
    groups = -(-g.channels // group)
    items = min(groups, device.compute_units)
    sums = empty(device, (_POINTS, g.outputs, g.channels))
    scratch = empty(device, (items * _POINTS * (group * _SUMMED_TILES + panel + (g.outputs + 8) * _SUMMED_TILES),))
    are_ordinary = device.allocate(4 * groups)
    device.launch(
        _gradient_kernel(device, "winograd_weight_sums"), (items,), (1,), x, grad, sums, scratch, are_ordinary,
        g.images, g.channels, g.height, g.width, g.outputs, g.out_height, g.out_width, g.pad_h, g.pad_w,
    )  # fmt: skip
    grid = (min(g.outputs, device.compute_units),), (1,)
    device.launch(_gradient_kernel(device, "winograd_weight_gradient"), *grid, sums, dw, g.outputs, g.channels)
    flags = convolution_products.Flags(are_ordinary, groups, are_ordinary, groups)
    convolution_products.weight_gradient(g, x, grad, dw, flags)


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, pads: tuple[int, int], layout: tuple[int, ...]
) -> convolution_products.Flags:
    """Queue the convolution, and return flags; a 0 among them: see convolution_products.Flags.

    `layout` is first_tap, tap_step, w_row and w_channel of the kernel of weights.
    """
    device = y.device
    images, channels, height, width = x.shape
    outputs, out_height, out_width = y.shape[1:]
    tile, panel, _ = device.tuning.gemm_tile
    rows, block = -(-outputs // tile), _PANELS * panel
    blocks = -(-images * -(-out_height // 2) * -(-out_width // 2) // block)
    packed = empty(device, (_POINTS * rows * channels * tile,))
    of_weights, of_pixels = device.allocate(4 * rows), device.allocate(4 * blocks)
    kernel = _kernel(device, "winograd_weights", block)
    grid = (min(rows, device.compute_units),), (1,)
    device.launch(kernel, *grid, weight, packed, of_weights, outputs, channels, *layout)
    items = min(blocks, device.compute_units)
    scratch = empty(device, (items * _POINTS * (channels * block + panel + outputs * block),))
    added = packed if bias is None else bias
    device.launch(
        _kernel(device, "winograd_convolve", block), (items,), (1,), x, packed, added, y, scratch, of_pixels,
        images, channels, height, width, outputs, out_height, out_width, *pads, int(bias is not None),
    )  # fmt: skip
    return convolution_products.Flags(of_weights, rows, of_pixels, blocks)


def _kernel(device: Device, name: str, tiles: int) -> Kernel:
    return device.kernel("conv2d_winograd", name, PANELS=_PANELS, TILES=tiles)


def _gradient_kernel(device: Device, name: str) -> Kernel:
    return device.kernel("conv2d_winograd_weights", name, PANELS=_PANELS, TILES=_SUMMED_TILES)
