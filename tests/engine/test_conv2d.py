"""Convolution at the edges of float32, its bits and what it refuses; tests/families has its values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError
from clcomm.engine import tuning
from clcomm.engine.device import Device
from clcomm.engine.ops import convolution, convolution_products, convolution_winograd
from clcomm.engine.ops.conv2d import conv2d, conv_relu_pool
from clcomm.engine.tensor import Tensor
from tests.engine.values import assert_close, drawn
from tests.families.convolutions import Axis, Case, Reference
from tests.helpers import cpus_own
from tests.sampling import some

Pair = tuple[int, int]


def reference_of(x: np.ndarray, weight: np.ndarray, padding: Pair) -> Reference:
    """Return the family's reference of a convolution with stride 1."""
    rows, columns = (Axis(weight.shape[n], padding[n - 2], x.shape[n]) for n in (2, 3))
    return Reference(x, weight, Case(*x.shape[:2], len(weight), 1, rows, columns, 0))


def test_a_nan_pixel_reaches_its_windows_and_nothing_else(device: Device) -> None:
    x, w = drawn(1, 9, 2, 7, 7), drawn(2, 5, 2, 3, 3)
    x[8, 1, 0, 6] = np.nan
    w[:, 1] = 0  # 0 * NaN is NaN all the same
    y = conv2d(Tensor(x, device), Tensor(w, device), padding=1).numpy()
    expected = np.zeros(y.shape, bool)
    expected[8, :, :2, 5:] = True
    np.testing.assert_array_equal(np.isnan(y), expected)


@pytest.mark.parametrize("way", ["direct", "products", "winograd"])
def test_an_infinite_weight_does_not_spoil_borders_through_padding(
    device: Device, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(convolution_products, "suit", lambda g, device: way != "direct" and device.is_cpu)
    monkeypatch.setattr(convolution_winograd, "suit", lambda g, device: way == "winograd" and device.is_cpu)
    x, w = np.ones((1, 1, 4, 4), np.float32), np.zeros((1, 1, 3, 3), np.float32)
    w[0, 0, 0, 0] = np.inf
    leaf = Tensor(x, device, requires_grad=True)
    y = conv2d(leaf, Tensor(w, device), padding=1)
    expected = np.full((4, 4), np.inf)
    expected[0, :] = expected[:, 0] = 0
    np.testing.assert_array_equal(y.numpy()[0, 0], expected)
    y.backward(1.0)
    expected = np.full((4, 4), np.inf)
    expected[3, :] = expected[:, 3] = 0
    np.testing.assert_array_equal(leaf.grad.numpy()[0, 0], expected)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38, 2.0**48])
@pytest.mark.parametrize("where", ["x", "weight", "gradient"])
def test_winograds_algorithm_leaves_unusual_numbers_to_products(
    monkeypatch: pytest.MonkeyPatch, where: str, value: float
) -> None:
    device, place = cpus_own(), (1, 3, 2, 1)
    hosts = {"x": drawn(1, 5, 64, 9, 7), "weight": drawn(2, 65, 64, 3, 3), "gradient": drawn(3, 5, 65, 9, 7)}
    hosts[where][place] = value

    def results() -> list[np.ndarray]:
        x, weight = (Tensor(hosts[name], device, requires_grad=True) for name in ("x", "weight"))
        y = conv2d(x, weight, padding=1)
        y.backward(Tensor(hosts["gradient"], device))
        return [y.numpy(), x.grad.numpy(), weight.grad.numpy()]

    with np.errstate(all="ignore"):
        found = results()
        monkeypatch.setattr(convolution_winograd, "suit", lambda g, device: False)
        expected = results()
    assert any(mine.tobytes() == theirs.tobytes() for mine, theirs in zip(found, expected, strict=True))
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.isfinite(mine), np.isfinite(theirs))
        np.testing.assert_array_equal(np.isnan(mine), np.isnan(theirs))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pads", [(0, 0), (1, 1), (2, 1)])
def test_winograds_algorithm_adds_no_overflow(pads: Pair) -> None:
    """Products of four pixels that are finite, while those of their transforms are 9/4 of them."""
    device, large = cpus_own(), np.float32(2.0**62.75)
    x, w = np.zeros((2, 64, 12, 13), np.float32), np.zeros((64, 64, 3, 3), np.float32)
    x[1, 5, 5:7, 5:7], w[3, 5] = large, large
    leaves = [Tensor(host, device, requires_grad=True) for host in (x, w)]
    y = conv2d(*leaves, padding=pads)
    reference = reference_of(x, w, pads)
    np.testing.assert_allclose(y.numpy(), reference.forward(), rtol=1e-6)
    grad = np.zeros(y.shape, np.float32)
    grad[1, 3, 5:7, 5:7] = large
    y.backward(Tensor(grad, device))
    np.testing.assert_allclose(leaves[0].grad.numpy(), reference.data_gradient(grad), rtol=1e-6)
    np.testing.assert_allclose(leaves[1].grad.numpy(), reference.weight_gradient(grad), rtol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("x_shape", "outputs", "padding"),
    [((2, 64, 16, 16), 64, 1), ((4, 70, 9, 9), 65, 2), ((3, 65, 32, 5), 80, 0), ((17, 128, 4, 4), 64, 1)],
)
def test_winograds_algorithm_is_as_exact_as_products(x_shape, outputs, padding) -> None:
    device = cpus_own()
    g = convolution.Geometry(*x_shape, outputs, 3, 3, 1, padding, padding)
    assert convolution_winograd.suit(g, device)
    hosts = drawn(1, *x_shape), drawn(2, outputs, x_shape[1], 3, 3), drawn(3, outputs)
    leaves = [Tensor(host, device, requires_grad=True) for host in hosts]
    y = conv2d(*leaves, padding=padding)
    reference = reference_of(*hosts[:2], (padding, padding))
    grad = drawn(4, *y.shape)
    y.backward(Tensor(grad, device))
    for mine, exact in (
        (y, reference.forward() + hosts[2][:, None, None]), (leaves[0].grad, reference.data_gradient(grad)),
        (leaves[1].grad, reference.weight_gradient(grad)),
    ):  # fmt: skip
        apart = np.abs(mine.numpy() - exact).max() / np.abs(exact).max()
        assert apart < 4e-6


@pytest.mark.parametrize(("op", "channels"), [(conv2d, 3), (conv_relu_pool, 2)])
def test_same_bits_every_time_and_on_any_number_of_cores(
    device: Device, monkeypatch: pytest.MonkeyPatch, op: Callable[..., Tensor], channels: int
) -> None:
    hosts = drawn(1, 70, channels, 9, 9), drawn(2, 6, channels, 3, 3), drawn(3, 6)

    def bits() -> list[bytes]:
        leaves = [Tensor(host, device, requires_grad=True) for host in hosts]
        y = op(*leaves, padding=1)
        y.backward(1.0)
        return [t.numpy().tobytes() for t in (y, *(leaf.grad for leaf in leaves))]

    first = bits()
    for units in (1, 3, 16):
        monkeypatch.setattr(device, "compute_units", units)
        assert bits() == first
    monkeypatch.setattr(device, "local_bytes", 16 * 1024)
    assert bits() == first


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("x_shape", "outputs", "kernel", "stride"),
    [
        ((3, 70, 9, 9), 31, 3, 1),
        ((2, 17, 20, 20), 50, 3, 2),
        ((1, 300, 7, 7), 20, 1, 1),
        ((5, 3, 17, 19), 64, 5, 3),
        ((4, 70, 9, 9), 65, 3, 1),
    ],
)
def test_products_have_the_same_bits_with_every_tile_and_number_of_cores(x_shape, outputs, kernel, stride) -> None:
    hosts = drawn(1, *x_shape), drawn(2, outputs, x_shape[1], kernel, kernel), drawn(3, outputs)
    bits = set()
    for number, tile in enumerate(some(tuning.CHOICES["cpu"]["gemm_tile"], 3)):
        device = Device(cpus_own().cl_device, tuning=replace(tuning.Tuning(), gemm_tile=tile))
        device.compute_units = 1 + number % 3
        geometry = convolution.Geometry(*x_shape, outputs, kernel, kernel, stride, 1, 1)
        assert convolution_products.suit(geometry, device)
        leaves = [Tensor(host, device, requires_grad=True) for host in hosts]
        y = conv2d(*leaves, stride=stride, padding=1)
        y.backward(Tensor(drawn(4, *y.shape), device))
        bits.add(tuple(t.numpy().tobytes() for t in (y, *(leaf.grad for leaf in leaves))))
    assert len(bits) == 1


@pytest.mark.parametrize("width", [5, 14, 28, 64, 65, 200, 256])
def test_results_that_wait_in_local_memory_fit_there(width: int) -> None:
    """The larger tiles are left out where the device's local memory is too small for them."""
    g = convolution.Geometry(64, 3, 8, width, 32, 3, 3, 1, 1, 1)
    tiles = []
    for kilobytes in (8, 32, 64, 256, 4096):
        tile = convolution._chosen_tile(g, g.channels, g.outputs, 16, 1, 1024 * kilobytes)
        rows, pooled = 2 * (width + 3), 8 + width // 2  # of `convolve_relu_pool`
        if tile.blocks == 2:
            assert 32 * tile.blocks * tile.outputs * max(rows + pooled, 8 + 48) <= 1024 * kilobytes
        tiles.append(tile.blocks * tile.outputs)
    assert tiles == sorted(tiles) and tiles[-1] == (16 if width <= 64 else 8)


# Directly, as products, and by Winograd's algorithm.
@pytest.mark.parametrize(("channels", "outputs", "side"), [(3, 5, 6), (64, 63, 6), (64, 65, 13)])
def test_an_image_does_not_depend_on_the_images_beside_it(
    device: Device, channels: int, outputs: int, side: int
) -> None:
    x, w = drawn(1, 11, channels, side, 12), Tensor(drawn(2, outputs, channels, 3, 3), device)
    b = Tensor(drawn(3, outputs), device)
    whole = conv2d(Tensor(x, device), w, b, padding=1).numpy()
    for image in (0, 7, 10):
        np.testing.assert_array_equal(
            conv2d(Tensor(x[image : image + 1], device), w, b, padding=1).numpy()[0], whole[image]
        )


@pytest.mark.parametrize(("needed", "kernels"), [(0, {"convolve"}), (1, {"weight_gradient"}), (2, set())])
def test_gradients_that_nobody_needs_are_not_computed(
    device: Device, monkeypatch: pytest.MonkeyPatch, needed: int, kernels: set[str]
) -> None:
    hosts = drawn(1, 3, 2, 5, 5), drawn(2, 4, 2, 3, 3), drawn(3, 4)
    leaves = [Tensor(host, device, requires_grad=index == needed) for index, host in enumerate(hosts)]
    y = conv2d(*leaves)
    launched = set()
    launch = device.launch
    monkeypatch.setattr(device, "launch", lambda k, *rest: (launched.add(k.function_name), launch(k, *rest)))
    y.backward(Tensor(drawn(4, *y.shape), device))
    assert launched & {"convolve", "weight_gradient"} == kernels
    assert [leaf.grad is not None for leaf in leaves] == [index == needed for index in range(3)]


@pytest.mark.parametrize(
    ("x", "weight", "options", "message"),
    [
        ((2, 3, 4), (1, 3, 1, 1), {}, "conv2d: x: expected 4 dimensions (N, C, H, W), got shape (2, 3, 4)"),
        ((2, 3, 4, 4), (1, 3, 1), {}, "conv2d: weight: expected 4 dimensions"),
        ((2, 3, 4, 4), (1, 2, 1, 1), {}, "conv2d: x: expected 2 channels"),
        ((2, 3, 4, 4), (1, 3, 5, 5), {}, "conv2d: weight: expected a kernel no larger than the image"),
        ((2, 3, 4, 4), (1, 3, 1, 1), {"stride": 0}, "conv2d: stride: expected a whole number from 1 up, or two"),
        ((2, 3, 4, 4), (1, 3, 1, 1), {"padding": -1}, "conv2d: padding: expected a whole number from 0 up"),
        ((2, 3, 4, 4), (1, 3, 1, 1), {"padding": (1, 2, 3)}, "conv2d: padding: expected a whole number from 0 up"),
        ((2, 3, 4, 4), (2, 3, 1, 1), {"bias": (3,)}, "conv2d: bias: expected shape (2,)"),
    ],
)
def test_one_line_says_what_does_not_fit(device: Device, x, weight, options: dict, message: str) -> None:
    if "bias" in options:
        options = {**options, "bias": Tensor(np.ones(options["bias"], np.float32), device)}
    with pytest.raises(ArgumentError) as caught:
        conv2d(Tensor(drawn(1, *x), device), Tensor(drawn(2, *weight), device), **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_images_of_no_rows_are_refused() -> None:
    with pytest.raises(ArgumentError, match="conv2d: "):
        conv2d(Tensor(np.ones((1, 1, 0, 4), np.float32)), Tensor(np.ones((2, 1, 3, 3), np.float32)))


@pytest.mark.parametrize(("width", "kernel"), [(4, (3, 3)), (5, (2, 1)), (14, (3, 3)), (15, (4, 5)), (28, (3, 3))])
@pytest.mark.parametrize("images", [1, 9])
def test_the_build_for_one_width_gives_the_same_bits(
    device: Device, monkeypatch: pytest.MonkeyPatch, width: int, kernel: Pair, images: int
) -> None:
    padding = (1, kernel[1] // 2)
    hosts = drawn(1, images, 3, 6, width), drawn(2, 7, 3, *kernel), drawn(3, 7)
    bits = []
    for least_work in (0, 1 << 60):
        monkeypatch.setattr(convolution, "_WORTH_A_BUILD", least_work)
        x, w, b = (Tensor(host, device, requires_grad=True) for host in hosts)
        y = conv2d(x, w, b, padding=padding)
        y.backward(Tensor(drawn(4, *y.shape), device))
        bits.append((y.numpy().tobytes(), x.grad.numpy().tobytes()))
    assert bits[0] == bits[1]
    reference = reference_of(hosts[0], hosts[1], padding)
    assert_close(y.numpy(), reference.forward() + hosts[2][:, None, None])
