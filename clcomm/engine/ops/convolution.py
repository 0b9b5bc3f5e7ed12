"""The launches of conv2d, without autograd: sizes, packing, and the kernels of the files conv2d*.cl and pack.cl.

N C H W: images, input channels, rows, columns. O: output channels. Kernels are [O, C, kernel_h, kernel_w].
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from clcomm.engine.device import Device
from clcomm.engine.tensor import Tensor, empty

if TYPE_CHECKING:
    import pyopencl as cl

LANES = 8  # images in a CPU vector, as in conv2d.cl
_TILE_OUTPUTS, _TILE_PIXELS = 4, 3  # of a weight gradient, and pixels of any tile
_SEGMENT = 48  # pixels of a row that a work-item computes at a time, in the build for every width
_WIDE_ROW = 64  # the longest row whose results, of 8 outputs and 16 images, stay in the L2 cache
_PACK_RUN = 4096  # features that one CPU work-item packs
_CHUNK_IMAGES = 64  # images whose weight gradients one work-item sums
_POOLED_ROOM = 192  # pixels of 4 outputs' dy, unpooled in local memory: 24 KiB
_WIDEST, _WIDEST_KERNEL = 256, 5  # the largest row and kernel widths with a specialised build
#: Multiplications per image from which a specialised build saves time; those of one channel, of which it does five in
#: the time of one, count as so many.
_WORTH_A_BUILD, _OF_ONE_CHANNEL = 1 << 16, 4
_GROUP = 64  # work-items of a group of a GPU's `convolve`

Grid = tuple[tuple[int, ...], tuple[int, ...]]


class Geometry(NamedTuple):
    """Sizes of one convolution, seen from its forward pass; channels and outputs are those of a group.

    apart_h, apart_w: rows and columns from a tap of the kernel to the next: its dilation.
    """

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
    apart_h: int = 1
    apart_w: int = 1
    groups: int = 1

    @property
    def reach_h(self) -> int:
        """Rows from the first to the last that the kernel sees."""
        return (self.kernel_h - 1) * self.apart_h + 1

    @property
    def reach_w(self) -> int:
        """Columns, likewise."""
        return (self.kernel_w - 1) * self.apart_w + 1

    @property
    def out_height(self) -> int:
        """Rows of the result."""
        return (self.height + 2 * self.pad_h - self.reach_h) // self.stride + 1

    @property
    def out_width(self) -> int:
        """Columns of the result."""
        return (self.width + 2 * self.pad_w - self.reach_w) // self.stride + 1

    @property
    def taps(self) -> int:
        """Weights for each pair of channels."""
        return self.kernel_h * self.kernel_w

    @property
    def blocks(self) -> int:
        """Blocks of 8 images that share vectors on a CPU."""
        return -(-self.images // LANES)

    @property
    def spread(self) -> dict[str, int]:
        """The build option of kernels for several groups, or taps with pixels between them."""
        return {"GROUPED": 1} if (self.apart_h, self.apart_w, self.groups) != (1, 1, 1) else {}

    @property
    def keeps_width(self) -> bool:
        """Whether rows of x and y have one width, for which there may be a specialised build on a CPU."""
        same = self.stride == 1 and self.apart_w == 1 and 2 * self.pad_w == self.kernel_w - 1
        return same and _TILE_PIXELS < self.width <= _WIDEST and self.kernel_w <= _WIDEST_KERNEL


def pack(x: Tensor) -> Tensor:
    """Return x with 8 images in each vector on a CPU, [N/8, C, H, W, 8]; x itself elsewhere."""
    device = x.device
    if not device.is_cpu:
        return x
    images, features = x.shape[0], x.numel() // x.shape[0]
    blocks = -(-images // LANES)
    packed = empty(device, (blocks, *x.shape[1:], LANES))
    grid = (-(-features // _PACK_RUN), blocks)
    device.launch(device.kernel("pack", "pack_lanes"), grid, (1, 1), x, packed, images, features, _PACK_RUN)
    return packed


def pack_gradient(g: Geometry, grad: Tensor, db: Tensor | None) -> Tensor:
    """Return dy packed as by `pack`, and fill the bias gradient unless it is None."""
    device, plane, outputs = grad.device, g.out_height * g.out_width, g.groups * g.outputs
    if not device.is_cpu:
        if db is not None:
            kernel, group = device.kernel("conv2d_gpu", "bias_gradient"), device.row_group
            device.launch(kernel, (outputs * group,), (group,), grad, db, g.images, outputs, plane)
        return grad
    packed = empty(device, (g.blocks, *grad.shape[1:], LANES))
    partial = empty(device, (g.blocks, outputs, LANES))
    kernel = device.kernel("pack", "pack_gradient")
    device.launch(kernel, (outputs, g.blocks), (1, 1), grad, packed, partial, g.images, outputs, plane)
    if db is not None:
        _add_partials(partial, db, g.blocks)
    return packed


def convolve(g: Geometry, packed: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Queue y = conv2d(x, weight) + bias."""
    device = y.device
    device.launch(
        device.kernel(_file(device), "convolve", **_build(g, g.channels, g.outputs, device)),
        *_grid(g, g.channels, g.outputs, g.out_height * g.out_width, device),
        packed, weight, weight if bias is None else bias, y, *_forward_shape(g, bias),
    )  # fmt: skip


def data_gradient(g: Geometry, packed_grad: Tensor, weight: Tensor, dx: Tensor) -> None:
    """Queue dx: the convolution of dy with the reversed kernel, with outputs and channels exchanged."""
    device = dx.device
    build = _build(g, g.outputs, g.channels, device)
    device.launch(
        device.kernel(_file(device), "convolve", **({**build, "DILATED": 1} if g.stride > 1 else build)),
        *_grid(g, g.outputs, g.channels, g.height * g.width, device),
        packed_grad, weight, weight, dx,
        g.images, g.outputs, g.out_height, g.out_width, g.channels, g.height, g.width,
        g.kernel_h, g.kernel_w, 1, g.stride, g.reach_h - 1 - g.pad_h, g.reach_w - 1 - g.pad_w,
        g.apart_h, g.apart_w, g.groups,
        g.taps - 1, g.taps, g.channels * g.taps, -g.kernel_w, -1, 0,
    )  # fmt: skip


def weight_gradient(g: Geometry, packed: Tensor, packed_grad: Tensor, dw: Tensor, places: object = None) -> None:
    """Queue dw: the correlation of x with dy; with `places`, dy is a result of `pack_pooled_gradient`."""
    device = dw.device
    sizes = (
        g.channels, g.height, g.width, g.outputs, g.out_height, g.out_width,
        g.kernel_h, g.kernel_w, g.stride, g.pad_h, g.pad_w, g.apart_h, g.apart_w, g.groups,
    )  # fmt: skip
    if not device.is_cpu:
        group = device.row_group
        grid = (g.channels * g.taps * group, g.groups * -(-g.outputs // device.tuning.conv_outputs))
        kernel = device.kernel("conv2d_gpu", "weight_gradient")
        device.launch(kernel, grid, (group, 1), packed, packed_grad, dw, g.images, *sizes)
        return
    chunk = _CHUNK_IMAGES // LANES
    rows = _rows_each(device.tuning.near_cache, min(g.channels, _TILE_PIXELS), g.width, g.out_width, g.stride)
    inputs: tuple[object, ...] = ()
    tile, each = _tile_outputs(g, g.outputs), 2 if device.tuning.conv_lanes == 16 and g.channels > 1 else 1
    defines: dict[str, Any] = {"EACH": each, "TILE_OUTPUTS": tile, **g.spread}
    if places is not None:
        rows = max(2, min(rows, _POOLED_ROOM // g.out_width) // 2 * 2)
        inputs, defines = (places,), {**defines, "POOLED": _POOLED_ROOM}
    chunks = -(-g.blocks // chunk)
    partial = empty(device, (chunks, dw.numel(), LANES))
    device.launch(
        device.kernel("conv2d_weights", "weight_gradient", **defines),
        (g.groups * -(-g.outputs // tile), chunks), (1, 1),
        packed, packed_grad, partial, *inputs, g.blocks, chunk, rows, *sizes,
    )  # fmt: skip
    _add_partials(partial, dw, chunks)


def can_fuse_pool(g: Geometry, device: Device) -> bool:
    """Return whether `convolve_relu_pool` supports these sizes on this device."""
    return device.is_cpu and g.keeps_width and g.out_height >= 2


def convolve_relu_pool(g: Geometry, packed: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> cl.Buffer:
    """Queue y = the 2 x 2 maxima of relu(conv2d(x, weight) + bias); return the buffer of their places."""
    device = y.device
    places = device.allocate(g.blocks * LANES * y.numel() // g.images)
    device.launch(
        device.kernel("conv2d", "convolve_relu_pool", **_build(g, g.channels, g.outputs, device, one_width=True)),
        *_grid(g, g.channels, g.outputs, 0, device),
        packed, weight, weight if bias is None else bias, y, places, *_forward_shape(g, bias),
    )  # fmt: skip
    return places


def can_unpool_locally(g: Geometry) -> bool:
    """Return whether two rows of dy fit into the local memory in which `weight_gradient` unpools it."""
    return 2 * g.out_width <= _POOLED_ROOM


def pack_pooled_gradient(g: Geometry, grad: Tensor, places: object, db: Tensor | None) -> Tensor:
    """Return dy of `convolve_relu_pool`, packed but not unpooled, and fill the bias gradient."""
    device = grad.device
    packed = empty(device, (g.blocks, *grad.shape[1:], LANES))
    partial = empty(device, (g.blocks, g.outputs, LANES))
    kernel, plane = device.kernel("pack", "pack_pooled_gradient"), grad.shape[2] * grad.shape[3]
    device.launch(kernel, (g.outputs, g.blocks), (1, 1), grad, places, packed, partial, g.images, g.outputs, plane)
    if db is not None:
        _add_partials(partial, db, g.blocks)
    return packed


def unpool_gradient(g: Geometry, grad: Tensor, places: object, db: Tensor | None) -> Tensor:
    """Return the packed gradient of the convolution inside `convolve_relu_pool`, and fill the bias gradient."""
    device = grad.device
    packed = empty(device, (g.blocks, g.outputs, g.out_height, g.out_width, LANES))
    partial = empty(device, (g.blocks, g.outputs, LANES))
    kernel = device.kernel("pack", "unpool_lanes")
    grid = (g.outputs, g.blocks)
    device.launch(kernel, grid, (1, 1), grad, places, packed, partial, g.images, *packed.shape[1:4])
    if db is not None:
        _add_partials(partial, db, g.blocks)
    return packed


def _file(device: Device) -> str:
    return "conv2d" if device.is_cpu else "conv2d_gpu"


def _forward_shape(g: Geometry, bias: Tensor | None) -> tuple[int, ...]:
    """Return the SHAPE_ARGS of conv2d.cl for the forward pass."""
    return (
        g.images, g.channels, g.height, g.width, g.outputs, g.out_height, g.out_width,
        g.kernel_h, g.kernel_w, g.stride, 1, g.pad_h, g.pad_w, g.apart_h, g.apart_w, g.groups,
        0, g.channels * g.taps, g.taps, g.kernel_w, 1, int(bias is not None),
    )  # fmt: skip


def _build(g: Geometry, channels: int, outputs: int, device: Device, *, one_width: bool = False) -> dict[str, Any]:
    """Return the defines of the build for sums over `channels`; all builds give the same bits.

    one_width: whether it has to be that for one width.
    """
    if not device.is_cpu:
        return {}
    tile = _tile(g, channels, outputs, device).defines() | g.spread
    work = g.groups * g.channels * g.outputs * g.taps * g.out_height * g.out_width
    if channels == 1:
        work *= _OF_ONE_CHANNEL
    if one_width or (g.keeps_width and work >= _WORTH_A_BUILD):
        return {**tile, **_width_build(g, channels)}
    return tile


def _width_build(g: Geometry, channels: int) -> dict[str, Any]:
    """Return the defines of the build for one width; see conv2d.cl."""
    sizes = {"WIDTH": g.width, "KERNEL_W": g.kernel_w, "PAD_W": g.pad_w}
    return {**sizes, "ONE_CHANNEL": 1, "KERNEL_H": g.kernel_h} if channels == 1 else sizes


class _Tile(NamedTuple):
    """Block of outputs of one CPU work-item: groups of 8 images, which share wide vectors, and output channels."""

    blocks: int
    outputs: int

    def defines(self) -> dict[str, int]:
        return {"BLOCKS": self.blocks, "TILE_OUTPUTS": self.outputs}


def _tile(g: Geometry, channels: int, outputs: int, device: Device) -> _Tile:
    return _chosen_tile(g, channels, outputs, device.tuning.conv_lanes, device.compute_units, device.local_bytes)


def _tile_outputs(g: Geometry, outputs: int) -> int:
    """Return the outputs of a small tile, at most a group's."""
    return 1 if g.groups > 1 and outputs == 1 else _TILE_OUTPUTS


@lru_cache(maxsize=1024)
def _chosen_tile(g: Geometry, channels: int, outputs: int, lanes: int, units: int, local_bytes: int) -> _Tile:
    """Return the largest tile with which every core has a work-item; no choice changes a bit."""
    fewest = _tile_outputs(g, outputs)
    pixels = max(_SEGMENT, 5 * max(g.width, g.out_width) // 2) + 16  # whose results wait in local memory
    for tile in (_Tile(2, 8), _Tile(2, 4)) if lanes == 2 * LANES and fewest > 1 else ():
        # With one channel a tile's weights would fill the registers; long rows' results would leave the caches.
        suits = tile.outputs == 4 or (channels > 1 and outputs % tile.outputs == 0 and g.out_width <= _WIDE_ROW)
        fits = 4 * LANES * tile.blocks * tile.outputs * pixels <= local_bytes
        if suits and fits and g.groups * -(-outputs // tile.outputs) * -(-g.blocks // tile.blocks) >= units:
            return tile
    return _Tile(1, fewest)


def _grid(g: Geometry, channels: int, outputs: int, plane: int, device: Device) -> Grid:
    if device.is_cpu:
        tile = _tile(g, channels, outputs, device)
        return (g.groups * -(-outputs // tile.outputs), -(-g.blocks // tile.blocks)), (1, 1)
    groups = -(-g.images * plane // _GROUP)
    return (groups * _GROUP, g.groups * -(-outputs // device.tuning.conv_outputs)), (_GROUP, 1)


@lru_cache(maxsize=256)
def _rows_each(near_cache: int, channels: int, width: int, out_width: int, stride: int) -> int:
    """Return the number of rows of a tile's dy, with the rows of x they use, that fit into `near_cache` bytes."""
    row_bytes = 4 * LANES * (_TILE_OUTPUTS * out_width + channels * width * stride)
    return max(1, near_cache // row_bytes)


def _add_partials(partial: Tensor, sums: Tensor, chunks: int) -> None:
    device, size = sums.device, sums.numel()
    device.launch(device.kernel("pack", "add_partials"), *device.grid(size), partial, sums, size, chunks)
