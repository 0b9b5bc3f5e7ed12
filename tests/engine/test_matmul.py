"""Matrix products: NaN and Inf, bits, and wrong arguments; tests/families has their values and gradients."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.engine.device import Device
from clcomm.engine.ops.batched_matmul import matmul
from clcomm.engine.ops.convolution_products import chosen_block
from clcomm.engine.ops.matmul import linear, multiply, transposed_copy
from clcomm.engine.tensor import Tensor, empty
from clcomm.engine.tuning import Tuning, choices
from tests.engine.values import drawn

SIZES = st.one_of(st.integers(1, 40), st.sampled_from([47, 48, 49, 64, 67, 97, 128, 203]))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_inf_in_narrow_products(device: Device, value: float) -> None:
    x, w = drawn(1, 5, 77), drawn(2, 3, 77)
    x[4, 70] = w[2, 69] = value  # both are loaded twice, once to be left out
    y = linear(Tensor(x, device), Tensor(w, device)).numpy()
    assert np.isfinite(y[:4, :2]).all() and not np.isfinite(y[4]).any() and not np.isfinite(y[:, 2]).any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_inf_reach_their_row_and_column_and_nothing_else(device: Device, value: float) -> None:
    a, b = drawn(1, 13, 21), drawn(2, 21, 19)
    a[12, 20] = value
    b[:, 18] = 0
    product = matmul(Tensor(a, device), Tensor(b, device)).numpy()
    assert not np.isfinite(product[12]).any()
    assert np.isnan(product[12, 18])  # 0 * NaN and 0 * Inf are NaN
    assert np.isfinite(product[:12]).all()
    right = matmul(Tensor(b.T.copy(), device), Tensor(a.T.copy(), device)).numpy()
    assert np.isfinite(right[:, :12]).all() and not np.isfinite(right[:, 12]).any()


@given(rows=SIZES, columns=SIZES)
@example(rows=16, columns=16)
@example(rows=48, columns=31)
@example(rows=33, columns=64)
def test_columns_of_a_are_turned_bit_for_bit(device: Device, rows: int, columns: int) -> None:
    """As before a large product whose A is transposed, on the CPU's kernels."""
    if device.is_cpu:
        matrix = drawn(5, rows, columns)
        matrix[rows // 2, columns // 2] = np.nan
        assert transposed_copy(Tensor(matrix, device)).numpy().tobytes() == matrix.T.tobytes()


def test_relu_lets_nan_through(device: Device) -> None:
    x = Tensor(np.array([[np.nan], [-1.0], [2.0]], np.float32), device, requires_grad=True)
    y = linear(x, Tensor(np.ones((1, 1), np.float32), device), relu=True)
    np.testing.assert_array_equal(y.numpy(), [[np.nan], [0], [2]])
    y.backward(1.0)
    np.testing.assert_array_equal(x.grad.numpy(), [[1], [0], [1]])


@pytest.mark.parametrize("sizes", [(131, 150, 77), (64, 10, 33), (257, 3, 40)])
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
def test_no_block_of_a_gpu_changes_a_bit(device: Device, sizes: tuple[int, ...], turned: tuple[bool, bool]) -> None:
    rows, columns, depth = sizes
    pairs = zip([(rows, depth), (depth, columns)], turned, strict=True)
    shapes = [shape[::-1] if turn else shape for shape, turn in pairs]
    found = set()
    for block in choices("gpu")["gemm_block"]:
        own = device_of_block(device, block)
        a, b = (Tensor(drawn(seed, *shape), own) for seed, shape in enumerate(shapes))
        out = empty(own, (rows, columns))
        multiply(a, b, out, transpose_a=turned[0], transpose_b=turned[1])
        found.add(out.numpy().tobytes())
    assert len(found) == 1


@cache
def device_of_block(device: Device, block: tuple[int, int, int]) -> Device:
    own = Device(device.cl_device, kind="gpu", tuning=Tuning(gemm_block=block))
    own.compute_units = 1  # takes the block for any size
    return own


@pytest.mark.parametrize(
    ("units", "limits", "rows", "columns", "width"),
    [
        (1, (256, 32768), 128, 128, 128),
        (100, (256, 32768), 4096, 4096, 128),
        (100, (256, 32768), 1024, 640, 64),  # 80 blocks of 128
        (100, (256, 32768), 64, 128, 32),
        (1, (64, 32768), 128, 128, 64),  # no groups of 256
        (1, (256, 16384), 128, 128, 64),  # no local memory for 128
    ],
)
def test_a_gpu_takes_the_largest_block_that_fits_and_feeds_it(
    units: int, limits: tuple[int, int], rows: int, columns: int, width: int
) -> None:
    block = chosen_block((16, 8, 8), units, limits, rows, columns)
    assert block.width == width and limits[0] >= block.SIDE**2 and block.local_bytes <= limits[1]


def test_same_bits_every_time_and_on_any_number_of_cores(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = Tensor(drawn(1, 131, 700), device), Tensor(drawn(2, 700, 33), device)
    first = matmul(a, b).numpy().tobytes()
    assert all(matmul(a, b).numpy().tobytes() == first for _ in range(3))
    w, panels = Tensor(drawn(3, 9, 700), device), Tensor(drawn(4, 33, 64), device)
    c = Tensor(drawn(5, 23, 33), device)
    narrow, few_rows = linear(a, w).numpy().tobytes(), matmul(c, panels).numpy().tobytes()
    for units in (1, 3, 16):
        monkeypatch.setattr(device, "compute_units", units)
        assert matmul(a, b).numpy().tobytes() == first
        assert linear(a, w).numpy().tobytes() == narrow
        assert matmul(c, panels).numpy().tobytes() == few_rows


def test_a_row_does_not_depend_on_the_rows_beside_it(device: Device) -> None:
    x, w, b = drawn(1, 23, 65), drawn(2, 31, 65), drawn(3, 31)
    for outputs in (31, 7):
        weight, bias = Tensor(w[:outputs], device), Tensor(b[:outputs], device)
        whole = linear(Tensor(x, device), weight, bias).numpy()
        for row in range(23):
            alone = linear(Tensor(x[row : row + 1], device), weight, bias).numpy()
            np.testing.assert_array_equal(alone[0], whole[row])


def test_bits_are_the_same_whichever_kernel_takes_a_product(device: Device) -> None:
    a, b = drawn(1, 23, 300), drawn(2, 300, 48)
    whole_panels = matmul(Tensor(a, device), Tensor(b, device)).numpy()
    part_of_one = matmul(Tensor(a, device), Tensor(b[:, :47].copy(), device)).numpy()
    np.testing.assert_array_equal(whole_panels[:, :47], part_of_one)


def test_a_matrix_used_twice_gets_both_gradients(device: Device) -> None:
    host = drawn(1, 9, 9)
    a = Tensor(host, device, requires_grad=True)
    matmul(a, a).backward(1.0)
    ones = np.ones((9, 9))
    np.testing.assert_allclose(a.grad.numpy(), ones @ host.T + host.T @ ones, rtol=1e-5, atol=1e-5)


def test_gradients_that_nobody_needs_are_not_computed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = Tensor(drawn(1, 4, 5), device), Tensor(drawn(2, 3, 5), device, requires_grad=True)
    y = linear(x, w, Tensor(drawn(3, 3), device))
    launched = []
    launch = device.launch
    monkeypatch.setattr(device, "launch", lambda k, *rest: (launched.append(k.function_name), launch(k, *rest)))
    y.backward(Tensor(drawn(4, 4, 3), device))
    assert launched == ["gemm"]
    assert x.grad is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: matmul(t(3, 4), t(5, 2)), "matmul: expected as many rows in b as columns in a, got 5 and 4"),
        (lambda t: matmul(t(), t(3, 2)), "matmul: a: expected at least 1 dimension, got shape ()"),
        (lambda t: matmul(t(3), t(3, 2), transpose_a=True), "matmul: a: expected at least 2 dimensions, got shape (3,"),
        (lambda t: matmul(t(2, 3, 4), t(5, 4, 3)), "matmul: shapes (2,) and (5,) do not broadcast to each other"),
        (lambda t: matmul(t(3, 2), np.ones((2, 2))), "matmul: b: expected a Tensor"),
        (lambda t: matmul(t(3, 2), Tensor(np.ones((2, 2), int), t.device)), "matmul: b: expected a float32 tensor"),
        (lambda t: linear(t(3, 4), t(2, 5)), "linear: expected x with 5 columns"),
        (lambda t: linear(t(), t(2, 5)), "linear: expected x with 5 columns"),
        (lambda t: linear(t(3, 4), t(2, 4), t(3)), "linear: bias: expected shape (2,)"),
    ],
)
def test_one_line_says_what_does_not_fit(device: Device, call, message: str) -> None:
    class Make:
        def __init__(self) -> None:
            self.device = device

        def __call__(self, *shape: int) -> Tensor:
            return Tensor(np.ones(shape, np.float32), device)

    with pytest.raises(ArgumentError) as caught:
        call(Make())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_tensors_of_two_devices_are_refused(device: Device) -> None:
    ones = np.ones((2, 2), np.float32)
    other = Device(device.cl_device)
    with pytest.raises(ArgumentError, match="matmul: expected tensors on one device"):
        matmul(Tensor(ones, device), Tensor(ones, other))
