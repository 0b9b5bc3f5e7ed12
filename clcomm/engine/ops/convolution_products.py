"""The launches of conv2d as sums of matrix products, one for each tap, for CPUs.

The kernels are those of conv2d_products.cl and conv2d_products_weights.cl.
N C H W: images, input channels, rows, columns. O: output channels. Kernels are [O, C, kernel_h, kernel_w].
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from clcomm.engine.device import Device
from clcomm.engine.ops.convolution import LANES, Geometry
from clcomm.engine.program import Kernel
from clcomm.engine.tensor import Tensor, empty

if TYPE_CHECKING:
    import pyopencl as cl

_WEIGHTS = "conv2d_products_weights"  # the file of the weights' gradient
_DEPTH = 256  # terms added in registers; not tunable, as it decides where long sums are split
_PANELS = 4  # panels that a work-item holds, while a tile of weights is in the L1 cache
_LEAST_TAP, _MANY_CHANNELS = 16, 64
_FULL = 3 / 4  # of conv2d.cl's vectors of images


class _Part(NamedTuple):
    """A phase's part of the kernel in one direction: every `step`-th tap."""

    first: int
    taps: int
    shift: int


class Flags(NamedTuple):
    """Two integer buffers with their lengths; a 0 among them: the result is still to be computed."""

    first: cl.Buffer
    first_count: int
    others: cl.Buffer
    other_count: int


def suit(g: Geometry, device: Device) -> bool:
    """Return whether products are faster: with many channels, or too few images for conv2d.cl's vectors.

    It depends on the shapes alone (one group, no dilation), as the two ways differ in the order of their sums.
    """
    if g.groups > 1 or (g.apart_h, g.apart_w) != (1, 1):
        return False
    fewest = min(g.channels, g.outputs)
    is_full = g.images >= _FULL * g.blocks * LANES
    if is_full:
        return device.is_cpu and fewest >= (_LEAST_TAP if g.taps == 1 else _MANY_CHANNELS)
    return device.is_cpu and g.outputs >= _LEAST_TAP and g.channels * g.taps >= _LEAST_TAP


def convolve(
    g: Geometry, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, flags: Flags | None = None
) -> None:
    """Queue y = conv2d(x, weight) + bias; with flags only if one of them is 0."""
    layout = (0, g.kernel_w, 1, g.channels * g.taps, g.taps)
    packed = _pack_weights(weight, g.outputs, g.channels, (g.kernel_h, g.kernel_w), layout, flags)
    sizes = (g.channels, g.height, g.width, g.outputs, g.out_height, g.out_width)
    _convolve(g, x, packed, bias, y, 0, (*sizes, g.kernel_h, g.kernel_w, g.stride, -g.pad_h, -g.pad_w), flags)


def data_gradient(g: Geometry, grad: Tensor, weight: Tensor, dx: Tensor, flags: Flags | None = None) -> None:
    """Queue dx: dy convolved with the reversed kernel, once for each phase of the stride; flags as for `convolve`."""
    phases = dx if g.stride == 1 else empty(dx.device, dx.shape)
    first = 0
    for row in range(g.stride):
        for column in range(g.stride):
            size = -(-(g.height - row) // g.stride), -(-(g.width - column) // g.stride)
            down = _part(g.kernel_h, g.pad_h, row, g.stride)
            along = _part(g.kernel_w, g.pad_w, column, g.stride)
            taps = (down.taps, along.taps)
            # Tap i of the reversed kernel is tap kernel - 1 - i.
            tap = g.taps - 1 - down.first * g.kernel_w - along.first
            layout = (tap, -g.stride * g.kernel_w, -g.stride, g.taps, g.channels * g.taps)
            packed = _pack_weights(weight, g.channels, g.outputs, taps, layout, flags)
            sizes = (g.outputs, g.out_height, g.out_width, g.channels, *size)
            _convolve(g, grad, packed, None, phases, first, (*sizes, *taps, 1, down.shift, along.shift), flags)
            first += g.images * g.channels * size[0] * size[1]
    if g.stride > 1:
        planes = g.images * g.channels
        kernel = _kernel(dx.device, "join_phases")
        dx.device.launch(kernel, *dx.device.grid(dx.numel()), phases, dx, planes, g.height, g.width, g.stride)


def _part(kernel: int, pad: int, phase: int, stride: int) -> _Part:
    """Return the taps i of the reversed kernel that see dy: those for which phase + i - (kernel - 1 - pad) is a
    multiple of the stride, that times the shift of the first one.
    """
    shift = phase - (kernel - 1 - pad)
    first = -shift % stride
    return _Part(first, max(0, -(-(kernel - first) // stride)), (shift + first) // stride)


def weight_gradient(g: Geometry, x: Tensor, grad: Tensor, dw: Tensor, flags: Flags | None = None) -> None:
    """Queue dw: the product of dy with the elements of x that each term reads; flags as for `convolve`."""
    device = dw.device
    sums = dw if g.taps == 1 else empty(device, dw.shape)
    pixels = g.out_height * g.out_width
    runs = -(-pixels // _DEPTH)
    device.launch(
        _kernel(device, "weight_products", flags, _WEIGHTS), _grid(device, g.channels * g.taps), (1,), x, grad, sums,
        g.images, g.channels, g.height, g.width, g.outputs, g.out_height, g.out_width,
        g.kernel_h, g.kernel_w, g.stride, g.pad_h, g.pad_w, -(-pixels // (8 * runs)) * 8,
        *(flags or ()),
    )  # fmt: skip
    if g.taps > 1:
        kernel = _kernel(device, "order_terms", flags, _WEIGHTS)
        device.launch(kernel, *device.grid(dw.numel()), sums, dw, g.outputs, g.channels, g.taps, *(flags or ()))


def bias_gradient(g: Geometry, grad: Tensor, db: Tensor) -> None:
    """Queue db: the sums of dy over images and pixels."""
    device, pixels = db.device, g.out_height * g.out_width
    grid = device.row_grid(g.outputs, g.images * pixels)
    device.launch(_kernel(device, "channel_sums", file=_WEIGHTS), *grid, grad, db, g.images, g.outputs, pixels)


def _kernel(device: Device, name: str, flags: Flags | None = None, file: str = "conv2d_products") -> Kernel:
    gate: dict[str, Any] = {} if flags is None else {"GATED": 1}
    return device.kernel(file, name, DEPTH=_DEPTH, PANELS=_PANELS, **gate)


def _grid(device: Device, columns: int) -> tuple[int]:
    return (-(-columns // (_PANELS * device.tuning.gemm_tile[1])),)


class _Packed(NamedTuple):
    """Weights in the order in which tiles read them, and flags of the finite tiles."""

    values: Tensor
    is_finite: cl.Buffer


def _pack_weights(
    weight: Tensor, rows: int, channels: int, taps: tuple[int, int], layout: tuple[int, ...], flags: Flags | None
) -> _Packed:
    """Return the packed weights; `layout` is first_tap, tap_i, tap_j, w_row and w_channel of the kernel."""
    device = weight.device
    tile = device.tuning.gemm_tile[0]
    tiles = -(-rows // tile)
    packed = _Packed(empty(device, (tiles * max(1, channels * taps[0] * taps[1] * tile),)), device.allocate(4 * tiles))
    grid = (min(tiles, device.compute_units),)
    kernel = _kernel(device, "pack_weights", flags)
    device.launch(kernel, grid, (1,), weight, *packed, rows, channels, *taps, *layout, *(flags or ()))
    return packed


def _convolve(
    g: Geometry, x: Tensor, packed: _Packed, bias: Tensor | None, y: Tensor, first: int, sizes: tuple[int, ...],
    flags: Flags | None,
) -> None:  # fmt: skip
    """Queue the convolution of a phase of y, from its element `first` on; `sizes` are the kernel's, from channels."""
    device = y.device
    pixels = sizes[4] * sizes[5]
    if pixels:
        added = packed.values if bias is None else bias
        kernel, grid = _kernel(device, "convolve_products", flags), (*_grid(device, pixels), g.images)
        values = *sizes, int(bias is not None), *(flags or ())
        device.launch(kernel, grid, (1, 1), x, *packed, added, y, first, *values)


# --- The blocks in which a GPU's work-groups compute matrix products. ---

Grid = tuple[tuple[int, int], tuple[int, int]]


class ProductBlock(NamedTuple):
    """The tile of a GPU's work-group of SIDE x SIDE items: EACH x EACH sums per item, SLICE terms at a time."""

    SIDE: int
    EACH: int
    SLICE: int

    @property
    def width(self) -> int:
        """Rows and columns of C that a group computes."""
        return self.SIDE * self.EACH

    @property
    def local_bytes(self) -> int:
        """Local memory of a group: two slices of both operands, whose rows are padded by four floats."""
        return 2 * 2 * self.SLICE * 4 * (self.width + 4)

    def grid(self, rows: int, columns: int) -> Grid:
        return (-(-columns // self.width) * self.SIDE, -(-rows // self.width) * self.SIDE), (self.SIDE, self.SIDE)


_SMALLER_BLOCKS = (ProductBlock(16, 4, 16), ProductBlock(8, 8, 8), ProductBlock(8, 4, 16))


@lru_cache(maxsize=1024)
def chosen_block(
    tuned: tuple[int, int, int], units: int, limits: tuple[int, int], rows: int, columns: int, count: int = 1
) -> ProductBlock:
    """Return the largest block, from the tuned one down, with which every compute unit has a group.

    `count` is the number of products in one launch.
    """
    largest = ProductBlock(*tuned)
    for block in (largest, *(block for block in _SMALLER_BLOCKS if block.width <= largest.width)):
        fits = limits[0] >= block.SIDE**2 and block.local_bytes <= limits[1]
        if fits and count * -(-rows // block.width) * -(-columns // block.width) >= units:
            return block
    return _SMALLER_BLOCKS[-1]
