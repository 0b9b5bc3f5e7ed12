"""Convolutions of every kernel, padding, stride and size, with each build of their kernels, alone and with their pool.

N C H W: images, channels, rows, columns. O: outputs. Values are whole numbers, so that results are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from clcomm.engine.device import Device
from clcomm.engine.ops import convolution, convolution_products, convolution_winograd
from clcomm.engine.ops.conv2d import conv2d, conv_relu_pool
from tests.families.family import Family, assert_equal, leaf, whole_numbers

KERNELS, STRIDES = range(1, 8), range(1, 4)
#: None, one and several of a tile of outputs, of channels and of image lanes, with all remainders.
CHANNELS, OUTPUTS, IMAGES = (1, 3, 4, 1, 2, 5, 7), (6, 1, 4, 9, 2, 3, 5, 8, 16), (1, 8, 3, 9, 7, 17, 2)


class Axis(NamedTuple):
    """One direction of a convolution; taps are `apart` pixels apart."""

    kernel: int
    padding: int
    size: int
    apart: int = 1

    @property
    def reach(self) -> int:
        """Pixels from the first to the last that the kernel sees."""
        return (self.kernel - 1) * self.apart + 1


class Case(NamedTuple):
    """A convolution; `rows` and `columns` are its two directions, channels and outputs those of each group."""

    images: int
    channels: int
    outputs: int
    stride: int
    rows: Axis
    columns: Axis
    seed: int
    groups: int = 1

    @property
    def padding(self) -> tuple[int, int]:
        """Of rows and columns."""
        return self.rows.padding, self.columns.padding

    @property
    def dilation(self) -> tuple[int, int]:
        """Of rows and columns."""
        return self.rows.apart, self.columns.apart


def axes(stride: int, longest: int) -> list[Axis]:
    """Return every direction: padding up to 3, as wide as the kernel, and wider."""
    return [
        Axis(kernel, padding, size)
        for kernel in KERNELS
        for padding in sorted({0, 1, 2, 3, kernel, kernel + 1})
        for size in range(1, longest + 1)
        if (size + 2 * padding - kernel) // stride >= 0 and size + 2 * padding >= kernel
    ]


def every(rng: np.random.Generator, count: int, longest: int) -> Iterator[Case]:
    """Draw cases; some 4,000 hold each direction of each stride as rows and as columns."""
    orders = {stride: [rng.permutation(np.array(axes(stride, longest))).tolist() for _ in "rc"] for stride in STRIDES}
    for number in range(count):
        stride, turn = STRIDES[number % len(STRIDES)], number // len(STRIDES)
        rows, columns = (Axis(*order[turn % len(order)]) for order in orders[stride])
        yield _case(rng, number, stride, rows, columns)


def of_one_width(rng: np.random.Generator, count: int, longest: int) -> Iterator[Case]:
    """Draw convolutions that keep the width; 10 in a row share a build: kernel 5, 3 or 1, all remainders of widths."""
    widths = [part for part in (range(4 + first, longest + 1, 3) for first in range(3)) if part]
    builds = [
        (kernel, part[turn % len(part)])
        for turn in range(len(widths[0]))
        for kernel, part in product((5, 3, 1), widths)
    ]
    for start in range(0, count, 10):
        kernel, width = builds[start // 10 % len(builds)]
        kernel_h = int(rng.integers(1, 8))  # with one channel part of the build
        for number in range(start, min(start + 10, count)):
            height, padding = int(rng.integers(1, min(longest, 20) + 1)), int(rng.integers(0, 9))
            rows = Axis(kernel_h, max(padding // 2, -(-(kernel_h - height) // 2)), height)
            yield _case(rng, number, 1, rows, Axis(kernel, kernel // 2, width))


def in_groups(rng: np.random.Generator, count: int, longest: int) -> Iterator[Case]:
    """Draw convolutions in groups of one output and more, and of taps that are apart, each alone and together.

    Every fifth keeps the width, for which there are builds.
    """
    of_width = of_one_width(rng, -(-count // 5), longest)
    for number, case in enumerate(every(rng, count, longest)):
        if number % 5 == 0:
            yield next(of_width)._replace(
                groups=3, outputs=(1, 5)[number % 2], channels=(1, 2)[number % 4 > 1], seed=number
            )
            continue
        rows, columns = (
            _apart(axis, int(rng.integers(1, 5)) if number % 3 else 1) for axis in (case.rows, case.columns)
        )
        groups = 1 if number % 4 == 3 else int(rng.integers(2, 6))
        outputs = 1 if number % 2 else case.outputs
        yield case._replace(groups=groups, outputs=outputs, rows=rows, columns=columns)


def _apart(axis: Axis, apart: int) -> Axis:
    """Return a direction with taps that are apart, and pixels or padding enough for them."""
    wider = axis._replace(apart=apart)
    missing = max(0, wider.reach - axis.size - 2 * axis.padding)
    return wider._replace(padding=axis.padding + -(-missing // 2))


def of_winograd(rng: np.random.Generator, count: int, longest: int) -> Iterator[Case]:
    """Draw convolutions of 3x3 with stride 1, of every padding and of images of every size."""
    some = [axis for axis in axes(1, longest) if axis.kernel == 3 and axis.padding <= 2]
    orders = [rng.permutation(np.array(some)).tolist() for _ in "rc"]
    for number in range(count):
        rows, columns = (Axis(*order[number % len(order)]) for order in orders)
        yield _case(rng, number, 1, rows, columns)


def _case(rng: np.random.Generator, number: int, stride: int, rows: Axis, columns: Axis) -> Case:
    images, channels, outputs = (int(rng.choice(sizes)) for sizes in (IMAGES, CHANNELS, OUTPUTS))
    if number % 50 == 49:
        images = 67  # more than one chunk of the weight gradient
    return Case(images, channels, outputs, stride, rows, columns, number)


class Reference:
    """A convolution of float64 arrays and its gradients, as products of matrices, group by group."""

    def __init__(self, x: np.ndarray, weight: np.ndarray, case: Case):
        self.case = case
        x = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *((p, p) for p in case.padding)])
        self.weights = np.split(weight.astype(np.float64), case.groups)
        self.padded = x.shape[2:]
        # of each group [N, C, out_h, out_w, kernel_h, kernel_w]
        self.windows = [self._windows(part) for part in np.split(x, case.groups, 1)]

    def _windows(self, x: np.ndarray) -> np.ndarray:
        (down, along), stride = self.case.dilation, self.case.stride
        reach = self.case.rows.reach, self.case.columns.reach
        return sliding_window_view(x, reach, (2, 3))[:, :, ::stride, ::stride, ::down, ::along]

    def forward(self) -> np.ndarray:
        parts = zip(self.windows, self.weights, strict=True)
        return np.concatenate([np.tensordot(x, w, ([1, 4, 5], [1, 2, 3])) for x, w in parts], 3).transpose(0, 3, 1, 2)

    def weight_gradient(self, grad: np.ndarray) -> np.ndarray:
        parts = zip(np.split(grad, self.case.groups, 1), self.windows, strict=True)
        return np.concatenate([np.tensordot(g, x, ([0, 2, 3], [0, 2, 3])) for g, x in parts])

    def data_gradient(self, grad: np.ndarray) -> np.ndarray:
        parts = zip(np.split(grad, self.case.groups, 1), self.weights, strict=True)
        return np.concatenate([self._data_gradient(g, weight) for g, weight in parts], 1)

    def _data_gradient(self, grad: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Return each tap's products with dy, added to the pixels that the tap sees."""
        (down, along), stride = self.case.dilation, self.case.stride
        dx = np.zeros((grad.shape[0], weight.shape[1], *self.padded))
        height, width = grad.shape[2:]
        for i, j in np.ndindex(weight.shape[2:]):
            rows = slice(i * down, i * down + (height - 1) * stride + 1, stride)
            columns = slice(j * along, j * along + (width - 1) * stride + 1, stride)
            dx[:, :, rows, columns] += np.einsum("nohw,oc->nchw", grad, weight[:, :, i, j])
        (top, left), (rows_of_x, columns_of_x) = self.case.padding, (self.case.rows.size, self.case.columns.size)
        return dx[:, :, top : top + rows_of_x, left : left + columns_of_x]


def pooled(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 2 x 2 maxima of relu(y), and per pixel of y whether it gets the maximum's gradient."""
    images, outputs, height, width = y.shape
    even = y[:, :, : height // 2 * 2, : width // 2 * 2]
    windows = even.reshape(images, outputs, height // 2, 2, width // 2, 2).transpose(0, 1, 2, 4, 3, 5)
    windows = windows.reshape(*windows.shape[:4], 4)
    best = windows.max(-1)
    is_place = (np.arange(4) == windows.argmax(-1)[..., None]) & (best > 0)[..., None]
    gets = np.zeros(y.shape, bool)
    gets[:, :, : height // 2 * 2, : width // 2 * 2] = (
        is_place.reshape(*best.shape, 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(even.shape)
    )
    return np.maximum(best, 0), gets


@contextmanager
def _way(*, products: bool = False, winograd: bool = False, builds_from: int = 1 << 60) -> Iterator[None]:
    """Choose how convolutions are computed: as products, with Winograd's algorithm or without, or in a build for their
    width from so many multiplications.
    """
    suit, work, suit_winograd = convolution_products.suit, convolution._WORTH_A_BUILD, convolution_winograd.suit
    convolution_products.suit = lambda g, device: products and device.is_cpu
    convolution_winograd.suit = lambda g, device: winograd and device.is_cpu
    least, convolution_winograd._LEAST_SUMMED_TILES = convolution_winograd._LEAST_SUMMED_TILES, 0
    convolution._WORTH_A_BUILD = builds_from
    try:
        yield
    finally:
        convolution_products.suit, convolution._WORTH_A_BUILD = suit, work
        convolution_winograd.suit, convolution_winograd._LEAST_SUMMED_TILES = suit_winograd, least


def check(device: Device, case: Case) -> None:
    """Compare the result and the gradients of the build that takes every size."""
    with _way():
        _check_alone(device, case)


def check_as_products(device: Device, case: Case) -> None:
    """The same for convolutions as sums of products."""
    with _way(products=True):
        _check_alone(device, case)


def check_of_winograd(device: Device, case: Case) -> None:
    """The same for Winograd's algorithm, which is exact for whole numbers."""
    with _way(products=True, winograd=True):
        _check_alone(device, case)


def check_of_one_width(device: Device, case: Case) -> None:
    """The same for the build for one width, and fused with ReLU and pool."""
    with _way(builds_from=0):
        _check_alone(device, case)
        if case.rows.size + 2 * case.rows.padding - case.rows.kernel >= 1:
            for needs_dx in (False, True):
                _check_fused(device, case, needs_dx)


def check_in_groups(device: Device, case: Case) -> None:
    """The same for groups and taps that are apart, in the build for one width where there is one."""
    with _way(builds_from=0 if case.seed % 5 == 0 else 1 << 60):
        _check_alone(device, case)


def _values(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shapes = (
        (case.images, case.groups * case.channels, case.rows.size, case.columns.size),
        (case.groups * case.outputs, case.channels, case.rows.kernel, case.columns.kernel),
        (case.groups * case.outputs,),
    )
    x, weight, bias = (whole_numbers(case.seed + index, *shape) for index, shape in enumerate(shapes))
    return x, weight, bias


def _check_alone(device: Device, case: Case) -> None:
    hosts = _values(case)
    x, weight, bias = (leaf(device, host) for host in hosts)
    has_bias = case.seed % 4 > 0
    y = conv2d(x, weight, bias if has_bias else None, case.stride, case.padding, case.dilation, case.groups)
    reference = Reference(*hosts[:2], case)
    assert_equal(y, reference.forward() + hosts[2][:, None, None] * has_bias, "result")
    grad = whole_numbers(case.seed + 3, *y.shape)
    y.backward(leaf(device, grad, False))
    assert_equal(x.grad, reference.data_gradient(grad), "data gradient")
    assert_equal(weight.grad, reference.weight_gradient(grad), "weight gradient")
    if has_bias:
        assert_equal(bias.grad, grad.sum((0, 2, 3), dtype=np.float64), "bias gradient")


def _check_fused(device: Device, case: Case, needs_dx: bool) -> None:
    hosts = _values(case)
    x, weight, bias = leaf(device, hosts[0], needs_dx), leaf(device, hosts[1]), leaf(device, hosts[2])
    y = conv_relu_pool(x, weight, bias, case.padding)
    reference = Reference(*hosts[:2], case)
    best, gets = pooled(reference.forward() + hosts[2][:, None, None])
    assert_equal(y, best, "fused result")
    grad = whole_numbers(case.seed + 3, *y.shape)
    y.backward(leaf(device, grad, False))
    spread = np.zeros(gets.shape)
    height, width = (2 * n for n in best.shape[2:])
    spread[:, :, :height, :width] = grad.repeat(2, 2).repeat(2, 3) * gets[:, :, :height, :width]
    if needs_dx:
        assert_equal(x.grad, reference.data_gradient(spread), "fused data gradient")
    assert_equal(weight.grad, reference.weight_gradient(spread), "fused weight gradient")
    assert_equal(bias.grad, spread.sum((0, 2, 3)), "fused bias gradient")


CONVOLUTION = Family("convolution", every, check)
CONVOLUTION_OF_ONE_WIDTH = Family("convolution of one width", of_one_width, check_of_one_width, ("cpu",))
CONVOLUTION_IN_GROUPS = Family("convolution in groups", in_groups, check_in_groups)
CONVOLUTION_AS_PRODUCTS = Family("convolution as products", every, check_as_products, ("cpu",))
CONVOLUTION_OF_WINOGRAD = Family("convolution by Winograd", of_winograd, check_of_winograd, ("cpu",))
