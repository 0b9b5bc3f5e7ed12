"""Sums over ranks on the device: the same bits as NumPy for any values and any number of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clcomm.base.errors import DeviceError
from clcomm.base.host.arrays import BFLOAT16, aligned_empty, from_bfloat16, to_bfloat16
from clcomm.comm.transport.reduction import prepared_reduction, reduce_in_rank_order
from clcomm.engine.fold import MOST_ROWS, DeviceFold
from tests.helpers import cpus_own

#: Values at which rounding, underflow and overflow show, beside ordinary ones.
SPECIAL = np.array([0.0, -0.0, 1e-45, -3e-39, 1.5e-38, 3e38, -3e38, np.inf, 1 / 3, 16777217.0], np.float32)


def test_the_former_name_still_imports():
    from clcomm.engine.fold import Fold

    assert Fold is DeviceFold


@pytest.fixture(scope="module")
def fold(device):
    cpus_own()
    return DeviceFold(device)


def rows_of(count: int, size: int, seed: int) -> list[np.ndarray]:
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        row = aligned_empty((size,), np.float32)
        row[:] = rng.standard_normal(size) * 10.0 ** rng.integers(-8, 8, size)
        places = rng.random(size) < 0.1
        row[places] = rng.choice(SPECIAL, places.sum())
        rows.append(row)
    return rows


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(2, 3 * MOST_ROWS),
    size=st.integers(1, 3000),
    divisor=st.integers(1, 40),
    in_place=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_bits_are_those_of_numpy(fold, rows, size, divisor, in_place, seed):
    arrays = rows_of(rows, size, seed)
    with np.errstate(all="ignore"):
        expected = arrays[0].copy()
        for row in arrays[1:]:
            expected += row
        expected /= np.float32(divisor)
    out = arrays[0] if in_place else aligned_empty((size,), np.float32)
    kept = [row.copy() for row in arrays[1:]]
    fold(arrays, out, divisor)()
    finite = np.isfinite(expected)
    assert same_bits(out[finite], expected[finite])
    np.testing.assert_array_equal(out[~finite], expected[~finite])  # the bits of a NaN are not specified
    assert all(map(same_bits, kept, arrays[1:]))


def test_it_is_prepared_once_and_sees_what_is_there_at_each_call(fold):
    rows, out = rows_of(3, 100, 0), aligned_empty((100,), np.float32)
    run = fold(rows, out, 1)
    for value in (1, 2, 5):
        for row in rows:
            row[:] = value
        run()
        assert (out == 3 * value).all()


def test_what_it_does_not_take_is_numpys(fold):
    wide, whole = aligned_empty((4, 64), np.float64), aligned_empty((4, 65), np.float32)
    out = aligned_empty((64,), np.float32)
    read_only = rows_of(2, 64, 0)
    read_only[1].flags.writeable = False
    assert fold(list(wide), aligned_empty((64,), np.float64), 1) is None
    assert fold(list(whole[:, 1:]), out, 1) is None
    assert fold([row[:0] for row in whole], out[:0], 1) is None
    assert fold([out], out, 1) is None
    assert fold(read_only, out, 1) is None
    reduce_in_rank_order([np.ones(3), np.full(3, 4.0)], total := np.empty(3), "mean")
    assert total.tolist() == [2.5] * 3
    prepared_reduction(list(wide), wide[0], "sum", fold=fold)()


@pytest.mark.parametrize("op", ["min", "max"])
def test_of_the_operations_it_does_sums_alone(fold, op):
    rows, out = rows_of(3, 64, 1), aligned_empty((64,), np.float32)
    prepared_reduction(rows, out, op, fold=lambda *_: pytest.fail("asked"))()
    assert same_bits(out, getattr(np, op)(rows, axis=0))


def test_what_the_device_refuses_is_numpys(fold, monkeypatch):
    rows, out = rows_of(3, 64, 2), aligned_empty((64,), np.float32)

    def refuse(*_):
        raise DeviceError("no")

    assert fold(rows, out, 1) is not None
    for method in ("_buffers", "_bound"):
        with monkeypatch.context() as patch:
            patch.setattr(fold._kernels, method, refuse)
            assert fold(rows, out, 1) is None
    monkeypatch.setattr(fold._kernels, "takes", lambda array: False)
    assert fold(rows, out, 1) is None


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(2, 6), size=st.integers(1, 2000), in_place=st.booleans(), seed=st.integers(0, 99))
def test_sums_of_halves_round_after_each_row(fold, rows, size, in_place, seed):
    arrays = []
    for row in rows_of(rows, size, seed):
        arrays.append(aligned_empty((size,), np.float16))
        with np.errstate(all="ignore"):
            arrays[-1][:] = row
    out = arrays[0] if in_place else aligned_empty((size,), np.float16)
    with np.errstate(all="ignore"):
        expected = arrays[0].copy()
        for row in arrays[1:]:
            expected += row
    fold(arrays, out, 1)()
    nan = np.isnan(expected)
    assert same_bits(out[~nan], expected[~nan]) and np.isnan(out[nan]).all()
    assert fold(arrays, out, 2) is None  # no kernel has a mean of halves


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(2, 6), size=st.integers(1, 2000), in_place=st.booleans(), seed=st.integers(0, 99))
def test_sums_of_bfloat16_round_once(fold, rows, size, in_place, seed):
    arrays = [aligned_empty((size,), BFLOAT16) for _ in range(rows)]
    for array, row in zip(arrays, rows_of(rows, size, seed), strict=True):
        array[:] = to_bfloat16(row)
    expected, out = np.empty(size, BFLOAT16), arrays[0] if in_place else aligned_empty((size,), BFLOAT16)
    reduce_in_rank_order([array.copy() for array in arrays], expected, "sum")
    fold(arrays, out, 1)()
    nan = np.isnan(from_bfloat16(expected))
    assert same_bits(out[~nan], expected[~nan]) and np.isnan(from_bfloat16(out[nan])).all()
    assert fold(arrays, out, 2) is None
