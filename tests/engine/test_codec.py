"""Compressed gradients on the device: the same bits as NumPy for coded values, residuals and means."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clcomm.base.host.arrays import BFLOAT16, aligned_empty, aligned_zeros, from_bfloat16
from clcomm.engine import Device
from clcomm.engine import codec as device_codec
from clcomm.engine import fold as device_fold
from clcomm.engine.codec import DeviceCodec
from clcomm.engine.fold import DeviceFold
from clcomm.sync.compression.coding import BLOCK, chars_nbytes, largest_nbytes
from tests.coding import Coding
from training.engines.rehearsal import Rehearsal

#: Where rounding, overflow and underflow of either half show, beside ordinary numbers.
SPECIAL = np.array(
    [0.0, -0.0, 1e-45, 6e-8, -3e-8, 2.9802322e-08, 6.1e-5, 65504.0, 65519.9, 65520.0, 1e38, -3.4e38, 1 / 3], np.float32
)
SIZES = st.integers(1, 3 * BLOCK + 7)


@pytest.fixture(scope="module")
def codings(device):
    return Coding(codec_of(device)), Coding(None)


def codec_of(device) -> DeviceCodec:
    codec = DeviceCodec.on(device)
    assert (codec is not None) == device.is_cpu
    if codec is None:
        pytest.skip("gradients would have to travel to this device")
    return codec


def aligned(values: np.ndarray) -> np.ndarray:
    array = aligned_empty(values.shape, values.dtype)
    array[...] = values
    return array


def drawn(size: int, seed: int, infinite: bool = False) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(size) * 10.0 ** rng.integers(-9, 6, size)).astype(np.float32)
    places = rng.random(size) < 0.2
    values[places] = rng.choice([*SPECIAL, *([np.inf, -np.inf, np.nan] if infinite else [])], places.sum())
    return aligned(values)


def assert_same(one: np.ndarray, other: np.ndarray) -> None:
    """Compare bits, or that both are NaN."""
    nan = np.isnan(one) if one.dtype.kind == "f" else np.zeros(one.shape, bool)
    assert one.dtype == other.dtype and one[~nan].tobytes() == other[~nan].tobytes()
    assert np.isnan(other[nan]).all()


def was_taken(work) -> None:
    """Run a prepared function, which must be the device's: NumPy's is a partial."""
    assert work.__qualname__.startswith("PreparedKernels.run")
    work()


@settings(deadline=None, max_examples=60)
@given(size=SIZES, divisor=st.integers(1, 9), seed=st.integers(0, 99))
def test_halves(codings, size, divisor, seed):
    values, (halves, by_numpy) = drawn(size, seed, True), (aligned_zeros(2 * size).view(np.float16) for _ in "ab")
    was_taken(codings[0].to_halves(values, halves, divisor))
    codings[1].to_halves(values, by_numpy, divisor)()
    assert_same(by_numpy, halves)
    with np.errstate(all="ignore"):
        assert_same((values / np.float32(divisor)).astype(np.float16), halves)


def test_every_half_becomes_its_float(codings):
    halves, values = (
        aligned(np.arange(1 << 16, dtype=np.uint16)).view(np.float16),
        aligned_empty((1 << 16,), np.float32),
    )
    was_taken(codings[0].from_halves(halves, values))
    assert_same(halves.astype(np.float32), values)


@settings(deadline=None, max_examples=60)
@given(size=SIZES, divisor=st.integers(1, 9), seed=st.integers(0, 99))
def test_bfloat16(codings, size, divisor, seed):
    values, (halves, by_numpy) = drawn(size, seed, True), (aligned_zeros(2 * size).view(BFLOAT16) for _ in "ab")
    was_taken(codings[0].to_bfloat16(values, halves, divisor))
    codings[1].to_bfloat16(values, by_numpy, divisor)()
    assert_same(from_bfloat16(by_numpy), from_bfloat16(halves))
    back, numpys = aligned_empty((size,), np.float32), aligned_empty((size,), np.float32)
    was_taken(codings[0].from_bfloat16(halves, back))
    codings[1].from_bfloat16(halves, numpys)()
    assert_same(numpys, back)


@settings(deadline=None, max_examples=60)
@given(size=SIZES, ranks=st.integers(1, 5), seed=st.integers(0, 99), infinite=st.booleans())
def test_chars(codings, size, ranks, seed, infinite):
    sides = []
    for coding, check in ((codings[0], was_taken), (codings[1], lambda work: work())):
        rows = aligned_zeros(ranks * chars_nbytes(size)).reshape(ranks, -1)
        residual, out = aligned_zeros(4 * size).view(np.float32), aligned_empty((size,), np.float32)
        for rank in range(ranks):  # each with what the one before did not send
            check(coding.to_chars(drawn(size, seed + rank, infinite), residual, rows, rank))
        check(coding.mean_of_chars(rows, out))
        scales = rows[:, : 4 * (chars_nbytes(size) // (BLOCK + 4))].copy().view(np.float32)
        sides.append((scales, rows[:, scales.shape[1] * 4 :], residual, out))
    for mine, numpys in zip(*sides, strict=True):
        assert_same(numpys, mine)
    assert np.isfinite(sides[0][2]).all()


@settings(deadline=None, max_examples=60)
@given(size=SIZES, ranks=st.integers(1, 5), share=st.floats(0.001, 1), seed=st.integers(0, 99), few=st.booleans())
def test_the_largest(codings, size, ranks, share, seed, few):
    chosen, sides = int(np.ceil(share * size)), []
    for coding, check in ((codings[0], was_taken), (codings[1], lambda work: work())):
        rows = aligned_zeros(ranks * largest_nbytes(chosen, np.dtype(np.float32))).reshape(ranks, -1)
        residual, out = aligned_zeros(4 * size).view(np.float32), aligned_empty((size,), np.float32)
        for rank in range(ranks):
            values = drawn(size, seed + rank)
            if few:  # many of the same magnitude
                values[:] = np.sign(values) * np.round(np.abs(values) % 3)
            check(coding.to_largest(values, residual, rows, rank))
        check(coding.mean_of_largest(rows, out))
        sides.append((rows, residual, out))
    for mine, numpys in zip(*sides, strict=True):
        assert_same(numpys, mine)


def test_of_largest_nan_and_inf_come_first_and_are_not_carried_on(codings):
    for coding in codings:
        values, residual = drawn(300, 5), aligned_zeros(1200).view(np.float32)
        values[[7, 70, 200]] = np.nan, -np.inf, np.inf
        rows = aligned_zeros(largest_nbytes(2, np.dtype(np.float32))).reshape(1, -1)
        coding.to_largest(values, residual, rows, 0)()
        places = rows[0, :8].copy().view(np.uint32)
        assert set(places.tolist()) < {7, 70, 200} and 7 in places
        assert np.isfinite(residual).all()


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 40), columns=st.integers(1, 40), rank=st.integers(1, 5), seed=st.integers(0, 99))
def test_products_with_factors(codings, rows, columns, rank, seed):
    rng = np.random.default_rng(seed)
    matrix, first, second = (
        aligned(rng.standard_normal(shape, np.float32)) for shape in ((rows, columns), (rank, rows), (rank, columns))
    )
    for coding, check in zip(codings, (was_taken, lambda work: work()), strict=True):
        thin, other = aligned_empty((rank, rows), np.float32), aligned_empty((rank, columns), np.float32)
        check(coding.times(matrix, second, thin))
        check(coding.transposed_times(matrix, first, other))
        np.testing.assert_allclose(thin, second.astype(float) @ matrix.T, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(other, first.astype(float) @ matrix, rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 40), columns=st.integers(1, 40), rank=st.integers(1, 5), seed=st.integers(0, 99))
def test_what_factors_make_has_the_same_bits_wherever_it_is_made(codings, rows, columns, rank, seed):
    first, second = drawn(rank * rows, seed, True), drawn(rank * columns, seed + 1)
    first, second = first.reshape(rank, rows), second.reshape(rank, columns)
    mine, numpys = (aligned_empty((rows, columns), np.float32) for _ in "ab")
    was_taken(codings[0].outer(first, second, mine))
    codings[1].outer(first, second, numpys)()
    assert_same(numpys, mine)


def test_other_dtypes_and_memory_that_is_not_aligned_are_numpys(device):
    codec, values = codec_of(device), aligned_zeros(4 * 65).view(np.float32)
    halves = aligned_zeros(2 * 65).view(np.float16)
    assert codec.to_halves(values, halves, 2) is not None
    assert codec.to_halves(values[1:], halves[:64], 2) is None
    assert codec.to_halves(aligned_zeros(8 * 65).view(np.float64), halves, 2) is None
    halves.flags.writeable = False
    assert codec.to_halves(values, halves, 2) is None


@pytest.mark.parametrize("scheme", ["none", "fp16", "bf16", "int8", "topk:0.1", "powersgd:2"])
def test_what_is_rehearsed_is_all_that_a_scheme_needs(device, scheme):
    fresh = Device(device.cl_device, kind=device.kind)
    rehearsal = Rehearsal(fresh)
    device_codec.rehearse(rehearsal, scheme)
    rehearsal.build(rehearsal.programs)
    built, kernels = set(fresh._programs), set(fresh._kernels)
    assert bool(kernels) == (device.is_cpu and scheme != "none")
    coding = Coding(DeviceCodec.on(fresh))
    values, halves = drawn(300, 0), aligned_zeros(600).view(np.float16)
    residual, rows = aligned_zeros(1200).view(np.float32), aligned_zeros(1200).reshape(1, -1)
    if scheme == "fp16":
        coding.to_halves(values, halves, 2)
        coding.from_halves(halves, values)
        if device.runs_in_caller:
            DeviceFold(fresh)([halves, halves.copy()], halves, 1)
    elif scheme == "bf16":
        wide = halves.view(BFLOAT16)
        coding.to_bfloat16(values, wide, 2)
        coding.from_bfloat16(wide, values)
        if device.runs_in_caller:
            DeviceFold(fresh)([wide, wide.copy()], wide, 1)
    elif scheme == "int8":
        coding.to_chars(values, residual, rows, 0)
        coding.mean_of_chars(rows, values)
    elif scheme == "topk:0.1":
        coding.to_largest(values, residual, rows, 0)
        coding.mean_of_largest(rows, values)
    elif scheme == "powersgd:2":
        matrix, factor, thin = values.reshape(10, 30), residual[:60].reshape(2, 30), drawn(20, 1).reshape(2, 10)
        coding.times(matrix, factor, thin)
        coding.transposed_times(matrix, thin, factor)
        coding.outer(thin, factor, matrix)
    assert (set(fresh._programs), set(fresh._kernels)) == (built, kernels)


def test_blocks_are_alike_on_both_sides():
    assert device_codec.BLOCK == BLOCK
    assert device_fold.BFLOAT16 == BFLOAT16
